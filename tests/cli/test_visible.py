"""Nothing from input commands the terminal: control characters and changes of direction are shown."""

import io
import json
import re
import shutil
import unicodedata
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.table import Table
from safetensors.torch import load_file, save_file
from support.configs import TINY_LLAMA
from support.short_runs import write_short_recipe
from trilith.checkpoints import convert, read_source
from trilith.cli.app import COMMANDS, run
from trilith.cli.shared import say as say_module
from trilith.generation import request as generate_run
from trilith.generation.request import Request
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import Layout
from trilith.runs import launch
from trilith.runs import terminal as console_module
from trilith.system import visible

harmful = st.sampled_from(["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", *"\x07\x08\r\x7f\x85\u202e\u2066\u200f"])
texts = st.lists(st.one_of(harmful, st.characters(codec="utf-8")), max_size=8).map("".join)


def obeyed(text):
    """Return the characters of a text that a terminal would obey, by Unicode's own classes."""
    turning = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    return [
        one
        for one in text
        if (unicodedata.category(one) in ("Cc", "Cs") and one not in "\t\n")
        or unicodedata.bidirectional(one) in turning
        or one in "\u200e\u200f\u061c"
    ]


class Screen(io.StringIO):
    def isatty(self):
        return True


@given(text=texts)
def test_what_is_made_visible_commands_nothing_and_loses_nothing(text):
    shown = visible(text)
    assert not obeyed(shown)
    assert len(shown) >= len(text)
    if not obeyed(text) and not {"\u2028", "\u2029"} & set(text):
        assert shown == text


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_text_is_shown_on_a_terminal_and_left_alone_in_a_pipe(text, monkeypatch):
    for stream in (Screen(), io.StringIO()):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stream)
            say_module.say(text)
        written = stream.getvalue()
        assert written == f"{visible(text) if stream.isatty() else text}\n"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_lines_and_tables_of_the_console_command_nothing(text, monkeypatch):
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
    command, tmp_path, monkeypatch, capsys
):
    text = "\x1b[2Jx\x1b]0;t\x07a\u202eb\x9b31m\ry"
    monkeypatch.chdir(tmp_path)
    for words in ([text], [text, text], [f"--{text}"], [f"{text}/{text}"]):
        if command == "quickstart" and not words[0].startswith("--"):
            continue  # it would begin to work in a folder of this name
        assert run([command, *words]) != 0
        said = capsys.readouterr()
        assert not obeyed(said.out + said.err), words


COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # rich's and typer's own, around what is shown
HOSTILE = ("value", "key", "type", "tensor", "sharded")
HARM = "\x1b]0;title\x07\x1b[2Jx\u202ey\x9b31m\rz"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Make folders and files whose names and values hold control characters."""
    path = tmp_path_factory.mktemp("hostile")
    write_hf_folder(path / "hf", TINY_LLAMA)
    changes = {"value": {"hidden_act": HARM}, "key": {HARM: HARM}, "type": {"model_type": HARM}}
    for name, change in changes.items():
        shutil.copytree(path / "hf", path / name)
        (path / name / "config.json").write_text(json.dumps({**TINY_LLAMA, **change}))
    shutil.copytree(path / "hf", path / "tensor")
    file = path / "tensor" / "model.safetensors"
    save_file(load_file(file) | {f"model.{HARM}": torch.zeros(2)}, file)
    convert(path / "hf", path / "sharded")
    manifest = path / "sharded" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"llama"', json.dumps(HARM)))
    for name, text in (
        ("dtype", f"dtype = {json.dumps(HARM)}"),
        ("unknown", f"{json.dumps(HARM)} = 1"),
        ("folder", f"[model]\ninit_from = {json.dumps(HARM)}\n[data]\ntokens = 't'"),
    ):
        (path / f"{name}.toml").write_text(f"out = 'run'\nsteps = 1\n{text}\n")
    (path / "prompts.txt").write_text(HARM)
    (path / "prompts.jsonl").write_text(json.dumps({"prompt": 1, HARM: HARM}))
    return path


LINES = [
    *(f"{command} {name}" for command in ("inspect", "verify", "diff hf") for name in HOSTILE),
    *(f"convert {name} out-{name}" for name in ("value", "type", "sharded")),
    *(f"train {name}.toml{dry}" for name in ("dtype", "unknown", "folder") for dry in ("", " --dry-run")),
    *(f"generate hf --prompt-file prompts.{kind}" for kind in ("txt", "jsonl")),
    "generate type --prompt a",
]


@pytest.mark.parametrize("line", LINES)
def test_no_command_hands_control_characters_of_a_file_to_the_terminal(line, hostile, monkeypatch):
    monkeypatch.chdir(hostile)
    out, err = Screen(), Screen()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    run(line.split())
    printed = out.getvalue() + err.getvalue()
    said = COLOUR.sub("", printed.replace("\x1b[2J", "[2J obeyed \x07"))
    assert said and not obeyed(said)


def test_a_warning_about_a_config_commands_nothing_in_a_program_of_ones_own(hostile):
    with pytest.warns(UserWarning, match="is unknown and ignored") as told:
        read_source(hostile / "key")
    assert [str(warning.message) for warning in told] and not obeyed("".join(str(w.message) for w in told))


def test_a_prompt_that_is_written_out_commands_nothing(monkeypatch):
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    prepared = SimpleNamespace(ids=[[1]], load=lambda state: SimpleNamespace(can_cache=True))
    ranks = SimpleNamespace(layout=Layout(), run=lambda prepare, work, **how: work(prepared, None, "cpu"))
    monkeypatch.setattr(
        generate_run, "continue_rows", lambda *words, on_text, **how: [*(on_text(HARM) or ())]
    )
    write = partial(say_module.say, nl=False)
    generate_run.run_generation(Request(Path("hf"), [HARM]), ranks, write=write)
    assert screen.getvalue() == 2 * visible(HARM) + "\n"


def test_the_word_of_a_failed_rank_commands_nothing(tmp_path, monkeypatch, capsys):
    """A rank's status file holds its error, which may quote a file."""
    failed = SimpleNamespace(rank=1, code=2, error=HARM)
    child = SimpleNamespace(poll=lambda: 1, pid=0, returncode=1)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *words, **more: child)
    monkeypatch.setattr(launch, "first_failure", lambda *words, **more: failed)
    assert launch.launch([], 2, tmp_path / "status") == 2
    said = capsys.readouterr().err
    assert "rank 1" in said and not obeyed(said)


def test_a_run_in_a_folder_with_brackets_prints_its_name(tmp_path, capfd):
    out = tmp_path / "a[/b][red]:tada:" / "run"  # to rich a tag that was never opened, a colour and an emoji
    train = ["train", str(write_short_recipe(tmp_path / "recipe.toml", out))]
    for words in ([*train, "stop_after=1"], train, ["inspect", str(out / "checkpoints")]):
        assert run(words) == 0, words
        assert str(out) in capfd.readouterr().out
