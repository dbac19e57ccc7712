"""Call each command as its signature says: every path that it takes, and valid words for the rest."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
from trilith.checkpoints import convert
from trilith.cli.app import COMMANDS, make_app
from trilith.cli.shared.parameters import declared
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.random_files import write_hf_folder, write_tokens
from typer.testing import CliRunner

from support.configs import TINY_LLAMA
from support.inputs import write_adapter

NAMES = [command.__name__ for command in COMMANDS]
#: Parameters that name an output.
OUTPUTS = {"out", "dst", "write", "html"}
#: How an output's name ends; ``tokenize`` is given the name without it.
SUFFIXES = {"recipe": ".toml", "new": ".toml", "schedule": ".svg", "tokenize": ".bin"}
TEMPLATE, TOKENIZER = {"chat_template": ["{}/template.jinja"]}, {"tokenizer": ["{}/tokenizer"]}
#: How each command is called so that nothing is wrong. ``{}`` is the folder with the inputs; an output, which
#: this table does not have, is a new path.
VALID: dict[str, dict[str, list[str]]] = {
    "quickstart": {},
    "models": {"name": ["gpt2"]},
    "doctor": {"folders": ["{}"]},
    "bench": {"+": ["--device=cpu", "--quick", "--only=speed"]},
    "convert": {"src": ["{}/hf"]},
    "inspect": {"source": ["{}/hf"]},
    "diff": {"a": ["{}/hf"], "b": ["{}/sharded"]},
    "verify": {"source": ["{}/sharded"]},
    "parity": {"folder": ["{}/hf"]},
    "train_tokenizer": {"inputs": ["{}/text.txt"], **TEMPLATE, "+": ["--vocab-size=300"]},
    "tokenize": {"inputs": ["{}/chat.jsonl"], **TOKENIZER, **TEMPLATE, "+": ["--workers=1", "--quiet"]},
    "plan": {
        "model": ["llama-3.2-1b"],
        "machine": ["{}/bench.json"],
        "+": ["--gpus=1", "--sequence-length=512"],
    },
    "new": {"model": ["{}/hf"], "data": ["{}/tokens"], "+": ["--gpus=1"]},
    "train": {"recipe": ["{}/recipe.toml"]},
    "launch": {"system": ["slurm"], "recipe": ["{}/recipe.toml"]},
    "status": {"run": ["{}/ended"], "since": ["{}/hf/config.json"]},
    "report": {"runs": ["{}/run"]},
    "merge_lora": {"base": ["{}/hf"], "adapter": ["{}/adapter"]},
    "recipe": {"origin": ["from-deepspeed"], "file": ["{}/deepspeed.json"]},
    "evaluate": {
        **{"source": ["{}/hf"], "tokens": ["{}/tokens"], "adapter": ["{}/adapter"]},
        "+": ["--rows=1", "--sequence-length=16"],
    },
    "chat": {
        **{"source": ["{}/hf"], "tokenizer": ["{}/templated"], "adapter": ["{}/adapter"]},
        "+": ["--max-new-tokens=1"],
    },
    "schedule": {"name": ["1f1b"], "+": ["--pipeline=2", "--micro-batches=2"]},
    "generate": {
        **{"source": ["{}/hf"], "prompt_file": ["{}/prompts.txt"], **TOKENIZER, "adapter": ["{}/adapter"]},
        "+": ["--max-new-tokens=1"],
    },
}
#: Good inputs of options that only inputs of other projects need: no valid call above has them.
NEEDLESS = {"config": "{}/hf"}
#: Files of these inputs; ``make_inputs`` makes the larger ones.
GOOD = Path(__file__).parents[1] / "cli" / "good_inputs"
#: Paths that a recipe names: a good one, and the words that name another.
RECIPE_PATHS = {
    "out": ("", ["out={at}"]),
    "model.config": ("{}/hf/config.json", ["model.config={at}"]),
    "model.init_from": ("{}/hf", ["model.init_from={at}"]),
    "model.tokenizer": ("{}/tokenizer", ["model.tokenizer={at}"]),
    "data.tokens": ("{}/tokens", ["data.tokens={at}"]),
    "evaluation.tokens": ("{}/tokens", ["evaluation.tokens={at}", "evaluation.every=1"]),
    "lora.init_from": ("{}/adapter", ["lora.init_from={at}", "model.init_from={}/hf", "dtype=float32"]),
}
#: Keys that replace ``model.config``.
NO_CONFIG = {"model.init_from", "lora.init_from"}


@dataclass(frozen=True)
class Place:
    """Name a path of a command line: an argument or option of a command, or a key of the recipe."""

    command: str
    name: str
    output: bool
    suffix: str = ""

    def __str__(self) -> str:
        """Return the words by which a test's id names it."""
        return f"{self.command}-{self.name}"

    @property
    def key(self) -> str:
        """Return the key of the recipe, or nothing."""
        return self.name.removeprefix("recipe: ") if self.name.startswith("recipe: ") else ""

    @property
    def good(self) -> str:
        """Return a good input, ``{}`` for the folder of inputs."""
        if self.key:
            return RECIPE_PATHS[self.key][0]
        valid = VALID[self.command]
        return valid[self.name][0] if self.name in valid else NEEDLESS[self.name]


