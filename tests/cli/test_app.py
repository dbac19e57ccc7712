"""The error rule: one line, an exit code, no traceback unless asked for; and help that explains itself."""

import ast
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main
from commands_page import EXAMPLES, every_command
from support.command_lines import NAMES, VALID, values_of, words_of
from support.pages import ROOT
from trilith.checkpoints import plan_conversion
from trilith.cli.app import COMMANDS, GROUPS, make_app, run
from trilith.cli.errors import explain
from trilith.cli.shared import options
from trilith.cli.shared.options import ALIASES, COMMANDS_OF_OTHERS, FORMER_COMMANDS, TESTED, with_own_names
from trilith.cli.shared.say import token_progress
from trilith.data.text.tokenize_files import tokenize as make_token_file
from trilith.generation import Sampling
from trilith.generation.request import Request
from trilith.machine import measure
from trilith.parallel_state import BadCheckpoint, BadInput, PeerFailed
from trilith.planner.search.chosen_recipes import new_recipe
from trilith.recipes.sections import LayoutSection
from trilith.testing.parity import Question


def fail(kind):
    """Fail in one way."""
    match kind:
        case "input":
            raise BadInput("config.json", "heads", expected=8, found=7, todo="Mend it")
        case "checkpoint":
            raise BadCheckpoint("step-10", expected="a manifest", found="none")
        case "peer":
            raise PeerFailed("rank 1 died")
        case "bug":
            raise KeyError("first\nsecond")
        case "silent-bug":
            raise RuntimeError
        case "interrupt":
            raise KeyboardInterrupt


def count(number: int):  # typer reads it
    """Needs a number."""
    print(number)


AGAIN = "(for the traceback run it as trilith --debug ...)\n"


def call(*words):
    return run(words, commands=(fail, count))


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        ("input", 2, "error: config.json: heads: expected 8, found 7. Mend it\n"),
        ("checkpoint", 4, "error: step-10: expected a manifest, found none\n"),
        ("peer", 3, "error: rank 1 died\n"),
        ("silent-bug", 70, f"error: unexpected: RuntimeError in trilith fail silent-bug {AGAIN}"),
        ("bug", 70, rf"error: unexpected: KeyError: 'first\nsecond' in trilith fail bug {AGAIN}"),
        ("interrupt", 130, ""),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(kind, code, line, capsys):
    assert call("fail", kind) == code
    assert capsys.readouterr() == ("", line)


def test_an_endless_word_is_shortened_in_an_error_and_a_path_is_not():
    path = "/".join(["d" * 200] * 4)
    _, line = explain(BadInput(path, "count", expected="a number", found="9x" * 3000))
    assert line.startswith(f"{path}: count") and "9x9x" in line and "(6,000 characters)" in line
    assert len(line) < len(path) + 200


@pytest.mark.parametrize(("kind", "code"), [("input", 2), ("bug", 70)])
def test_debug_shows_the_traceback_and_keeps_the_code(kind, code, capsys):
    assert call("--debug", "fail", kind) == code
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "in fail" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_argument_called_debug_is_the_commands_own(capsys):
    assert call("fail", "input", "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and "--debug" in err and err.startswith("error: ")


@pytest.mark.parametrize(
    "words", [("fail",), ("count", "many"), ("count", "--no-such"), ("no-such",), ("--no-such",)]
)
def test_wrong_usage_is_one_line_and_exits_2(words, capsys):
    assert call(*words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and "--help" in err
    assert not out


def test_every_command_explains_itself(capsys):
    for command in (*COMMANDS, fail, count):
        assert command.__doc__, f"{command.__name__} has no docstring"
        assert run([command.__name__.replace("_", "-"), "--help"], (*COMMANDS, fail, count)) == 0
        shown = capsys.readouterr().out
        assert command.__doc__.split()[0] in shown
        assert "…" not in shown, f"the help of {command.__name__} is cut at 80 columns"


PROGRAM = [sys.executable, "-P", "-m", "trilith.cli"]
LONG = ["schedule", "1f1b", "--pipeline=4", "--micro-batches=400"]


@pytest.mark.parametrize(
    "words",
    [
        LONG,
        ["--help"],
        pytest.param(["train", "llama-3.2-1b-1gpu", "--dry-run"], marks=pytest.mark.slow),  # imports torch
    ],
    ids=lambda words: words[0],
)
def test_a_reader_that_stops_is_no_error(words):
    """Neither for what is printed by rich, as typer's help is, nor for plain text."""
    with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(timeout=60) == 0


def test_with_closed_streams_no_file_takes_their_place(tmp_path):
    picture = tmp_path / "schedule.svg"
    line = f"{shlex.join([*PROGRAM, *LONG[:-1], '--micro-batches=4', '--out', str(picture)])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], timeout=60, check=False).returncode == 0
    assert picture.read_text().startswith("<?xml")


#: What a command may import that answers at once. It is about 350; torch alone has 1,000.
MODULES = 400


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("--no-such",)])
def test_what_needs_no_model_does_not_import_torch(words):
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    words_of_python = [*PROGRAM, *words]
    done = subprocess.run(words_of_python, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if words == ("--no-such",) else 0), done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "trilith.cli.app" in imported
    heavy = {"torch", "transformers", "numpy", "matplotlib", "pydantic", "rich.progress"}
    assert not imported & heavy
    assert len(imported) < MODULES


