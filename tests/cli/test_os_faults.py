"""Every command meets every fault of the file system: one line, a documented code, nothing left, no wait.

The table is made from the commands' own signatures: a new command or path option joins by itself, and fails
here until it refuses, or until ``VALID`` says how the new command is called.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trilith
import typer
from safetensors.torch import save_file
from trilith.checkpoints import convert
from trilith.cli.app import COMMANDS, run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.testing.forked import Ended, few_descriptors, obey_permissions, run_forked, small_files_only
from trilith.testing.hf_folders import write_hf_folder
from trilith.testing.short_runs import TINY_LLAMA, write_tokens

#: Seconds after which a command counts as hanging. A refusal takes well under five; machines are shared.
HANGS = 30.0
OUTPUTS = {"out", "dst"}
#: How an output's name ends; ``tokenize`` is given the name without it.
SUFFIXES = {"recipe": ".toml", "schedule": ".svg", "tokenize": ".bin"}

#: How each command is called so that nothing is wrong. ``{}`` is the folder with the inputs; an output, which
#: this table does not have, is a new path.
VALID: dict[str, dict[str, list[str]]] = {
    "quickstart": {},
    "convert": {"src": ["{}/hf"]},
    "reshard": {"src": ["{}/sharded"]},
    "inspect": {"source": ["{}/hf"]},
    "diff": {"a": ["{}/hf"], "b": ["{}/sharded"]},
    "verify": {"source": ["{}/sharded"]},
    "parity": {"folder": ["{}/hf"]},
    "train_tokenizer": {
        "inputs": ["{}/text.txt"],
        "chat_template": ["{}/template.jinja"],
        "+": ["--vocab-size=300"],
    },
    "tokenize": {
        "inputs": ["{}/chat.jsonl"],
        "tokenizer": ["{}/tokenizer"],
        "chat_template": ["{}/template.jinja"],
        "+": ["--workers=1", "--quiet"],
    },
    "train": {"recipe": ["{}/recipe.toml"]},
    "report": {"runs": ["{}/run"]},
    "merge_lora": {"base": ["{}/hf"], "adapter": ["{}/adapter"]},
    "recipe": {"origin": ["from-deepspeed"], "file": ["{}/deepspeed.json"]},
    "schedule": {"+": ["--name=1f1b", "--stages=2", "--microbatches=2"]},
    "generate": {
        "source": ["{}/hf"],
        "prompts": ["{}/prompts.txt"],
        "tokenizer": ["{}/tokenizer"],
        "adapter": ["{}/adapter"],
        "+": ["--max-new-tokens=1"],
    },
}
#: A step of a run.
STEP = {
    **{"step": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 16},
    **{"tokens_per_second": 1.0, "seconds": 1.0},
}
#: Paths that a recipe names.
RECIPE_INPUTS = {
    "model.config": "{}/hf/config.json",
    "model.init_from": "{}/hf",
    "model.tokenizer": "{}/tokenizer",
    "data.tokens": "{}/tokens",
    "evaluation.tokens": "{}/tokens",
    "lora.init_from": "{}/adapter",
}


@dataclass(frozen=True)
class Place:
    """A path of a command line: an argument or option of a command, or a key of the recipe."""

    command: str
    name: str
    output: bool
    suffix: str = ""

    def __str__(self) -> str:
        return f"{self.command}-{self.name}"


def path_parameters(command: Callable[..., Any]) -> Iterator[str]:
    """The names of a command's parameters that are paths, without what only launched ranks are given."""
    for name, hint in typing.get_type_hints(command, include_extras=True).items():
        kind, *about = typing.get_args(hint) or (hint,)
        if (kind is Path or Path in typing.get_args(kind)) and not about[0].hidden:
            yield name


def places() -> Iterator[Place]:
    for command in COMMANDS:
        valid = VALID.get(command.__name__, {})
        for name in path_parameters(command):
            given = valid.get(name, [""])[0]
            suffix = Path(given).suffix if name not in OUTPUTS else SUFFIXES.get(command.__name__, "")
            yield Place(command.__name__, name, name in OUTPUTS, suffix)
    yield Place("train", "recipe: out", True)
    for key in RECIPE_INPUTS:
        yield Place("train", f"recipe: {key}", False, ".json" if key == "model.config" else "")


