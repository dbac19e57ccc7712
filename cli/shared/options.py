"""Share what options of several commands need: help texts, completions, numbers as people write them, and the
names that other programs have for options and commands.

The facts of the help texts live in rooms that take seconds to import.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...system import BadInput, require, whole_number


def _refuse_passing_over(strict: bool) -> None:
    if strict:
        from ...checkpoints.find import STRICT

        STRICT.set(True)


#: A command's option; its effect ends with the command.
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="refuse a run whose newest checkpoint is not whole, with code 4, instead of using an older one",
        callback=_refuse_passing_over,
    ),
]
SCHEDULES = "gpipe, 1f1b, interleaved, interleaved-zero-bubble, zbv, dualpipev"
VIRTUAL_STAGES = "number of stages on each pipeline rank; default: 2, or 1 with gpipe, 1f1b"
FORCE = "replace an existing file that somebody may have edited, or that another program wrote"
SPLIT = "number of blocks in each pipeline stage, such as 3,2; default: chosen by trilith"
DTYPE = "data type of weights and arithmetic: float32, bfloat16, ..."
DEVICE = "device to compute on: auto (a GPU where there is one), cpu or cuda"
ADAPTER = "LoRA adapters to add: PEFT folder or a LoRA run's folder"
WORKERS = "number of threads that read and write"
USUAL_GPU = "h100-80gb"
GPU_TYPE = "type of GPU, such as h200, b200, a100-80gb, l40s, rtx-4090, mi300x"
#: The largest seed of a recipe too.
LARGEST_SEED = 2**53


def check_seed(seed: int) -> int:
    """Return a seed, or refuse it. A range that typer knows would fill a column of the help."""
    if not 0 <= seed <= LARGEST_SEED:
        raise typer.BadParameter(f"{seed} is not in the range 0<=x<={LARGEST_SEED}")
    return seed


CONFIG = (
    "for a checkpoint of another project: Hugging Face folder of the same model, for its config and tokenizer"
)
IMPLEMENTATION = "whose code computes the model: auto, the zoo's if it has the family; transformers, its own"
NAMES = "for a checkpoint of another project: table of names (megatron, meta, titan) or a TOML file of rules"
#: On what the commands that look at a machine were tested; their help says it too.
TESTED = "Tested on CPUs and, in part, on one H100; not yet on several GPUs."
INPUTS = "text, .jsonl or .parquet files, each also as .gz or .zst, or folders of Hugging Face datasets"
JSON_KEY = "name of the JSON key or Parquet column that holds the text"


_ROOT = Path(__file__).parents[2]


def recipe_names(incomplete: str) -> list[str]:
    """Return the names of installed recipes that begin so."""
    names = (path.stem for path in (_ROOT / "recipes").glob("*.toml"))
    return sorted(name for name in names if name.startswith(incomplete))


def size_names(incomplete: str) -> list[str]:
    """Return the published sizes that begin so."""
    table = (_ROOT / "models" / "sizes.toml").read_text(encoding="utf-8")
    # Read by lines: trilith.models, which reads it whole, imports torch.
    names = re.findall(r'^sizes\."(.+)" = ', table, re.MULTILINE)
    return sorted(name for name in names if name.startswith(incomplete))


def schedule_names(incomplete: str) -> list[str]:
    """Return the pipeline schedules that begin so."""
    return [name for name in SCHEDULES.split(", ") if name.startswith(incomplete.lower())]


def model_names(incomplete: str) -> list[str]:
    """Return the published sizes and the installed recipes that begin so."""
    return [*size_names(incomplete), *recipe_names(incomplete)]


#: How people write large numbers: 70B parameters, 15T tokens.
_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_amount(text: str, option: str, *, least: float = 1e-12) -> float:
    """Parse ``70B``, ``15T``, ``989e12`` or ``0.4`` to a number; otherwise ``BadInput`` names ``option``."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)([KMBT]?)", text.strip())
    number = float(match[1]) * _POWERS[match[2]] if match else -1.0
    expected = f"a number from {least:g} to 1e30, such as 0.4, 989e12, 70B or 15T"
    require(least <= number <= 1e30, option, None, expected, _short(text))
    return number


def parse_counts(split: str | None, where: str, option: str = "--split") -> list[int] | None:
    """Parse whole numbers such as ``3,2``; for anything else ``BadInput`` names ``option``."""
    if split is None:
        return None
    numbers = [number for word in split.split(",") if (number := whole_number(word.strip())) is not None]
    if len(numbers) != split.count(",") + 1:
        raise BadInput(where, option, expected="whole numbers, such as 8 or 3,2", found=_short(split))
    return numbers


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}…"


#: An option of ours, and the names that others give it. ``--help`` shows ours alone.
ALIASES = {
    "--tensor": ("--tensor-model-parallel-size", "--tensor-parallel-size", "-tp", "--tp"),
    "--pipeline": ("--pipeline-model-parallel-size", "--pipeline-parallel-size", "-pp", "--pp"),
    "--context": ("--context-parallel-size", "--cp"),
    "--expert": ("--expert-model-parallel-size", "--ep"),
    "--data": ("--data-parallel-size", "-dp", "--dp"),
    "--zero": ("--zero-stage",),
    "--sequence-length": ("--seq-length",),
}
#: A command of an earlier version, and the words that have its meaning.
FORMER_COMMANDS = {"reshard": ["convert", "--to", "sharded"]}
#: Commands of other programs, and what to type here.
COMMANDS_OF_OTHERS = {
    "download": "`hf download MODEL --local-dir FOLDER` downloads a model; hf was installed with trilith",
    **dict.fromkeys(
        ("finetune", "finetune_lora", "pretrain", "sft"),
        "A recipe says what is trained: `trilith new` writes one, `trilith train RECIPE` trains",
    ),
    **dict.fromkeys(("init", "config"), "`trilith new` writes a recipe"),
    **dict.fromkeys(("prepare", "preprocess"), "`trilith tokenize TEXT --tokenizer FOLDER --out tokens`"),
    **dict.fromkeys(
        ("eval", "evaluation"), "`trilith evaluate DIR TOKENS` computes the loss on a token file"
    ),
    **dict.fromkeys(("infer", "inference", "sample"), "`trilith generate DIR --prompt TEXT`"),
    **dict.fromkeys(("export", "import"), "`trilith convert SRC DST`; --to hf writes a Hugging Face folder"),
    **dict.fromkeys(("merge", "merge_lora"), "`trilith merge-lora BASE ADAPTER OUT`"),
    "serve": "Export with `trilith convert SRC DST --to hf`, and serve that folder with vLLM, for example",
}
_OWN = {alias: option for option, aliases in ALIASES.items() for alias in aliases}


def with_own_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return a command's words with aliases replaced by our names, where the command has this option.

    Words after ``--`` are no options.
    """
    end = words.index("--") if "--" in words else len(words)
    return [*(_own(word, options) for word in words[:end]), *words[end:]]


def what_to_type(words: Sequence[str], options: Collection[str], arguments: Collection[str]) -> str | None:
    """Return what to write in the place of the first option that is an argument of the command; ``None`` if
    there is none. ``arguments``: their names in the help.
    """
    for word in words[: words.index("--") if "--" in words else None]:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in options:
            continue
        argument = "RECIPE" if name == "--config" else name.removeprefix("--").upper()
        if argument in arguments:
            return f"{argument} is an argument: write it without {name}"
    return None


def _own(word: str, options: Collection[str]) -> str:
    name, equals, argument = word.partition("=")
    own = _OWN.get(name, name)
    return own + equals + argument if own in options and name not in options else word
