"""Nothing from input commands the terminal: control characters and changes of direction are shown."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.table import Table
from trilith.cli import say as say_module
from trilith.cli.app import COMMANDS, run
from trilith.system import visible
from trilith.training import console as console_module

ROOT = Path(say_module.__file__).parent

harmful = st.sampled_from(
    [
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x9b31m",
        "\x07",
        "\x08",
        "\r",
        "\x7f",
        "\x85",
        "\u202e",
        "\u2066",
        "\u200f",
    ]
)
texts = st.lists(st.one_of(harmful, st.characters(codec="utf-8")), max_size=8).map("".join)


def obeyed(text: str) -> list[str]:
    """The characters of a text that a terminal would obey, by Unicode's own classes."""
    turning = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    return [
        one
        for one in text
        if (unicodedata.category(one) in ("Cc", "Cs") and one not in "\t\n")
        or unicodedata.bidirectional(one) in turning
        or one in "\u200e\u200f\u061c"
    ]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(text=texts)
def test_what_is_made_visible_commands_nothing_and_loses_nothing(text: str) -> None:
    shown = visible(text)
    assert not obeyed(shown)
    assert len(shown) >= len(text)
    if not obeyed(text) and not {"\u2028", "\u2029"} & set(text):
        assert shown == text


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_text_is_shown_on_a_terminal_and_left_alone_in_a_pipe(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (Screen(), io.StringIO()):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stream)
            say_module.say(text)
        written = stream.getvalue()
        assert written == f"{visible(text) if stream.isatty() else text}\n"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_lines_and_tables_of_the_console_command_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Screen())
        patch.setenv("TERM", "dumb")
        console = console_module.plain_console(soft_wrap=True)
        console.no_color = True
        table = Table("name", box=None, show_header=False)
        table.add_row(text)
        with console.capture() as captured:
            console.print(text)
            console.print(table)
    assert not obeyed(captured.get())


@pytest.mark.parametrize("command", [one.__name__.replace("_", "-") for one in COMMANDS])
def test_no_command_hands_control_characters_of_its_words_to_the_terminal(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "\x1b[2Jx\x1b]0;t\x07a\u202eb\x9b31m\ry"
    monkeypatch.chdir(tmp_path)
    for words in (
        [command, text],
        [command, text, text],
        [command, f"--{text}"],
        [command, f"{text}/{text}"],
    ):
        if command == "quickstart" and not words[1].startswith("--"):
            continue  # it would begin to work in a folder of this name
        assert run(words) != 0
        said = capsys.readouterr()
        assert not obeyed(said.out + said.err), words


def test_commands_print_in_one_way() -> None:
    for path in ROOT.glob("*.py"):
        if path.name not in ("say.py", "app.py"):
            assert "typer.echo(" not in path.read_text(), f"{path.name}: use say"
