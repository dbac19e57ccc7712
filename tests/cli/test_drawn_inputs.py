"""Every command is given drawn inputs: damaged and odd files, odd words. None ends in an unexpected error."""

import io
import json
import os
import shutil
import sys
import warnings
from itertools import product
from pathlib import Path
from random import Random

import pytest
from support import forked
from support.command_lines import NAMES, words
from support.drawn_inputs import READS_RUN, draw
from support.drawn_outputs import OUTPUTS
from support.trials import INTERRUPTED, Trial, check, tree
from trilith.cli.app import run

#: Commands that work for long once their input is right.
LONG = {"quickstart", "parity", "doctor", "bench", "train", "plan", "generate", "evaluate", "chat"}
#: Seconds after which such a command is interrupted; the larger number for nightly rows.
WORKS, WORKS_LONGER = 0.4, 2.0
#: Commands that may find a difference.
COMPARES = {"diff", "parity"}
#: What is drawn in a fork: the first few in the default suite, the others with the slow tests.
FEW, AT_ONCE, ALL = 4, 20, 200
DRAWS = [range(FEW, AT_ONCE), *(range(at, at + AT_ONCE) for at in range(AT_ONCE, ALL, AT_ONCE))]
ROWS = Path(__file__).parents[1] / "recipes"
#: What is drawn: a kind, and the commands that it is for.
KINDS = {"input": NAMES, "output": OUTPUTS, "run": READS_RUN, "origin": ["recipe"]}


@pytest.fixture(scope="module")
def more_inputs(inputs):
    """The inputs of all commands, a run with a checkpoint, and the settings of other trainers."""
    made = f"out={inputs / 'trained'}", f"model.tokenizer={inputs / 'tokenizer'}"
    assert run(["train", str(inputs / "recipe.toml"), *made, "--quiet"]) == 0
    for name in ("deepspeed/zero3.json", "megatron/small.json"):
        shutil.copy(ROWS / name, inputs)
    shutil.copy(ROWS / "trainer" / "arguments.json", inputs / "trainer.json")
    small = json.loads((inputs / "small.json").read_text())
    (inputs / "small.log").write_text("".join(f"  {key} ....... {value}\n" for key, value in small.items()))
    return inputs


def draws():
    """Yield parameters: a command, the kinds of what is drawn for it, and the numbers of the draws."""
    for command in NAMES:
        kinds = [kind for kind, names in KINDS.items() if command in names]
        yield pytest.param(command, kinds, range(FEW), id=command)
        for kind, numbers in product(kinds, DRAWS):
            id = f"{kind}-{command}-{numbers.start}"
            yield pytest.param(command, [kind], numbers, id=id, marks=pytest.mark.slow)


@pytest.mark.parametrize(("command", "kinds", "numbers"), [*draws()])
def test_a_drawn_input_is_refused_in_one_line_or_taken(more_inputs, folder, command, kinds, numbers):
    before, trials, left, places = tree(more_inputs), [], [], []
    for kind in kinds:
        makes_at_once = kind == "output" and command in ("quickstart", "bench")  # and would work for long
        for number in numbers[: AT_ONCE // 4] if makes_at_once else numbers:
            where = folder()
            drawn = draw(command, number, more_inputs, where, kind)
            works = 0.1 if makes_at_once else WORKS_LONGER if numbers.start else WORKS
            work = works if command in LONG else 0.0
            codes = {0, 2, 4} | ({1} if command in COMPARES else set())
            trials.append(Trial(where, drawn.words, codes, names=drawn.names, work=work))
            left.append(tree(where))
            places.append(drawn.place)
    # Permissions count as for users, and a warning is printed, not raised.
    codes = check(trials, lambda: (forked.obey_permissions(), warnings.simplefilter("default")), within=1.0)
    assert tree(more_inputs) == before
    for trial, code, files, place in zip(trials, codes, left, places, strict=True):
        now = tree(trial.where)
        changed = {str(trial.where / name) for name in now.keys() | files if now.get(name) != files.get(name)}
        # A run says how each of its starts ended.
        assert code not in (2, 4) or all("trained/status" in path for path in changed), trial.words
        meant = (os.path.normpath(place), os.path.realpath(place))
        stray = [
            path
            for path in changed
            if not place.startswith(path)
            and not (code == INTERRUPTED and path.startswith(f"{trial.where}/tmp/"))  # a compiler's
            and (not path.startswith(meant) or (code == 0 and ".tmp-" in path))
        ]
        assert not place or not stray, (trial.words, stray)


def fail_at(number):
    """Raise ``KeyError``, as a mistake in the code would, where a command opens its file of this number."""
    left, packages = [number], os.path.dirname(os.path.dirname(pytest.__file__))

    def hook(event, arguments):
        if event == "open" and left[0] and not str(arguments[0]).startswith((packages, "/proc", sys.prefix)):
            left[0] -= 1
            if not left[0]:
                raise KeyError("seeded")

    sys.addaudithook(hook)


def test_a_mistake_in_the_code_stays_an_unexpected_error(inputs, folder):
    commands = {command: folder() for command in NAMES}

    def work():
        for command, where in commands.items():
            os.chdir(where)
            fail_at(Random(command).randint(1, 3))
            print(f"\0{command} {run(words(command, inputs, where))}", file=sys.stderr)
        return 0

    ended = forked.run_forked(work, folder(), limit=60)
    told = [line.rsplit("\0", 1) for line in ended.err.splitlines() if "\0" in line]
    assert [end for _, end in told] == [f"{command} 70" for command in NAMES], ended
    assert ended.err.count("KeyError: 'seeded'") == len(NAMES), ended


def only_ascii():
    """Be in an old locale: what is printed must be of ASCII."""
    os.environ.update(LC_ALL="C", LANG="C")
    sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="ascii", errors="strict")


def no_cache():
    """Have a home, and every cache, that cannot be written."""
    forked.obey_permissions()
    home = Path("home")
    home.mkdir(mode=0o555)
    homes = ("HOME", "XDG_CACHE_HOME", "HF_HOME")
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")
    os.environ.update(dict.fromkeys(homes + caches, str(home.absolute())))


def test_a_locale_and_a_home_of_little_use_change_nothing(inputs, folder):
    trials = []
    for command in NAMES:
        where = folder() / "übung"
        where.mkdir()
        (where / "tmp").mkdir()
        code = 3 if command == "doctor" else 0  # which alone says that torch's compiler has no cache
        works = WORKS_LONGER if command == "doctor" else WORKS
        work = works if command in LONG else 0.0
        trials.append(Trial(where, words(command, inputs, where), {code}, work=work))
    check(trials, lambda: (only_ascii(), no_cache()))
