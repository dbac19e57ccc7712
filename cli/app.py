"""Build the command line ``trilith`` from its commands, and show failures to the user."""

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import typer.core
import typer.main
from typer.main import get_command_name

from ..system import address_of, check_enough, refusal_of, visible
from ..system.standard_streams import (
    drop_output,
    goes_nowhere,
    name_standard_output,
    pass_any_character,
    reader_is_gone,
)
from .errors import INTERRUPTED, explain, write_error
from .plan import plan
from .plan_explain import plan_explain, topics
from .shared.options import COMMANDS_OF_OTHERS, FORMER_COMMANDS, what_to_type, with_own_names
from .shared.parameters import declared, help_text

#: The commands by their groups in the help: each a function in the file of its name. Heavy imports belong
#: inside the function, so that ``trilith --help`` answers at once.
_NAMES = {
    "Start": "quickstart doctor bench models",
    "Weights": "convert inspect diff verify parity merge_lora",
    "Data": "tokenize train_tokenizer",
    "Train": "new train status report evaluate generate chat launch recipe",
    "Plan": "plan schedule",
}

Command = Callable[..., Any]
GROUPS: Mapping[str, tuple[Command, ...]] = {
    group: tuple(getattr(import_module(f".{name}", __package__), name) for name in names.split())
    for group, names in _NAMES.items()
}
COMMANDS = tuple(command for group in GROUPS.values() for command in group)

#: The options that name a file to write, which may replace another.
_OUTPUTS = ("out", "write", "html")
#: Commands that print while they work: a reader that goes away, such as ``head``, leaves their work undone.
_WORK_ON = (["quickstart"], ["bench"], ["train"])


class _BareFlags:
    """Show an option that takes no value without a type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = cast(Any, super()).get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_BareFlags, typer.core.TyperCommand):
    """Refuse an address where a path of this machine is meant: such a parameter is annotated ``Path``.

    An error that nobody foresaw gets a note with the command's arguments, which name what it read.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if not hasattr(error, "exit_code") and refusal_of(error) is None:
                error.add_note(f"in trilith {ctx.info_name} {shlex.join(self._words)}")
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._words = [*args]
        parameters = self.get_params(ctx)
        options = {name for parameter in parameters for name in parameter.opts}
        arguments = {parameter.metavar for parameter in parameters if parameter.metavar}
        if not ctx.resilient_parsing and (refusal := what_to_type(args, options, arguments)):
            raise typer.BadParameter(refusal, ctx)
        rest = super().parse_args(ctx, with_own_names(args, options))
        files: dict[bool, list[Path]] = {True: [], False: []}
        for parameter in parameters:
            value = ctx.params.get(parameter.name)
            for path in value if isinstance(value, list | tuple) else (value,):
                if isinstance(path, Path) and (address := address_of(path)) is not None:
                    todo = "Copy between the two with the store's own command, such as aws s3 cp --recursive"
                    refusal = f"expected a path of this machine, found the address {address}. {todo}"
                    raise typer.BadParameter(refusal, ctx, parameter)
                if isinstance(path, str | Path) and os.path.isfile(path):
                    files[parameter.name in _OUTPUTS].append(Path(path))
        for output in files[True]:  # which would replace a file that the command reads
            from ..storage.output_places import check_outside

            check_outside(output, files[False])
        return rest