EVERY = dict(every_command(typer.main.get_command(make_app())))
#: Words with which a help text would lean on the option above it or on its section.
LEANING = {"and", "of", "also", "ditto", "with", "its", "it", "so", "the", "a", "an", "another"}


@pytest.mark.parametrize("name", EVERY)
def test_every_option_makes_sense_alone_and_the_command_has_one_sentence_in_the_list(name):
    first = EVERY[name].help.split("\n\n")[0]
    assert first.endswith(".") and len(first) <= 80, first
    for one in EVERY[name].params:
        if not getattr(one, "hidden", False):
            assert one.param_type_name == "option" or one.metavar, f"{one.name} has no name for users"
            assert one.help and one.help.split()[0].strip(",:;").lower() not in LEANING, (one.name, one.help)


@pytest.mark.parametrize("name", EVERY)
def test_every_command_shows_examples_that_fit_on_a_terminal_of_80_with_its_margins(name):
    """They are on the page of commands, whose lines ``test_pages.py`` tries."""
    examples = EVERY[name].help.partition(EXAMPLES)[2]
    assert f"trilith {name}" in examples and max(map(len, examples.splitlines())) <= 78


REFUSED = """
import json, sys
from trilith.cli.app import run
for words in json.loads(sys.argv[1]):
    code = run(words)
    print(json.dumps([words[0], code, len(sys.modules), "torch" in sys.modules]))
"""


def first_path(command):
    """Return the words of a command whose first path is not there, nor any other."""
    valid = VALID[command]
    name = "model" if command == "plan" else next(key for key, (word, *_) in valid.items() if "{}" in word)
    return words_of(command, {**values_of(command, Path("no"), Path("no/where")), name: ["nothere"]})


def test_a_first_path_that_is_not_there_is_refused_before_anything_large_is_imported(tmp_path):
    with_paths = [name for name in NAMES if any("{}" in str(each) for each in VALID[name].values())]
    lines = [first_path(name) for name in with_paths if name != "new"]  # which has options alone
    (tmp_path / "runs").mkdir()  # so that this is no model of the hub
    lines += [["verify", "runs/nothere"], ["convert", "runs/nothere", "out"]]
    words = [sys.executable, "-P", "-c", REFUSED, json.dumps(lines)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    for line, refusal in zip(done.stdout.splitlines(), done.stderr.splitlines(), strict=True):
        command, code, modules, torch_is_imported = json.loads(line)
        assert code == 2 and not torch_is_imported and modules < MODULES, line
        start = ("error: nothere: expected ", "error: runs/nothere: expected ")
        assert refusal.startswith(start) and "found no such f" in refusal, command


@pytest.mark.parametrize("words", [(), ("-h",), ("help",), ("--help",)])
def test_help_is_given_for_no_words_too(words, capsys):
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert all(f"─ {name} ─" in shown for name in GROUPS) and "<bool>" not in shown


def test_help_of_a_command_can_be_asked_for_in_three_ways(capsys):
    texts = []
    for words in (("verify", "--help"), ("verify", "-h"), ("help", "verify")):
        assert run(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and "trilith verify" in texts[0]


def test_version_is_also_a_command(capsys):
    assert run(["version"]) == run(["--version"]) == 0
    assert capsys.readouterr().out.split() == [version("trilith")] * 2


@pytest.mark.parametrize(
    ("terminal", "no_color", "red"),
    [
        (None, "", False),  # no terminal
        ("xterm", "", True),  # an empty NO_COLOR is none
        ("xterm", "1", False),
        ("dumb", "", False),
    ],
)
def test_errors_are_red_on_a_terminal_with_colours_alone(terminal, no_color, red, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", terminal or "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal is not None)
    assert run(["verify", "--nothing"]) == 2
    start = "\x1b[31m\x1b[1merror\x1b[0m: " if red else "error: "
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.parametrize("quiet", [False, True])
def test_the_rate_of_tokens_leaves_out_what_an_earlier_run_wrote(quiet, monkeypatch):
    screen, now = io.StringIO(), [0.0]
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    for name, text in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, text)
    with token_progress(4000, quiet=quiet) as moved:
        for read in (900, 1000, 1100):
            moved(read, read // 2)
            now[0] += 10
    assert [words in screen.getvalue() for words in ("10 bytes/s", "550 tokens")] == [not quiet] * 2


@pytest.mark.parametrize(
    ("words", "names"),
    [("trilith ver", {"verify"}), ("trilith train llama-3.2", {"llama-3.2-1b-1gpu", "llama-3.2-1b-8gpus"}),
     ("trilith plan gpt-j", {"gpt-j-6b"}),
     ("trilith models pythia-1", {"pythia-160m", "pythia-1.4b", "pythia-12b"}),
     ("trilith schedule z", {"zbv"}), ("trilith parity hf --schedule 1", {"1f1b"}),
     ("trilith train --config h", set())],  # refused when it is run: no error amid the line
)  # fmt: skip
def test_a_shell_completes_commands_recipes_sizes_and_schedules(words, names, monkeypatch, capsys):
    monkeypatch.setenv("_TRILITH_COMPLETE", "complete_bash")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        run([])
    printed = capsys.readouterr()
    assert set(printed.out.split()) == names and not printed.err


def test_options_of_other_programs_are_taken_for_ours_where_a_command_has_them():
    options = {"--tensor", "--pipeline", "-tp"}
    words = ["m", "--tensor-model-parallel-size", "2", "--pp=3", "-tp", "--cp", "2", "--", "--tp"]
    assert with_own_names(words, options) == ["m", "--tensor", "2", "--pipeline=3", *words[4:]]


def test_each_name_of_another_program_stands_for_an_option_of_some_command_and_is_none():
    ours = {name for command in EVERY.values() for option in command.params for name in option.opts}
    assert set(ALIASES) <= ours
    aliases = [alias for names in ALIASES.values() for alias in names]
    assert len(set(aliases)) == len(aliases) and not ours & {*aliases}


OWN_SHELL = " is for the shell in which it is typed. Leave out tcsh"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train --config a.toml", "RECIPE is an argument: write it without --config. See trilith "),
        ("train --recipe a.toml", "RECIPE is an argument: write it without --recipe. See trilith "),
        ("train r.toml --layout.tensor 2", "layout.tensor=VALUE"),
        ("trian r.toml", "error: No such command 'trian'. Did you mean 'train'? See trilith --help"),
        ("convert a b --to huggingface", "Invalid value for '--to': 'huggingface' is not one of 'hf'"),
        ("count a\udcff", r"error: Invalid value: a\udcff: expected UTF-8 text. See trilith --help"),
        # The option of another program is taken for ours.
        ("parity nothing-here -tp 2 --pipeline-model-parallel-size=2 --tp=0", "--tensor"),
        *((f"{words} --seed 1{'0' * 30}", "--seed") for words in ("generate hf --prompt a", "parity hf")),
        ("--install-completion tcsh", f"--install-completion{OWN_SHELL}"),
        ("--show-completion tcsh", f"--show-completion{OWN_SHELL}"),
    ],
)
def test_a_refusal_of_usage_reads_well(line, says, capsys):
    assert run(line.split(), (*COMMANDS, count)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["doctor", "bench"])
