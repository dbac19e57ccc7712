"""``trilith plan explain TOPIC``: a command for each row of ``TOPICS``, with options from ``OPTIONS``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared.options import SCHEDULES, VIRTUAL_STAGES
from .shared.sizes import parse_amount

if TYPE_CHECKING:
    from ..planner.explanations.explanation import Explanation


def plan_explain() -> None:
    """Explain a figure of parallel training: formula, numbers, result.

    Each topic prints what is given, then one line of arithmetic for each result, so that you can redo it by
    hand. Every number is an option. Tests hold these formulas equal to the plans of real models, and
    docs/techniques.md lists figures in circulation that they correct.

    Examples:

        trilith plan explain bubble --stages 4 --micro-batches 16
        trilith plan explain allreduce --parameters 70B --ranks 256 --bandwidth 12.5e9
        trilith plan explain zero --parameters 7B --ranks 4
    """


def _count(what: str) -> Any:
    return Annotated[int, typer.Option(min=1, help=f"number of {what}")]


def _share(meaning: str) -> Any:
    return Annotated[float, typer.Option(min=1e-6, max=1 - 1e-6, help=meaning)]


def _amount(meaning: str) -> Any:
    """Return an option for a number as people write it, such as 70B; ``AMOUNTS`` says how it is read."""
    return Annotated[str, typer.Option(help=meaning, metavar="NUMBER")]


#: The smallest value of each number that people write as an amount.
AMOUNTS = {
    **dict.fromkeys(("parameters", "tokens", "number_bytes", "bandwidth", "peak", "rate"), 1e-12),
    **dict.fromkeys(("weight_bytes", "gradient_bytes", "optimizer_bytes", "latency", "price", "watts"), 0.0),
}
#: Every option, by the name of the parameter in ``planner.explanations``.
OPTIONS: Mapping[str, Any] = {
    "parameters": _amount("number of parameters, such as 70B or 405e9"),
    "tokens": _amount("number of tokens: of a micro-batch on a rank, or of a whole run"),
    "number_bytes": _amount("bytes of a number: 2 in bf16, 4 in fp32"),
    "bandwidth": _amount("bytes a second that a rank can send over the link; 400 Gbit/s are 50e9"),
    "latency": _amount("seconds until a message arrives, however small it is"),
    "peak": _amount("FLOP/s of a GPU at its peak; 989e12 for an H100 in bf16"),
    "rate": _amount("tokens a second of all GPUs together"),
    "weight_bytes": _amount("bytes of a weight to compute with"),
    "gradient_bytes": _amount("bytes of a gradient"),
    "optimizer_bytes": _amount(
        "bytes of the optimizer for a parameter: 12 for AdamW with fp32 weights, 8 for its moments alone"
    ),
    "price": _amount("price of a GPU-hour, in any currency"),
    "watts": _amount("watts of a GPU"),
    "stages": _count("pipeline ranks"),
    "pipeline": _count("pipeline ranks"),
    "micro_batches": _count("micro-batches in a step"),
    "virtual": Annotated[int | None, typer.Option(min=1, help=VIRTUAL_STAGES)],
    "schedule": Annotated[str, typer.Option(help=f"pipeline schedule: {SCHEDULES}")],
    "target": _share("largest bubble wanted, a share of the step"),
    "ranks": _count("ranks"),
    "tensor": _count("tensor ranks"),
    "data": _count("data ranks"),
    "context": _count("context ranks"),
    "expert": _count("expert ranks"),
    "zero": Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage")],
    "gpus": _count("GPUs"),
    "model": Annotated[
        str | None,
        typer.Option(help="published size that sets the numbers of the model; `trilith models` lists them"),
    ],
    "layers": _count("blocks"),
    "hidden": Annotated[int, typer.Option(min=1, help="hidden size")],
    "heads": _count("attention heads"),
    "width": Annotated[int, typer.Option(min=1, help="query heads times their width")],
    "key_value_heads": _count("key/value heads"),
    "head_width": _count("features in a head"),
    "experts": _count("experts in a block"),
    "experts_of_token": _count("experts that a token goes through"),
    "sequence": _count("tokens in a row"),
    "micro_batch": _count("rows in a micro-batch"),
    "sequence_parallel": Annotated[
        bool, typer.Option("--sequence-parallel", help="cut norms and residual streams over the tensor ranks")
    ],
    "recompute": Annotated[str, typer.Option(help="activations computed again: none, selective, full")],
    "mfu": _share("share of the peak that the model's FLOPs take"),
    "inputs": _count("inputs of a matrix"),
    "outputs": _count("outputs of a matrix"),
}


@dataclass(frozen=True)
class Topic:
    """Describe a topic: its function in a file of ``planner.explanations``, its help, and the defaults."""

    file: str
    help: str
    examples: tuple[str, ...]
    defaults: Mapping[str, Any]
    #: The options that --model sets.
    of_model: tuple[str, ...] = ()


_SIZES = {"weight_bytes": "2", "gradient_bytes": "2", "optimizer_bytes": "12"}
_LINK = {"number_bytes": "2", "bandwidth": "50e9"}

TOPICS: Mapping[str, Topic] = {
    "bubble": Topic(
        "axes",
        "Explain the share of a step in which a pipeline rank waits.\n\n"
        "A pipeline fills and drains once a step, and its ranks wait meanwhile. More micro-batches make this "
        "a smaller share; so does interleaving, where a rank has several stages.",
        (
            "--stages 4 --micro-batches 16",
            "--stages 16 --micro-batches 16 --virtual 7 --schedule interleaved",
        ),
        {"stages": 4, "micro_batches": 16, "virtual": None, "schedule": "1f1b", "target": 0.1},
    ),
    "allreduce": Topic(
        "axes",
        "Explain the bytes and seconds of an all-reduce, by a ring or two trees.\n\n"
        "Data parallelism sums the gradients of all ranks once a step. A ring sends at most twice the "
        "tensor, whatever the number of ranks; trees have less latency.",
        ("--parameters 70B --ranks 256 --bandwidth 12.5e9", "--parameters 1M --ranks 1024 --latency 5e-6"),
        {"parameters": "70B", "ranks": 8, "latency": "0", **_LINK},
    ),
    "zero": Topic(
        "model_state",
        "Explain the memory of a rank in each ZeRO stage.\n\n"
        "Data ranks repeat the model. ZeRO cuts over them first the optimizer's state, then the gradients, "
        "then the weights.",
        ("--parameters 7B --ranks 4", "--parameters 70B --ranks 8 --optimizer-bytes 8"),
        {"parameters": "7B", "ranks": 4, **_SIZES},
    ),
    "memory": Topic(
        "model_state",
        "Explain the memory of a rank: model, optimizer, activations.\n\n"
        "The activations follow the textbook's formula for GPT. For what the layers of a real model keep, "
        "byte by byte, use `trilith train RECIPE.toml --dry-run`.",
        (
            "--parameters 7B",
            "--model llama-3.1-405b --tensor 8 --pipeline 16 --data 128 --zero 1 --sequence-parallel",
        ),
        {
            **{"model": None, "parameters": "7B", "layers": 32, "hidden": 4096, "heads": 32},
            **{"tensor": 1, "pipeline": 1, "data": 1, "zero": 0, "sequence": 2048, "micro_batch": 1},
            **{"sequence_parallel": False, "recompute": "selective", **_SIZES},
        },
        ("parameters", "layers", "hidden", "heads"),
    ),
    "training-time": Topic(
        "run_time",
        "Explain the FLOPs of a run, and its days, GPU-hours, price and energy.",
        (
            "--parameters 70B --tokens 15T --gpus 2048 --mfu 0.4",
            "--model llama-3.1-8b --tokens 100B --gpus 64 --price 2.5",
        ),
        {
            **{"model": None, "parameters": "70B", "tokens": "15T", "gpus": 2048, "peak": "989e12"},
            **{"mfu": 0.4, "price": "2", "watts": "700"},
        },
        ("parameters",),
    ),
    "tensor-parallel": Topic(
        "axes",
        "Explain the shards of a matrix, and the bytes of tensor parallelism.",
        ("--inputs 4096 --outputs 4096 --tensor 4", "--tensor 8 --tokens 8192 --hidden 16384 --layers 126"),
        {
            **{"inputs": 4096, "outputs": 4096, "tensor": 4, "tokens": "4096", "hidden": 4096, "layers": 32},
            **{"number_bytes": "2", "bandwidth": "450e9"},
        },
    ),
    "pipeline": Topic(
        "axes",
        "Explain a pipeline: blocks of a stage, bytes between stages, waiting.",
        (
            "--stages 8 --micro-batches 32 --layers 80 --hidden 8192",
            "--schedule interleaved --stages 16 --virtual 7 --layers 126",
        ),
        {
            **{"stages": 4, "micro_batches": 16, "virtual": None, "schedule": "1f1b", "layers": 32},
            **{"target": 0.1, "tokens": "4096", "hidden": 4096, **_LINK},
        },
    ),
    "context": Topic(
        "axes",
        "Explain the keys and values that context parallelism sends.",
        ("--sequence 131072 --context 16",),
        {
            **{"sequence": 131072, "micro_batch": 1, "context": 16, "key_value_heads": 8},
            **{"head_width": 128, "tensor": 8, **_LINK},
        },
    ),
    "experts": Topic(
        "axes",
        "Explain the all-to-alls that bring tokens to their experts.",
        (
            "--expert 8 --experts 8 --experts-of-token 2",
            "--hidden 7168 --experts 256 --experts-of-token 8 --expert 64 --layers 58",
        ),
        {
            **{"tokens": "4096", "hidden": 4096, "experts_of_token": 2, "expert": 8, "experts": 8},
            **{"layers": 32, **_LINK},
        },
    ),
    "mfu": Topic(
        "run_time",
        "Explain MFU in both conventions, and HFU, from a measured rate.\n\n"
        "Projects count attention differently: all of it, or the causal half. Two MFUs compare in one "
        "convention only.",
        ("--model llama-3.1-8b --rate 10000", "--model llama-3.1-405b --gpus 16384 --rate 2.65M"),
        {
            **{"rate": "10K", "model": None, "parameters": "7.5B", "layers": 32, "width": 4096},
            **{"sequence": 8192, "gpus": 1, "peak": "989e12"},
        },
        ("parameters", "layers", "width"),
    ),
}


def topics() -> Iterator[Callable[..., None]]:
    """Yield a command for each topic."""
    for name, topic in TOPICS.items():
        yield _command(name, topic)


def _command(name: str, topic: Topic) -> Callable[..., None]:
    def command(*, called: typer.Context, json: bool, **given: Any) -> None:
        from importlib import import_module

        if given.get("model") is not None:
            _refuse_given(called, topic.of_model)
        for key, least in AMOUNTS.items():
            if key in given:
                given[key] = parse_amount(given[key], f"--{key.replace('_', '-')}", least=least)
        file = import_module(f"...planner.explanations.{topic.file}", __name__)
        _show(getattr(file, f"explain_{command.__name__}")(**given), json)

    examples = "\n".join(f"    trilith plan explain {name} {words}" for words in topic.examples)
    command.__name__ = name.replace("-", "_")
    command.__doc__ = f"{topic.help}\n\nExamples:\n\n{examples}"
    hints = {key: OPTIONS[key] for key in topic.defaults}
    hints["json"] = Annotated[bool, typer.Option("--json", help="print one JSON object, for programs")]
    defaults = {**topic.defaults, "json": False}
    kind = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(key, kind, default=defaults[key], annotation=hints[key]) for key in hints]
    shown.append(inspect.Parameter("called", kind, annotation=typer.Context))
    command.__annotations__ = hints | {"called": typer.Context}
    # typer reads the options from here; the type of a function does not state the attribute.
    command.__dict__["__signature__"] = inspect.Signature(shown)
    return command


def _refuse_given(called: typer.Context, names: Sequence[str]) -> None:
    """Refuse the options of these names where the user wrote them: --model sets their numbers."""
    from ..parallel_state import BadInput

    for name in names:
        source = called.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise BadInput("explain", option, expected="no --model, which sets it", found="both")


def _show(found: Explanation, as_json: bool) -> None:
    """Print an explanation: what is given, each result with its arithmetic, notes, sources."""
    from dataclasses import asdict

    from ..planner.explanations.explanation import plain, readable
    from .shared.say import say

    if as_json:
        import json

        say(json.dumps(asdict(found), indent=2))
        return
    say(f"{found.title}\n\ngiven")
    for one in found.given:
        say(f"  {one.symbol} = {plain(one.value):<16} {one.meaning} ({one.option})")
    for step in found.steps:
        said = readable(step.value, step.unit)
        say(f"\n{step.symbol} = {step.formula}\n  = {step.numbers}\n  = {said} {step.meaning}")
    say("")
    for note in found.notes:
        say(note)
    say(f"Sources: {'; '.join(found.sources)}")
