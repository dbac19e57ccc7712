"""Declare a command's parameters by its signature: typer's own declarations are made from there. Refuse an
input that is not there before the imports that take seconds, such as torch's.

A parameter before the ``*`` is an argument, one behind it an option. Beside its type an annotation has its
help, a text, and may have ``Range``, ``As``, and a function that completes what is typed. Any other
parameter, such as the context or one that typer's own declaration describes, is left to typer.
"""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from ...system import BadInput, address_of, require
from .options import model_names, recipe_names


class Range(NamedTuple):
    """Bound a number, both ends included."""

    least: float
    most: float | None = None


class As:
    """Name a parameter otherwise than the function does: an option's flags, or what stands for the value."""

    def __init__(self, *names: str) -> None:
        self.flags = [name for name in names if name.startswith("-")]
        self.metavar = next((name for name in names if not name.startswith("-")), None)


class OrAddress:
    """Mark a text that names a path of this machine, an address or a model of the hub.

    What has the type ``Path`` is a path of this machine alone.
    """


Place = Annotated[str, OrAddress]
#: How many of something, or nothing where the option has no number of its own.
Count = Annotated[int, Range(1)]
MaybeCount = Annotated[int | None, Range(1)]
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
    """Return the command with typer's declarations of its parameters."""

    @wraps(command)
    def called(**values: Any) -> None:
        command(**values)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    parameters = [
        _declared(each, hints.get(each.name, each.annotation)) for each in signature.parameters.values()
    ]
    # typer reads both; the type of a function does not state the first.
    called.__dict__["__signature__"] = signature.replace(parameters=parameters)
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _declared(parameter: inspect.Parameter, hint: Any) -> inspect.Parameter:
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    texts = [part for part in about if isinstance(part, str)]
    if not texts or any(isinstance(part, ParameterInfo) for part in about):
        return parameter.replace(annotation=hint)
    name = next((part for part in about if isinstance(part, As)), As())
    least, most = next((part for part in about if isinstance(part, Range)), (None, None))
    completion = next((part for part in about if inspect.isfunction(part)), None)
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


def check_there(name: str | Path, expected: str, *, kind: str = "folder") -> None:
    """Raise ``BadInput`` for a path where nothing is. Whether an address will do is found out later."""
    require(address_of(name) is not None or os.path.lexists(name), name, None, expected, f"no such {kind}")


def check_weights_there(name: str | Path, expected: str, *, kind: str = "folder") -> None:
    """Raise ``BadInput`` as ``check_there`` does, unless the name may be that of a model of the hub (as
    ``from_hub`` tells), of a token file, or of what a killed command left: then another file's name has this
    one in it.
    """
    path = Path(name)
    of_the_hub = _OF_THE_HUB.fullmatch(str(name)) and not os.path.lexists(path.parent)
    if of_the_hub or path.name in ("", ".."):
        return
    try:
        others = os.listdir(path.parent)
    except FileNotFoundError:
        others = []
    except OSError:  # not one to look into
        return
    if not any(path.name in other for other in others):
        check_there(name, expected, kind=kind)


def check_recipe_there(recipe: str | Path) -> None:
    """Raise ``BadInput`` where neither a file is nor a recipe of this name comes with trilith."""
    names = recipe_names("")
    if str(recipe) in names:
        return
    todo = "" if Path(recipe).suffix == ".toml" else f"These come with trilith: {', '.join(names)}"
    require(os.path.lexists(recipe), recipe, None, "a recipe", "no such file", todo)
    todo = f'A recipe trains the model in it: model = {{ init_from = "{recipe}" }}'
    require(not os.path.isdir(recipe), recipe, None, "a recipe, a TOML file", "a folder", todo)


def check_model_there(model: str) -> None:
    """Raise ``BadInput`` for a name of no file or folder, and of no published size or recipe."""
    names = model_names("")
    if model.lower() in names or os.path.lexists(model):
        return
    expected = "a published size, a config.json, a Hugging Face folder or a recipe"
    near = get_close_matches(model.lower(), names, n=3, cutoff=0.4)
    todo = f"Nearest: {', '.join(near)}" if near else "`trilith models` lists the sizes"
    raise BadInput(model, expected=expected, found="no such file or name", todo=todo)


def check_tokens_there(name: Path) -> None:
    """Raise ``BadInput`` where no token file of this name is."""
    if address_of(name) is None and not os.path.lexists(f"{name}.json"):
        text = os.path.lexists(name)
        todo = (
            f"trilith tokenize {shlex.quote(str(name)) if text else 'TEXT'} --tokenizer FOLDER --out tokens"
        )
        kind = "another file" if text else "no such file"
        raise BadInput(name, expected="a token file", found=kind, todo=todo)