def test_commands_that_look_at_a_machine_say_on_what_they_were_tested(name):
    assert TESTED in " ".join(EVERY[name].help.split())


@pytest.mark.parametrize("name", COMMANDS_OF_OTHERS)
def test_a_command_of_another_program_is_refused_with_what_to_type_here(name, capsys):
    hint = COMMANDS_OF_OTHERS[name]
    assert run([name, "x"]) == 2
    assert capsys.readouterr().err == f"error: No such command '{name}'. {hint}. See trilith --help\n"
    assert name not in EVERY
    for line in re.findall(r"`trilith (.*?)`", hint):
        assert line.split()[0] in EVERY


def test_a_former_command_is_the_command_that_has_its_meaning(capsys):
    for name, words in FORMER_COMMANDS.items():
        assert name not in EVERY and words[0] in EVERY
        assert run(["--debug", name, "--help"]) == 0
        assert f"trilith {words[0]} " in capsys.readouterr().out


def test_the_help_names_every_table_of_names_that_comes_with_trilith():
    tables = {path.name.removesuffix(".names.toml") for path in ROOT.rglob("foreign/*.names.toml")}
    (listed,) = re.findall(r"table of names \(([\w, ]+)\)", options.NAMES)
    assert set(listed.split(", ")) == tables


#: What the commands hand their options on to, by name.
TAKERS = {
    "bench": [measure],
    "chat": [Request, Sampling],
    "convert": [plan_conversion],
    "generate": [Request, Sampling],
    "new": [new_recipe],
    "parity": [Question, LayoutSection],
    "tokenize": [make_token_file],
}
#: Options that act as they are parsed.
BY_THEMSELVES = {"strict"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_every_option_is_used_by_its_command_or_handed_on(command):
    text, takers = inspect.getsource(command), TAKERS.get(command.__name__, [])
    assert ("from_options(" in text) == bool(takers)
    used = {node.id for node in ast.walk(ast.parse(text).body[0]) if isinstance(node, ast.Name)}
    used |= {name for taker in takers for name in inspect.signature(taker).parameters}
    if "in of_system.options" in text:  # launch, by tables of names
        return
    assert not inspect.signature(command).parameters.keys() - used - BY_THEMSELVES
