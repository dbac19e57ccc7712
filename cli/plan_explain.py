"""``trilith plan explain TOPIC``: a command for each topic of ``topics.toml``."""

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..system import BadInput
from .shared.options import SCHEDULES, parse_amount
from .shared.parameters import As, Range, written
from .shared.say import say, say_json


class Input(NamedTuple):
    """Name a number that is put in: symbol, option, default as it is written, and meaning."""

    symbol: str
    option: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Topic:
    """Hold a topic of ``topics.toml``, whose head says what each key is.

    ``steps``: of each result its symbol, formula, unit and meaning, with ``{}`` for ``str.format``.
    """

    title: str
    help: str
    inputs: list[Input]
    steps: list[list[str]]
    notes: list[str]
    sources: list[str]
    examples: list[str]
    choices: dict[str, Any] = field(default_factory=dict)
    of_model: Mapping[str, str] = field(default_factory=dict)


@cache
def read_table() -> tuple[Mapping[str, tuple[str, str]], Mapping[str, Topic]]:
    """Return kind and meaning of each option that is a number, and the topics by name."""
    table = tomllib.loads(Path(__file__).with_name("topics.toml").read_text(encoding="utf-8"))
    options = {name: (kind, meaning) for name, (kind, meaning) in table["options"].items()}
    topics = {}
    for name, raw in table["topics"].items():
        if base := table["topics"].get(raw.pop("extends", None)):
            raw = base | raw | {key: base[key] + raw[key] for key in ("inputs", "steps")}
        inputs = [[*fields, options[fields[1]][1]][:4] for fields in _rows(raw["inputs"])]
        rows = {"inputs": [Input(*fields) for fields in inputs], "steps": _rows(raw["steps"])}
        topics[name] = Topic(**raw | rows)
    return options, topics


def _rows(text: str) -> list[list[str]]:
    """Return the fields of each line: two blanks or more are between them."""
    return [re.split(r" {2,}", line.strip(), maxsplit=3) for line in text.splitlines()]


def plan_explain() -> None:
    """Explain a figure of parallel training: formula, numbers, result.

    Each topic prints what is given, then one line of arithmetic for each result, so that you can redo it by
    hand. Every number is an option. Tests hold these formulas equal to the plans of real models; the
    page docs/techniques.md of the repository lists figures in circulation with the command for each.

    Examples:

        trilith plan explain bubble --pipeline 4 --micro-batches 16
        trilith plan explain allreduce --parameters 70B --ranks 256 --bandwidth 12.5e9
        trilith plan explain zero --parameters 7B --ranks 4
    """


#: The smallest value of each kind of amount, a number as people write it, such as 70B.
_LEAST = {"amount": 1e-12, "nothing": 0.0}
#: Options that are no number of a formula.
_CHOICES: dict[str, Any] = {
    "schedule": Annotated[str, f"pipeline schedule: {SCHEDULES}"],
    "zero": Annotated[int, Range(0, 3), "ZeRO stage"],
    "model": Annotated[
        str | None, "published size that sets the numbers of the model; `trilith models` lists them"
    ],
    "sequence_parallel": Annotated[bool, "cut norms and residual streams over the tensor ranks"],
    "recompute": Annotated[str, "activations computed again: none, selective, full"],
    "json": Annotated[bool, "print one JSON object, for programs"],
}


def _option(kind: str, meaning: str, default: str) -> tuple[Any, Any]:
    """Return the annotation and the default of a number's option."""
    if kind == "count":
        count = Range(1, 10**18)
        if default == "-":
            return Annotated[int | None, count, meaning], None
        return Annotated[int, count, meaning], int(default)
    if kind == "share":
        return Annotated[float, Range(1e-6, 1 - 1e-6), meaning], float(default)
    return Annotated[str, As("NUMBER"), meaning], default


def topics() -> Iterator[Callable[..., None]]:
    """Yield a command for each topic."""
    options, table = read_table()
    for name, topic in table.items():
        numbers = {
            row.option: _option(options[row.option][0], row.meaning, row.default) for row in topic.inputs
        }
        choices = topic.choices | {"json": False}
        rest = {key: (_CHOICES[key], None if value == "-" else value) for key, value in choices.items()}
        yield _command(name, topic, numbers | rest)