def words(command: str, inputs: Path, place: Path, fault: Place | None = None, at: str = "") -> list[str]:
    """The command's words, all valid, outputs in ``place``, but the path ``at`` where the fault is."""
    function = next(one for one in COMMANDS if one.__name__ == command)
    valid, said = VALID[command], [command.replace("_", "-")]
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "context":
            continue
        about = typing.get_args(typing.get_type_hints(function, include_extras=True)[name])[1]
        values = [one.format(inputs) for one in valid.get(name, [])]
        if name in OUTPUTS:
            suffix = SUFFIXES.get(command, "")
            values = [str(place / f"out{suffix}").removesuffix(".bin")]
        if fault is not None and name == fault.name:
            values = [at]
        if isinstance(about, typer.models.ArgumentInfo):
            said += values
        elif values:
            flag = next(iter(about.param_decls or ()), f"--{name.replace('_', '-')}")
            said += [word for value in values for word in (flag, value)]
        del parameter
    if command == "train":
        said.append(f"out={place / 'out'}")
        if fault is not None and fault.name.startswith("recipe: "):
            said.append(f"{fault.name.removeprefix('recipe: ')}={at}")
    return said + valid.get("+", [])


@pytest.fixture(scope="module")
def inputs() -> Iterator[Path]:
    """A folder with one good input of each kind, and every module of the house imported."""
    root = Path(trilith.__path__[0])
    for file in sorted(root.glob("*/*.py")):
        if (
            (file.parent / "__init__.py").exists()
            and file.name != "__main__.py"
            and file.parent.name != "tests"
        ):
            importlib.import_module(f"trilith.{file.parent.name}.{file.stem}".removesuffix(".__init__"))
    folder = Path(tempfile.mkdtemp(prefix="trilith-faults-"))
    config = {**TINY_LLAMA, "vocab_size": 300}
    write_hf_folder(folder / "hf", config)
    convert(folder / "hf", folder / "sharded", tensor=1)
    text = "The quick brown fox jumps over the lazy dog.\n" * 40
    (folder / "text.txt").write_text(text)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    (folder / "template.jinja").write_text(template)
    train_tokenizer([text], folder / "tokenizer", vocab_size=300)
    talk = {"messages": [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "fox"}]}
    (folder / "chat.jsonl").write_text(json.dumps(talk) + "\n")
    (folder / "prompts.txt").write_text("dog\n")
    (folder / "deepspeed.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}'
    )
    write_tokens(folder / "tokens")
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    shapes = {"A": (2, 32), "B": (32, 2)}
    blocks = [f"base_model.model.model.layers.{n}.self_attn.q_proj" for n in range(3)]
    parts = {
        f"{block}.lora_{one}.weight": torch.ones(shape) for block in blocks for one, shape in shapes.items()
    }
    save_file(parts, folder / "adapter" / "adapter_model.safetensors")
    (folder / "recipe.toml").write_text(
        f'out = "nowhere"\nsteps = 1\n[model]\nconfig = "{folder}/hf/config.json"\n'
        f'[data]\ntokens = "{folder}/tokens"\nsequence_length = 16\nglobal_batch = 1\n'
    )
    yield folder
    shutil.rmtree(folder)


