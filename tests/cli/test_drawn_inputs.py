"""Every command is given drawn inputs: damaged and odd files, odd words. None ends in an unexpected error."""

import io
import os
import sys
from pathlib import Path
from random import Random

import pytest
from support import forked
from support.command_lines import NAMES, words
from support.drawn_inputs import draw
from support.trials import Trial, check, tree
from trilith.cli.app import run

#: Commands that work for long once their input is right.
LONG = {"quickstart", "parity", "doctor", "bench", "train", "plan", "generate"}
#: Commands that may find a difference.
COMPARES = {"diff", "parity"}
AT_ONCE = 20


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow if first else []) for first in range(0, 200, AT_ONCE)],
)
@pytest.mark.parametrize("command", NAMES)
def test_a_drawn_input_is_refused_in_one_line_or_taken(inputs, folder, command, first):
    before, trials, left = tree(inputs), [], []
    for number in range(first, first + AT_ONCE):
        where = folder()
        drawn = draw(command, number, inputs, where)
        work = 2.0 if command in LONG else 0.0
        codes = {0, 2, 4} | ({1} if command in COMPARES else set())
        trials.append(Trial(where, drawn.words, codes, names=drawn.names, work=work))
        left.append(tree(where))
    codes = check(trials, within=1.0)
    assert tree(inputs) == before
    for trial, code, files in zip(trials, codes, left, strict=True):
        assert code not in (2, 4) or tree(trial.where) == files, trial.words


def fail_at(number):
    """Raise ``KeyError``, as a mistake in the code would, where a command opens its file of this number."""
    left, packages = [number], os.path.dirname(os.path.dirname(pytest.__file__))

    def hook(event, arguments):
        if event == "open" and left[0] and not str(arguments[0]).startswith((packages, "/proc", sys.prefix)):
            left[0] -= 1
            if not left[0]:
                raise KeyError("seeded")

    sys.addaudithook(hook)


@pytest.mark.parametrize("command", NAMES)
def test_a_mistake_in_the_code_stays_an_unexpected_error(inputs, folder, command):
    where = folder()
    code = forked.run_forked(
        lambda: (fail_at(Random(command).randint(1, 3)), run(words(command, inputs, where)))[1],
        where,
        limit=60,
    )
    assert code.code == 70 and "KeyError: 'seeded'" in code.err, code


def only_ascii():
    """Be in an old locale: what is printed must be of ASCII."""
    os.environ.update(LC_ALL="C", LANG="C")
    sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="ascii", errors="strict")


def no_cache():
    """Have a home, and every cache, that cannot be written."""
    forked.obey_permissions()
    home = Path("home")
    home.mkdir(mode=0o555)
    caches = (
        "HOME",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "MPLCONFIGDIR",
    )
    os.environ.update(dict.fromkeys(caches, str(home.absolute())))


@pytest.mark.parametrize("surroundings", [only_ascii, no_cache])
def test_a_locale_or_a_home_of_little_use_changes_nothing(inputs, folder, surroundings):
    trials = []
    for command in NAMES:
        where = folder() / "übung"
        where.mkdir()
        (where / "tmp").mkdir()
        trials.append(Trial(where, words(command, inputs, where), {0}, work=1.5 if command in LONG else 0.0))
    check(trials, surroundings)
