"""Write docs/commands.md from the commands' own help: ``make docs``."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import typer.main
from trilith.cli.app import GROUPS, make_app
from trilith.cli.shared.options import ALIASES
from typer.main import get_command_name

EXAMPLES = "Examples:\n"


def default_of(option: Any) -> str:
    """Return the last column of an option's row: its default, or that it is required."""
    if option.required:
        return "required"
    if option.is_flag or option.default is None or option.multiple:
        return ""
    return f"`{option.default}`"


def row(parameter: Any) -> str:
    """Return the table row of an argument or an option."""
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar]
    words = ", ".join(f"`{name}`" for name in names)
    return f"| {words} | {parameter.help} | {default_of(parameter) if is_option else ''} |"


def section(name: str, command: Any) -> str:
    """Return a command's part of the page: usage, explanation, arguments and options, examples."""
    text, _, examples = command.help.partition(EXAMPLES)
    parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    words = [(argument, argument.metavar + ("..." if argument.nargs == -1 else "")) for argument in arguments]
    usage = " ".join(word if argument.required else f"[{word}]" for argument, word in words)
    lines = [
        f"## `{name}`\n",
        f"```\n{' '.join(f'{name} {usage} [OPTIONS]'.split())}\n```\n",
        _wrapped(text),
        "",
    ]
    if parameters:
        lines += ["| argument or option | meaning | default |", "|---|---|---|", *map(row, parameters), ""]
    examples = re.sub(r" \\\n +", " ", examples)
    block = "\n".join(line.removeprefix("    ") for line in examples.strip("\n").splitlines())
    return "\n".join(lines) + f"\n```bash\n{block.strip()}\n```\n"


def _wrapped(text: str) -> str:
    return "\n\n".join(fill(part, 120, break_long_words=False) for part in text.strip().split("\n\n"))


def every_command(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the words and the command of each command below a group, groups among them."""
    for name, command in getattr(group, "commands", {}).items():
        yield f"{before}{name}", command
        yield from every_command(command, f"{before}{name} ")


def reference() -> str:
    """Return docs/commands.md."""
    program = typer.main.get_command(make_app())
    head = (
        "# Every command\n\nLook here for what a command takes; `trilith COMMAND --help` prints the same. "
        "`make docs` writes this page.\n"
    )
    commands = [(f"trilith {name}", command) for name, command in every_command(program)]
    groups = [f"| {name} | {_links(group)} |" for name, group in GROUPS.items()]
    groups = ["| group | commands |", "|---|---|", *groups, ""]
    aliases = [
        f"| `{option}` | {', '.join(f'`{alias}`' for alias in names)} |" for option, names in ALIASES.items()
    ]
    groups += [
        "Names of Megatron-LM and vLLM are accepted too:\n",
        "| option | also |",
        "|---|---|",
        *aliases,
        "",
    ]
    sections = [section(name, command) for name, command in [("trilith", program), *commands]]
    return "\n".join([head, *groups, *sections])


def _links(group: Iterable[Callable[..., None]]) -> str:
    names = [get_command_name(command.__name__) for command in group]
    return ", ".join(f"[`{name}`](#trilith-{name})" for name in names)


if __name__ == "__main__":
    Path("docs/commands.md").write_text(reference(), encoding="utf-8")
