"""Declare a command's parameters by its signature: typer's own declarations are made from there. Refuse an
input that is not there before the imports that take seconds, such as torch's.

A parameter before the ``*`` is an argument, one behind it an option. Beside its type an annotation has its
help, a text, and may have ``Range``, ``As``, and a function that completes what is typed. Any other
parameter, such as the context or one that typer's own declaration describes, is left to typer.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from ...system import BadInput, address_of, nearest_names
from .options import size_names


class Range(NamedTuple):
    """Bound a number, both ends included."""

    least: float
    most: float | None = None


class As:
    """Name a parameter otherwise than the function does: an option's flags, or what stands for the value."""

    def __init__(self, *names: str) -> None:
        self.flags = [name for name in names if name.startswith("-")]
        self.metavar = next((name for name in names if not name.startswith("-")), None)


class There:
    """Mark what is read: where nothing is, the parameter's help says what was expected (``check_there``)."""


class OrAddress(There):
    """Mark a text that names a path of this machine, an address or a model of the hub.

    What has the type ``Path`` is a path of this machine alone.
    """


Place = Annotated[str, OrAddress]
#: How many of something, or nothing where the option has no number of its own.
Count = Annotated[int, Range(1)]
MaybeCount = Annotated[int | None, Range(1)]
#: How ``trilith generate`` and ``trilith chat`` choose tokens (``Sampling``).
Temperature = Annotated[float, Range(0.0), "sampling temperature; 0: always take the likeliest token"]
TopK = Annotated[int, Range(0), "sample from the K likeliest tokens; 0: from all"]
TopP = Annotated[
    float, Range(0.0, 1.0), "sample from the likeliest tokens whose probabilities reach this sum"
]
RepetitionPenalty = Annotated[
    float, Range(0.0), "above 1: make tokens less likely that prompt or text already have; 1: off"
]
#: Recipe keys on a command line.
Overrides = Annotated[list[str] | None, As("KEY=VALUE"), "recipe keys to change, such as layout.tensor=2"]
Made = TypeVar("Made")


def from_options(make: Callable[..., Made], options: Mapping[str, Any], **others: Any) -> Made:
    """Call ``make`` with those ``options`` of a command that have its parameters' names, and with ``others``.

    So a command says once, in its signature, what it hands on as it is.
    """
    names = inspect.signature(make).parameters
    return make(**{name: value for name, value in options.items() if name in names} | others)


def written(context: typer.Context) -> dict[str, str]:
    """Return the parameters that the user wrote, each with its option."""
    named = {parameter.name or "": parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in named}
    return {name: named[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def declared(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with typer's declarations of its parameters; it looks first for what it reads."""

    @wraps(command)
    def called(**values: Any) -> None:
        for parameter in read:
            paths, completion = values[parameter.name], parameter.default.autocompletion
            for path in paths if isinstance(paths, list) else [paths]:
                check_there(path, parameter.default.help, completion("") if completion else ())
        command(**values)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    plain = signature.parameters.values()
    parameters = [_declared(option, hints.get(option.name, option.annotation)) for option in plain]
    read = [option for option in parameters if {There, OrAddress} & {*get_args(hints.get(option.name))}]
    # typer reads both; the type of a function does not state the first.
    called.__dict__["__signature__"] = signature.replace(parameters=parameters)
    called.__annotations__ = {option.name: option.annotation for option in parameters}
    return called


def _declared(parameter: inspect.Parameter, hint: Any) -> inspect.Parameter:
    kind, *annotations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    texts = [part for part in annotations if isinstance(part, str)]
    if not texts or any(isinstance(part, ParameterInfo) for part in annotations):
        return parameter.replace(annotation=hint)
    name = next((part for part in annotations if isinstance(part, As)), As())
    least, most = next((part for part in annotations if isinstance(part, Range)), (None, None))
    completion = next((part for part in annotations if inspect.isfunction(part)), None)
    default = ... if parameter.default is parameter.empty else parameter.default
    is_option = parameter.kind is parameter.KEYWORD_ONLY
    facts: Any = {"help": texts[0], "min": least, "max": most, "autocompletion": completion}
    if is_option:  # typer would add a flag that turns it off
        flags = name.flags or ([f"--{parameter.name.replace('_', '-')}"] if kind is bool else [])
        info = typer.Option(default, *flags, metavar=name.metavar, **facts)
    else:
        info = typer.Argument(default, metavar=name.metavar or parameter.name.upper(), **facts)
    return parameter.replace(annotation=kind, default=info)


#: The columns of a terminal that examples fit in, with a margin of one on each side.
_COLUMNS = 80


def help_text(docstring: str) -> str:
    """Join the lines of each paragraph, so that a terminal of any width wraps them; keep indented lines, and
    continue long ones on the next line as a shell does.
    """
    text = re.sub(r"(?<=\S)\n(?=\S)| \\\n +", " ", inspect.cleandoc(docstring))
    return re.sub(rf"^    .{{{_COLUMNS - 5},}}$", _continued, text, flags=re.MULTILINE)


def _continued(line: re.Match[str]) -> str:
    lines = [""]
    for word in re.findall(r"(?:[^\s\"]|\"[^\"]*\")+", line[0]):
        if len(lines[-1]) + len(word) > _COLUMNS - 10:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(f"   {line}" for line in lines)


#: A name such as "meta-llama/Llama-3.2-1B", which may be that of a model of the hub.
_OF_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_there(name: str | Path, expected: str, names_known: Sequence[str] = ()) -> None:
    """Raise ``BadInput`` for a path where nothing is, unless it is one of ``names_known``.

    Whether an address will do is found out later. So it is with a text that may name a model of the hub (as
    ``from_hub`` tells), or a token file or what a killed command left: another file has its name in it.
    """
    path, names_weights = Path(name), isinstance(name, str) and not names_known
    if address_of(name) is not None or os.path.lexists(path) or str(name).lower() in names_known:
        return
    if names_weights:
        of_the_hub = _OF_THE_HUB.fullmatch(str(name)) and not os.path.lexists(path.parent)
        try:
            others = os.listdir(path.parent)
        except OSError as error:  # a folder that is not one to look into is refused later
            others = [] if isinstance(error, FileNotFoundError) else [path.name]
        if of_the_hub or path.name in ("", "..") or any(path.name in other for other in others):
            return
    names = [] if path.suffix in (".toml", ".json") else names_known
    todo = nearest_names(str(name).lower(), names, also="`trilith models` lists the sizes")
    if not {*names} & {*size_names("")}:  # recipes alone, of which there are few
        todo = f"These come with trilith: {', '.join(names)}" if names else ""
        if names and str(name).lower() in size_names(""):
            todo = f"That is a size of a model: `trilith new --model {name}` writes a recipe that trains it"
    absent = f"no such file or {'name' if names_known else 'folder'}"
    raise BadInput(name, expected=expected.partition(";")[0], found=absent, todo=todo)