Parameter = tuple[str, str | None, bool, set[Any]]


@cache
def parameters_of(command: str) -> list[Parameter]:
    """Return name, flag (none for an argument), hidden and type of each parameter of a command, in order."""
    (function,) = (each for each in COMMANDS if each.__name__ == command)
    parameters: list[Parameter] = []
    hints = typing.get_type_hints(function, include_extras=True)
    for name, declaration in inspect.signature(declared(function)).parameters.items():
        about, kind = declaration.default, declaration.annotation
        if isinstance(about, typer.models.OptionInfo | typer.models.ArgumentInfo):
            flag = next(iter(about.param_decls or ()), f"--{name.replace('_', '-')}")
            is_argument = isinstance(about, typer.models.ArgumentInfo)
            addresses = {Path} if "OrAddress" in repr(hints[name]) else set()
            kinds = {kind, *typing.get_args(kind)} | addresses
            parameters.append((name, None if is_argument else flag, about.hidden, kinds))
    return parameters


def places() -> Iterator[Place]:
    """Yield every path of every command, and those of a recipe."""
    for command in NAMES:
        valid = {name: values[0] for name, values in VALID.get(command, {}).items()}
        for name, _, hidden, kinds in parameters_of(command):
            if Path in kinds and not hidden:  # hidden: what only launched ranks are given
                suffix = SUFFIXES.get(command, "") if name in OUTPUTS else Path(valid.get(name, "")).suffix
                yield Place(command, name, name in OUTPUTS, suffix)
    for key in RECIPE_PATHS:
        yield Place("train", f"recipe: {key}", key == "out", ".json" if key == "model.config" else "")


def values_of(command: str, inputs: Path, out: Path) -> dict[str, list[str]]:
    """Return the values of a command's parameters, all valid, with outputs in the folder ``out``."""
    values = {name: [each.format(inputs) for each in good] for name, good in VALID[command].items()}
    for name in (name for name, *_ in parameters_of(command) if name in OUTPUTS):
        stem = "out" if name in ("out", "dst") else name
        values[name] = [str(out / f"{stem}{SUFFIXES.get(command, '')}").removesuffix(".bin")]
    return values


def words_of(command: str, values: dict[str, list[str]]) -> list[str]:
    """Write a command line, parameters in the order of the signature and then the other words."""
    words = [command.replace("_", "-")]
    for name, flag, *_ in parameters_of(command):
        words += [word for value in values.get(name, ()) for word in (flag, value) if word is not None]
    return words + values.get("+", [])


def words(
    command: str, inputs: Path, out: Path, place: Place | None = None, at: str | None = None
) -> list[str]:
    """Return a valid command line whose path ``place`` is ``at``, or valid too."""
    values = values_of(command, inputs, out)
    if command == "train":
        values["+"] = [f"out={out / 'out'}"]
        if place is not None and place.name == "html":
            values["+"].append("--dry-run")
        else:
            del values["html"]  # of a dry run alone
    if place is not None and place.key:
        if place.key in NO_CONFIG:
            values["recipe"] = [f"{inputs}/without_model.toml"]
        path = at or place.good.format(inputs) or str(out / "out")
        values["+"] += [word.format(inputs, at=path) for word in RECIPE_PATHS[place.key][1]]
    elif place is not None and at is not None:
        values[place.name] = [at]
    return words_of(command, values)


def make_inputs(folder: Path) -> None:
    """Write one good input of each kind, as ``VALID`` names them."""
    write_hf_folder(folder / "hf", {**TINY_LLAMA, "vocab_size": 300})
    convert(folder / "hf", folder / "sharded", tensor=1)
    shutil.copytree(GOOD, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)  # as new files
    train_tokenizer([(folder / "text.txt").read_text()], folder / "tokenizer", vocab_size=300)
    shutil.copytree(folder / "tokenizer", folder / "templated")
    shutil.copyfile(folder / "template.jinja", folder / "templated" / "chat_template.jinja")
    write_tokens(folder / "tokens")
    write_adapter(folder / "adapter", folder / "hf")
    data = f'[data]\ntokens = "{folder}/tokens"\nsequence_length = 16\nglobal_batch = 1\n'
    model = f'[model]\nconfig = "{folder}/hf/config.json"\n'
    for name, section in (("recipe", model), ("without_model", "")):
        (folder / f"{name}.toml").write_text(f'out = "nowhere"\nsteps = 1\n{section}{data}')


def call_command(folder: Path, *words: str) -> None:
    """Run a command of ``trilith`` in this folder, and let through what it raises."""
    with contextlib.chdir(folder):
        CliRunner().invoke(make_app(), words, catch_exceptions=False)
