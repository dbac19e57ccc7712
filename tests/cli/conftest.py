"""Inputs and folders for tests that try every command."""

import importlib
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import trilith
from support.command_lines import make_inputs
from support.configs import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trilith.cli.app import run
from trilith.data.text.tokenizer_training import train_tokenizer

CORPUS = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n" * 20
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool['name'] }}\n{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ m['name'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def inputs():
    """A folder with one good input of each kind, and every module of the house imported."""
    root = Path(trilith.__path__[0])
    for file in sorted(root.glob("*/*.py")):
        ours = file.parent.name != "tests" and (file.parent / "__init__.py").exists()
        if ours and file.name != "__main__.py":
            importlib.import_module(f"trilith.{file.parent.name}.{file.stem}".removesuffix(".__init__"))
    folder = Path(tempfile.mkdtemp(prefix="trilith-faults-"))
    folder.chmod(0o755)
    make_inputs(folder)
    run(["--help"])  # what it reads and imports, forks need not read again
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small model with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("words") / "model"
    train_tokenizer([CORPUS], path, vocab_size=300)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(0)
    config = {**TINY_LLAMA, "vocab_size": 300, "max_position_embeddings": 128, "initializer_range": 0.5}
    model = LlamaForCausalLM(LlamaConfig(**config))
    # A run of byte tokens that is no UTF-8 is decoded otherwise as it grows: this model writes words.
    pieces = AutoTokenizer.from_pretrained(path).get_vocab()
    odd = [number for piece, number in pieces.items() if piece.startswith("<")]
    model.get_input_embeddings().weight.data[odd] = 0.0
    model.save_pretrained(path)
    return path


@pytest.fixture
def folder():
    """Make folders for trials, each with one for temporary files; every user may work there."""
    with tempfile.TemporaryDirectory(prefix="trilith-trials-") as root:
        Path(root).chmod(0o777)

        def make():
            where = Path(tempfile.mkdtemp(dir=root))
            (where / "tmp").mkdir()
            for each in (where, where / "tmp"):
                each.chmod(0o777)
            return where

        yield make