def _text_of_no_kind(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\xff" * 10)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


def _closed(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


#: What stands in the place of an input.
INPUT_FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "unreadable": _closed,
    "pipe": os.mkfifo,
    "dev-zero": lambda path: path.symlink_to("/dev/zero"),
    "dev-null": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
    "broken-link": lambda path: path.symlink_to("nowhere"),
    "link-loop": lambda path: path.symlink_to(path.name),
    "10-GB": _sparse,
    "not-UTF-8": _text_of_no_kind,
    "name-too-long": lambda path: None,
    "a-file-as-folder": lambda path: path.parent.write_text("mine"),
}


def _no_writing(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o555)


#: What stands in the way of an output.
OUTPUT_FAULTS: dict[str, Callable[[Path], object]] = {
    "read-only": _no_writing,
    "full-disk": lambda path: None,
    "pipe": os.mkfifo,
    "dev-full": lambda path: path.symlink_to("/dev/full"),
    "link-loop": lambda path: path.symlink_to(path.name),
    "name-too-long": lambda path: None,
    "a-file-as-folder": lambda path: path.parent.write_text("mine"),
}
#: The exit codes of each fault, where they are not those of bad input or of a bad checkpoint.
CODES = {"full-disk": {3}, "dev-full": {2, 3}}
#: Commands that go on from what they left, so that their folder stays when the disk is full.
STAYS = {"quickstart", "train"}


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, 0 if path.is_dir() else path.lstat().st_size)
        for path in sorted(folder.rglob("*"))
    }


def check(ended: Ended, codes: set[int], said: str) -> None:
    assert ended.code is not None, f"hangs: {said}"
    assert ended.code in codes, f"code {ended.code} of: {said}\n{ended.err}"
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, f"{said}\n{ended.err}"
    assert "unexpected" not in ended.err and not ended.left_processes, f"{said}\n{ended.err}"


def path_of(fault: str, where: Path, suffix: str) -> Path:
    """Where a fault is made; three of them need a folder or a name of their own."""
    if fault in ("read-only", "a-file-as-folder"):
        return where / "inner" / f"x{suffix}"
    return where / (("n" * 300 if fault == "name-too-long" else "x") + suffix)


#: What makes a command wait, or leaves a part of a file. The other faults are run with the slow tests.
FIRST = {"pipe", "dev-zero", "unreadable", "read-only", "full-disk"}
CASES = [
    pytest.param(place, fault, id=f"{place}-{fault}", marks=[] if fault in FIRST else pytest.mark.slow)
    for place in places()
    for fault in (OUTPUT_FAULTS if place.output else INPUT_FAULTS)
]


@pytest.mark.parametrize(("place", "fault"), CASES)
def test_a_fault_is_one_line_and_leaves_nothing(inputs: Path, place: Place, fault: str) -> None:
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        path = path_of(fault, where, place.suffix)
        (OUTPUT_FAULTS if place.output else INPUT_FAULTS)[fault](path)
        (where / "tmp").mkdir()
        said = words(place.command, inputs, where, place, str(path).removesuffix(".bin"))
        before = tree(where), tree(inputs)

        def work() -> int:
            os.environ.update(TMPDIR=str(where / "tmp"), TOKENIZERS_PARALLELISM="false")
            tempfile.tempdir = None
            obey_permissions()
            if fault == "full-disk":
                small_files_only(16)
            return run(said)

        ended = run_forked(work, where, limit=HANGS)
        check(ended, CODES.get(fault, {2, 4}), " ".join(said))
        assert tree(inputs) == before[1], " ".join(said)
        if fault != "full-disk" or place.command not in STAYS:
            assert tree(where) == before[0], " ".join(said)


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_too_few_descriptors_are_one_line_and_leave_nothing(inputs: Path, command: str) -> None:
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        (where / "tmp").mkdir()
        said = words(command, inputs, where)
        before = tree(where), tree(inputs)

        def work() -> int:
            os.environ.update(TMPDIR=str(where / "tmp"), TOKENIZERS_PARALLELISM="false")
            tempfile.tempdir = None
            few_descriptors(0)
            return run(said)

        ended = run_forked(work, where, limit=HANGS)
        check(ended, {3}, " ".join(said))
        assert (tree(where), tree(inputs)) == before, " ".join(said)


def test_each_command_is_in_the_table() -> None:
    assert VALID.keys() == {command.__name__ for command in COMMANDS}


def test_each_way_of_calling_is_valid(inputs: Path) -> None:
    """Else a command would be refused for another reason, and the table would prove nothing."""
    for command in ("inspect", "convert", "tokenize", "recipe", "report"):
        with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
            assert run(words(command, inputs, Path(folder))) == 0, command