class _Program(_BareFlags, typer.core.TyperGroup):
    """Look a command up by its name of now; by two words first: ``plan explain`` stands beside ``plan``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        args = [*FORMER_COMMANDS.get(args[0], args[:1]), *args[1:]]
        if hint := COMMANDS_OF_OTHERS.get(args[0]):
            ctx.fail(f"No such command '{args[0]}'. {hint}")
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)


def make_app(commands: Sequence[Command] = COMMANDS, *, overview: bool = False) -> typer.Typer:
    """Return the typer application of these commands; a command has the name of its function.

    ``overview``: commands without their parameters, for the help that lists them. typer takes 2 ms for each.
    """
    app = _group(_options, commands, overview=overview)
    if plan in commands:
        explain_group = _group(plan_explain, () if overview else topics(), overview=overview)
        app.add_typer(explain_group, name="plan explain", rich_help_panel="Plan")
    return app


@lru_cache(maxsize=64)
def _program(commands: tuple[Command, ...], overview: bool) -> Command:
    return typer.main.get_command(make_app(commands, overview=overview))


def _group(callback: Command, commands: Iterable[Command], *, overview: bool) -> typer.Typer:
    first = callback is _options
    app = typer.Typer(
        cls=_Program if first else typer.core.TyperGroup,
        callback=callback,
        help=help_text(callback.__doc__ or ""),
        add_completion=first,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    panels = {command.__name__: name for name, group in GROUPS.items() for command in group}
    for command in commands:
        name, panel = get_command_name(command.__name__), panels.get(command.__name__)
        listed = app.command(name, cls=_Command, help=help_text(command.__doc__ or ""), rich_help_panel=panel)
        listed((lambda: None) if overview else declared(command))
    return app


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(version("trilith"))
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="print the traceback of an error; stands before the command's name"),
    ] = False,
) -> None:
    """Train language models in any parallel layout, and convert their weights.

    A layout is the number of ranks along each parallel axis. It changes neither the model nor its results,
    so a run, a checkpoint or a conversion may move between layouts at any time. `trilith COMMAND --help`
    explains a command and shows examples. The pages lie in docs/ of the repository; README.md lists them.

    Exit codes: 0 success, also if the reader of the output stops (`| head`) and no work is left undone; 1 a
    comparison found a difference, or a measurement failed; 2 bad input; 3 a rank failed, or the machine ran
    out of something; 4 damaged checkpoint; 70 unexpected error; 75 stopped by a signal after saving; 130
    Ctrl-C.

    Examples:

        trilith quickstart
        trilith convert Llama-3.2-1B sharded --tensor 4 --pipeline 2
        trilith tokenize corpus.txt --tokenizer Llama-3.2-1B --out tokens
        trilith train recipe.toml
    """
    check_enough()


def run(arguments: Sequence[str], commands: Sequence[Command] = COMMANDS) -> int:
    """Run a command line; the exit code.

    A failure is one line ``error: ...`` on stderr: 2 for bad input, a path that cannot be used, or usage; 3
    where a peer failed, or the machine has too little of something (room on a disk, memory, file descriptors,
    processes); 4 for a checkpoint that cannot be used; 70 for what was not foreseen; 130 for an interrupt.
    ``--debug``, before the command's name, shows the traceback first.
    """
    pass_any_character()
    if "RANK" in os.environ:
        from ..system.process_info import end_with_parent

        end_with_parent()  # before the imports that take seconds: the launcher may be killed meanwhile
    # What a command makes it must be able to read again, and to remove if it fails.
    os.umask(os.umask(0o077) & 0o077)
    nowhere = goes_nowhere()
    try:
        # As its context's ``obj`` a command finds its own words: with them it may start ranks of itself.
        words = _as_options(arguments)
        _check_text(words)
        overview = words in (["--help"], ["-h"]) and "_TRILITH_COMPLETE" not in os.environ
        meant = tuple(command for command in commands if words[:1] == [get_command_name(command.__name__)])
        program = _program(meant or tuple(commands), overview)
        # What an option sets for its command ends with the command.
        code = copy_context().run(program, words, prog_name="trilith", standalone_mode=False, obj=words)
        sys.stdout.flush()  # a full disk behind it, or a reader that is gone, is told here and not at the end
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (Exception, SystemExit) as raised:
        # typer ends the process in silence where the reader of the output is gone
        error = raised.__context__ if isinstance(raised, SystemExit) else raised
        if not isinstance(error, Exception):
            raise
        if "--debug" in takewhile(lambda word: word.startswith("-"), arguments):
            traceback.print_exc()
        gone = isinstance(error, BrokenPipeError) and reader_is_gone(nowhere=nowhere)
        if gone and (words[:1] not in _WORK_ON or {"--dry-run", "--help", "-h"} & {*words}):
            drop_output()
            return 0
        name_standard_output(error)
        code, message = explain(error)
        try:
            sys.stdout.flush()
        except OSError:  # Python would try again at its end, and end with a code of its own
            drop_output()
        write_error(code, message)
        return code


def _as_options(words: Sequence[str]) -> list[str]:
    """Return the words with options for what some type as commands; no word at all asks for help."""
    match [*words]:
        case []:
            return ["--help"]
        case ["help", *command]:
            return [*command, "--help"]
        case ["version"]:
            return ["--version"]
        case ["--install-completion" | "--show-completion" as option, word, *_]:
            raise typer.BadParameter(
                f"{option} is for the shell in which it is typed. Leave out {visible(word)}"
            )
    return [*words]


def _check_text(words: Sequence[str]) -> None:
    """Refuse words that are no text: recipes, logs and indexes could not hold them."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(f"{visible(word)}: expected UTF-8 text") from None
