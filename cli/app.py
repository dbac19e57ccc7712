"""Build the command line ``trilith`` from its commands, and show failures to the user."""

from __future__ import annotations

import inspect as python_inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import typer.core
import typer.main
from typer.main import get_command_name

from ..system import check_enough, refusal_of, visible
from ..system.addresses import address_of
from ..system.refusals import UNEXPECTED
from ..system.standard_streams import drop_output, name_standard_output, print_any_character, reader_is_gone
from .bench import bench
from .cluster.launch import launch
from .cluster.status import status
from .convert import convert, reshard
from .diff import diff
from .doctor import doctor
from .generate import generate
from .inspect import inspect
from .merge_lora import merge_lora
from .models import models
from .parity import parity
from .plan import plan
from .plan_explain import plan_explain, topics
from .quickstart import quickstart
from .recipe import recipe
from .report import report
from .schedule import schedule
from .tokenize import tokenize
from .train import train
from .train_tokenizer import train_tokenizer
from .verify import verify

#: Every command: a module of this room with one function. Heavy imports belong inside the function, so that
#: ``trilith --help`` answers at once.
COMMANDS: tuple[Callable[..., None], ...] = (
    quickstart,
    doctor,
    bench,
    models,
    convert,
    reshard,
    inspect,
    diff,
    verify,
    parity,
    train_tokenizer,
    tokenize,
    train,
    launch,
    status,
    report,
    merge_lora,
    recipe,
    schedule,
    plan,
    generate,
)

#: The options that name a file to write, which may replace another.
_OUTPUTS = ("out", "write", "html")
USAGE, PREEMPTED, INTERRUPTED = 2, 75, 130
#: Commands that print while they work: a reader that goes away, such as ``head``, leaves their work undone.
_WORK_ON = (["quickstart"], ["bench"], ["train"])


class _Command(typer.core.TyperCommand):
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
        rest = super().parse_args(ctx, args)
        _check_replaced(ctx.params)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name)
            for path in value if isinstance(value, list | tuple) else (value,):
                if isinstance(path, Path) and (address := address_of(path)) is not None:
                    todo = "Copy between the two with the store's own command, such as aws s3 cp --recursive"
                    refusal = f"expected a path of this machine, found the address {address}. {todo}"
                    raise typer.BadParameter(refusal, ctx, cast(Any, parameter))
        return rest


def _check_replaced(values: Mapping[str, Any]) -> None:
    """Refuse an output that would replace a file which the command reads."""
    paths: dict[bool, list[Path]] = {True: [], False: []}
    for name, value in values.items():
        each = value if isinstance(value, list | tuple) else (value,)
        paths[name in _OUTPUTS] += [Path(path) for path in each if isinstance(path, str | Path)]
    for output in filter(os.path.isfile, paths[True]):
        from ..storage.output_file import check_outside

        check_outside(output, [path for path in paths[False] if os.path.isfile(path)])


class _Program(typer.core.TyperGroup):
    """Look a command up by two words first: ``plan explain`` stands beside ``plan``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)


def make_app(commands: Sequence[Callable[..., Any]] = COMMANDS) -> typer.Typer:
    """Return the typer application of these commands; a command has the name of its function."""
    app = _group(_options, commands, cls=_Program)
    if plan in commands:
        app.add_typer(_group(plan_explain, topics()), name="plan explain")
    return app


def _meant(words: Sequence[str], commands: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """Return the command that the first word names, or else all of them."""
    named = tuple(command for command in commands if words[:1] == [get_command_name(command.__name__)])
    return named or tuple(commands)


@lru_cache(maxsize=64)
def _program(commands: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """Return the command line of these commands. typer reads the signature of each for 2 ms, once."""
    return typer.main.get_command(make_app(commands))


def _group(
    callback: Callable[..., Any], commands: Iterable[Callable[..., Any]], **options: Any
) -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, **options)
    app.callback(help=unwrapped(callback.__doc__ or ""))(callback)
    for command in commands:
        app.command(cls=_Command, help=unwrapped(command.__doc__ or ""))(command)
    return app


def unwrapped(text: str) -> str:
    """Join the lines of each paragraph, so that a terminal of any width wraps them; keep indented lines."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", python_inspect.cleandoc(text))


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
    explains a command and shows examples.

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


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("trilith"))
        raise typer.Exit


def run(arguments: Sequence[str], commands: Sequence[Callable[..., Any]] = COMMANDS) -> int:
    """Run a command line; the exit code.

    A failure is one line ``error: ...`` on stderr: 2 for bad input, a path that cannot be used, or usage; 3
    where a peer failed, or the machine has too little of something (room on a disk, memory, file descriptors,
    processes); 4 for a checkpoint that cannot be used; 70 for what was not foreseen; 130 for an interrupt.
    ``--debug``, before the command's name, shows the traceback first.
    """
    print_any_character()
    # What a command makes it must be able to read again, and to remove if it fails.
    os.umask(os.umask(0o077) & 0o077)
    try:
        # As its context's ``obj`` a command finds its own words: with them it may start ranks of itself.
        words = list(arguments)
        _check_text(words)
        program = _program(_meant(words, commands))
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
        if _debug(arguments):
            traceback.print_exc()
        gone = isinstance(error, BrokenPipeError) and (error is not raised or reader_is_gone())
        if gone and (words[:1] not in _WORK_ON or "--dry-run" in words):
            drop_output()
            return 0
        name_standard_output(error)
        code, message = explain(error)
        try:
            sys.stdout.flush()
        except OSError:  # Python would try again at its end, and end with a code of its own
            drop_output()
        sys.stderr.write(f"{'stopped' if code == PREEMPTED else 'error'}: {message}\n")
        return code


def _check_text(words: Sequence[str]) -> None:
    """Refuse words that are no text: recipes, logs and indexes could not hold them."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(f"{visible(word)}: expected UTF-8 text") from None


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code of an error, and its message in one line."""
    if (
        format_message := getattr(error, "format_message", None)
    ) is not None:  # typer's and click's usage errors
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "trilith"
        return USAGE, f"{_one_line(format_message()).rstrip('.')}. See {command} --help"
    # Told by their exit code rather than by class: importing our error classes here would import torch.
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        # A library that was refused a file descriptor may say that the file makes no sense.
        refusal = refusal_of(error) if code == USAGE else None
        if refusal is not None and refusal.code != USAGE:
            return refusal.code, f"{_one_line(str(error))} ({_one_line(str(refusal))})"
        return code, _one_line(str(error))
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    refusal = refusal_of(error)
    if refusal is not None:
        return refusal.code, _one_line(str(refusal))
    read = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return UNEXPECTED, f"unexpected: {_one_line(what + read)} (run again with --debug for the traceback)"


#: A part of a path longer than a file's name may be, and a word longer than any path that somebody types.
_ENDLESS = re.compile(r"[^\s/]{256,}|\S{1000,}")


def _debug(arguments: Sequence[str]) -> bool:
    """Tell whether ``--debug`` stands before the command's name, the first word that is not an option."""
    for argument in arguments:
        if not argument.startswith("-"):
            return False
        if argument == "--debug":
            return True
    return False


def _one_line(text: str) -> str:
    """Return the text in one line, with words shortened that no path on a disk can have."""
    return visible(_ENDLESS.sub(_shorten, " ".join(text.split())))


def _shorten(word: re.Match[str]) -> str:
    return f"{word[0][:40]}...{word[0][-20:]} ({len(word[0]):,} characters)"
