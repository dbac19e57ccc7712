"""The worked example of docs/fine_tuning.md, command by command, on a model smaller than quickstart's."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pages import Page
from torch.nn import functional as F
from trilith.checkpoints import convert, load
from trilith.cli.app import run
from trilith.cli.quickstart import standard_library
from trilith.data import TokenFile
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.layers import gather_logits
from trilith.runs.metrics import read_metrics

PAGE = Page.read("docs/fine_tuning.md")
SMALLER = ["steps=60", "data.sequence_length=48", "data.global_batch=8", "data.micro_batch=8"]
SMALLER += ["optimizer.warmup=2"]
#: Greedily, so small a model writes little but blanks.
WRITE = ["--prompt", "The for statement", "--max-new-tokens", "24", "--temperature", "1", "--seed", "1"]

PRETRAINING = """
out = "pretrained"
steps = 60
[model]
tokenizer = "tokenizer"
config = { model_type = "llama", vocab_size = 400, hidden_size = 32, intermediate_size = 64, \
num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 128, \
tie_word_embeddings = true, bos_token_id = 1, eos_token_id = 2 }
[data]
tokens = "sources"
sequence_length = 48
global_batch = 8
micro_batch = 8
[optimizer]
lr = 2e-2
warmup = 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with ``quickstart/hf``, pretrained for a moment on Python's sources, and the doc's recipes."""
    folder = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sources = list(standard_library(60_000))
        train_tokenizer(sources, folder / "tokenizer", vocab_size=400)
        Path("sources.txt").write_text("\n\n".join(sources), encoding="utf-8")
        do("trilith tokenize sources.txt --tokenizer tokenizer --out sources")
        Path("pretrained.toml").write_text(PRETRAINING)
        assert run(["train", "pretrained.toml", "--quiet"]) == 0
        convert("pretrained", "quickstart/hf")
        for text in PAGE.blocks("toml"):
            Path(tomllib.loads(text)["out"].replace("-run", ".toml")).write_text(text)
        for line in "".join(PAGE.blocks("bash")).splitlines():
            do(line)
    return folder


def do(line):
    """One line of the doc, its runs shortened and in this process."""
    words = shlex.split(line)
    if words[:2] == ["trilith", "quickstart"]:
        return
    if words[0] == "python":
        code, _, file = words[2:]
        text = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
        assert len(text) > 100_000
        Path(file).write_text(text[:100_000], encoding="utf-8")
        return
    more = {"train": [*SMALLER, "--quiet"], "generate": ["--max-new-tokens", "4"]}
    more["tokenize"] = ["--workers", "1"]
    assert run([*words[1:], *more.get(words[1], [])]) == 0, line


@torch.no_grad()
def loss_of(model, place):
    """On the same stretch of the new text."""
    rows = TokenFile.open(place / "reference").tokens[: 64 * 49].reshape(64, 49)
    tokens = torch.from_numpy(rows.astype("int64"))
    logits = gather_logits(model(tokens[:, :-1]), 400)
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_the_new_text_is_learnt(place):
    before = loss_of(load(place / "quickstart" / "hf").model, place)
    for name in ("merged", "full"):
        after = loss_of(load(place / name).model, place)
        assert after < before - 0.05
        steps = read_metrics(place / f"{name.replace('merged', 'lora')}-run" / "metrics.jsonl")
        assert len(steps) == 60


def test_peft_and_transformers_load_the_results(place, monkeypatch):
    monkeypatch.chdir(place)
    space = PAGE.run_python()
    assert float(space["gap"]) < 1e-4
    ids = space["ids"]
    pairs = (("lora-run", space["adapted"]), ("full-run", space["full"]))
    for name, theirs in pairs:
        ours = load(name).model
        with torch.no_grad():
            torch.testing.assert_close(
                gather_logits(ours(ids), 400), theirs(ids).logits, rtol=1e-4, atol=1e-4
            )


def test_adapters_write_what_the_merged_model_writes(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    texts = []
    for words in (["merged"], ["lora-run"], ["quickstart/hf", "--adapter", "adapter"], ["quickstart/hf"]):
        capfd.readouterr()
        assert run(["generate", *words, *WRITE]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_lora_changed_the_linears_and_full_fine_tuning_everything(place):
    before, merged, full = (
        load_file(place / name / "model.safetensors") for name in ("quickstart/hf", "merged", "full")
    )
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert not [name for name in before if torch.equal(before[name], full[name])]