def _command(name: str, topic: Topic, options: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    def command(*, called: typer.Context, json: bool, **values: Any) -> None:
        _show(_explained(name, topic, values, called), json)

    examples = "\n".join(f"    trilith plan explain {name} {words}" for words in topic.examples)
    command.__name__ = name.replace("-", "_")
    command.__doc__ = f"{topic.help.strip()}\n\nExamples:\n\n{examples}"
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(key, kind, default=default, annotation=hint)
        for key, (hint, default) in options.items()
    ]
    parameters.append(inspect.Parameter("called", kind, annotation=typer.Context))
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # typer reads the options from here; the type of a function does not state the attribute.
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    return command


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _explained(name: str, topic: Topic, values: dict[str, Any], called: typer.Context) -> dict[str, Any]:
    """Put the numbers into the topic's formulas: what is given, each result with its arithmetic, notes."""
    from ..planner.explanation import explain, numbers_of

    options, _ = read_table()
    at = {key: values[key] for key in topic.choices}
    for row in topic.inputs:
        value, kind = values[row.option], options[row.option][0]
        if kind in _LEAST:
            value = parse_amount(value, _flag(row.option), least=_LEAST[kind])
        at[row.symbol] = value
    if at.get("model") is not None:
        of_model = {row.option for row in topic.inputs if row.symbol in topic.of_model}
        for option in written(called).keys() & of_model:
            raise BadInput("explain", _flag(option), expected="no --model, which sets it", found="both")
        numbers = numbers_of(at["model"], at.get("S", 1))
        at |= {symbol: numbers[key] for symbol, key in topic.of_model.items()}
    if name in _PREPARE:
        _PREPARE[name](at)
    rows = [tuple(text.format(**at) for text in row) for row in topic.steps]
    steps, used = explain({row.symbol: at[row.symbol] for row in topic.inputs}, rows)
    names = ("symbol", "value", "meaning", "option")
    inputs = [(row.symbol, at[row.symbol], row.meaning, _flag(row.option)) for row in topic.inputs]
    return {
        "title": topic.title,
        "inputs": [dict(zip(names, row, strict=True)) for row in inputs if row[0] in used],
        "steps": [step._asdict() for step in steps],
        "notes": [note.format(**at) for note in topic.notes],
        "sources": topic.sources,
    }


def _schedule(at: dict[str, Any]) -> None:
    """Take the stages of a rank from the schedule, and write what waits and what works in it."""
    from ..pipeline.schedule_kinds import schedule_kind

    kind = schedule_kind(at["schedule"], "explain")
    at["v"] = kind.virtual_stages if at["v"] is None else at["v"]
    if not kind.interleaved and at["v"] != kind.virtual_stages:
        expected = f"{kind.virtual_stages} with {at['schedule']}"
        todo = "Only interleaved and interleaved-zero-bubble take others"
        raise BadInput("explain", "--virtual-stages", expected=expected, found=at["v"], todo=todo)
    at["waits"] = "2 * (p - 1)" if at["schedule"] == "dualpipev" else "(p - 1)"
    at["work"] = "3 * v * m" if kind.two_backwards else "v * m"
    at["needed"] = "" if kind.two_backwards else "max(1, ceil((p - 1) * (1 - b) / (b * v)))"


def _trees(at: dict[str, Any]) -> None:
    """Leave out the trees of a single rank, which sends nothing."""
    several = at["N"] > 1
    at["tree"] = "2 * B" if several else ""
    at["tree_time"] = "tree / W + 2 * ceil(log2(N)) * a" if several else ""


def _parts_of_zero(at: dict[str, Any]) -> None:
    """Add the gigabytes of weights, gradients and optimizer in each stage."""
    for zero in range(4):
        cut = [at["N"] if zero >= stage else 1 for stage in (3, 2, 1)]
        sizes = (at["P"] * at[symbol] / ranks / 1e9 for symbol, ranks in zip("wgo", cut, strict=True))
        at[f"parts_{zero}"] = " + ".join(f"{size:.4g}" for size in sizes)


def _experts(at: dict[str, Any]) -> None:
    at["held"] = "expert" if at["E"] == at["e"] else "experts"


def _memory(at: dict[str, Any]) -> None:
    """Write what ZeRO and sequence parallelism cut, and what recomputation drops."""
    shared = " / t" if at["sequence_parallel"] else ""
    products = f"S * b * D * (10{shared} + 24 / t)"
    blocks = {
        "none": (f"{products} + 5 * h * S * S * b / t", "nothing"),
        "selective": (products, "attention's scores"),
        "full": (f"2 * S * b * D{shared}", "whole blocks"),
    }
    if (recompute := at["recompute"]) not in blocks:
        expected = f"one of {', '.join(blocks)}"
        raise BadInput("explain", "--recompute", expected=expected, found=repr(recompute))
    at["block"], at["again"] = blocks[recompute]
    for symbol, stage in {"w": 3, "g": 2, "o": 1}.items():
        at[f"cut_{symbol}"] = " / N" if at["zero"] >= stage else ""


#: What a topic adds to its numbers and choices: the words of its texts that depend on them.
_PREPARE: dict[str, Callable[[dict[str, Any]], None]] = {
    **{"bubble": _schedule, "pipeline": _schedule, "allreduce": _trees},
    **{"zero": _parts_of_zero, "memory": _memory, "experts": _experts},
}


def _show(explanation: Mapping[str, Any], as_json: bool) -> None:
    from ..planner.explanation import plain, readable

    if as_json:
        say_json(explanation)
        return
    say(f"{explanation['title']}\n\ngiven")
    for number in explanation["inputs"]:
        say("  {symbol} = {shown:<16} {meaning} ({option})".format(**number, shown=plain(number["value"])))
    for step in explanation["steps"]:
        result = readable(step["value"], step["unit"])
        say("\n{symbol} = {formula}\n  = {numbers}\n  = {result} {meaning}".format(**step, result=result))
    say("")
    for note in explanation["notes"]:
        say(note)
    say(f"Sources: {'; '.join(explanation['sources'])}")
