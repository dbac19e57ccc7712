"""Every command meets every fault of the system: one line, a documented code, nothing left, within 5 s.

The table is made from the commands' own signatures: a new command or path option joins by itself, and fails
here until it refuses, or until ``VALID`` says how the new command is called. The seconds are those of a
machine that has a core to spare: what a command computes, and what it lives without waiting for a core.
"""

import os
import shutil
import stat
import sys
from itertools import product
from pathlib import Path

import pytest
from support import forked
from support.command_lines import NAMES, NEEDLESS, parameters_of, places, words
from support.trials import Trial, check, tree

#: Faults in the place of an input.
INPUT_FAULTS = {
    "missing": lambda path: None,
    "unreadable": lambda path: [path.write_text("{}"), path.chmod(0)],
    "pipe": os.mkfifo,
    "dev-zero": lambda path: path.symlink_to("/dev/zero"),
    "dev-null": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
    "broken-link": lambda path: path.symlink_to("nowhere"),
    "link-loop": lambda path: path.symlink_to(path.name),
    "10-GB": lambda path: [path.touch(), os.truncate(path, 10 << 30)],
    "not-UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00\xff" * 10),
    "name-too-long": lambda path: None,
    "address": lambda path: None,
    "a-file-as-folder": lambda path: path.parent.write_text("mine"),
}


#: Faults of a file inside a folder that is an input.
INSIDE_FAULTS = {**INPUT_FAULTS, "empty": Path.touch}
for name in ("name-too-long", "address", "a-file-as-folder"):
    del INSIDE_FAULTS[name]


#: Faults in the place of an output.
OUTPUT_FAULTS = {
    "read-only": lambda path: [path.parent.mkdir(), path.parent.chmod(0o555)],
    "full-disk": lambda path: None,
    "full-mount": lambda path: path.parent.mkdir(),
    "read-only-mount": lambda path: path.parent.mkdir(),
    "pipe": os.mkfifo,
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "dev-full": lambda path: path.symlink_to("/dev/full"),
    "link-loop": lambda path: path.symlink_to(path.name),
    "name-too-long": lambda path: None,
    "address": lambda path: None,
    "a-file-as-folder": lambda path: path.parent.write_text("mine"),
}
#: The exit codes of each fault, where they are not those of bad input or of a bad checkpoint.
CODES = {"full-disk": {3}, "full-mount": {2, 3}, "dev-full": {2, 3}}
MOUNTS = {"full-mount": forked.mount_full, "read-only-mount": forked.mount_read_only}
#: Commands that go on from what they left, so that their folder stays when the disk is full.
STAYS = {"quickstart", "train"}


#: A store that no package knows: read from it or not, it is named with both slashes.
STORE = "nosuch://bucket"
#: Faults that make a command wait, that leave a part of a file, or that name another place. The others run
#: with the slow tests.
FIRST = {"pipe", "dev-zero", "unreadable", "read-only", "full-disk", "address"}
#: Faults that need a fork of their own, or rights that not every user has.
ALONE = {"full-disk", "device", *MOUNTS}


def groups(faults):
    """Yield faults that are tried in one fork, and whether the default suite tries them."""
    for first in (True, False):
        kind = [fault for fault in faults if (fault in FIRST) == first]
        yield from ((each, first) for each in [[f] for f in kind if f in ALONE])
        yield [fault for fault in kind if fault not in ALONE], first


#: Places that commands read, or those that they write, with faults that are tried there in one fork.
CASES = [
    pytest.param(
        [place for place in places() if place.output == output],
        faults,
        id=f"{'outputs' if output else 'inputs'}-{'-'.join(faults)}",
        marks=[] if first else pytest.mark.slow,
    )
    for output in (False, True)
    for faults, first in groups(OUTPUT_FAULTS if output else INPUT_FAULTS)
]


def try_all(inputs, trials, *how, may_change=lambda trial, code: code == 0, adds=False, **more):
    """Check trials; inputs stay as they were, and so does a trial's folder unless it may change, or ``adds``:
    files may be new in it.
    """
    before = tree(inputs), [tree(trial.where) for trial in trials]
    codes = check(trials, *how, **more)
    assert tree(inputs) == before[0]
    for trial, code, left in zip(trials, codes, before[1], strict=True):
        now = tree(trial.where)
        assert now == left or (may_change(trial, code) and (not adds or left.items() <= now.items())), (
            trial.words
        )


@pytest.mark.parametrize(("places", "faults"), CASES)
def test_a_fault_is_one_line_and_leaves_nothing(inputs, folder, places, faults):
    if {*faults} & {*MOUNTS} and not forked.may_mount():
        # A container may forbid mounts; "full-disk" and "read-only" make such faults without them.
        pytest.skip("this system does not let the user mount")
    if "device" in faults and os.geteuid():
        # The kernel lets only root make a device; "dev-zero" is one that every user has.
        pytest.skip("only root may make a device")
    trials, mounted, stays = [], [], set()
    for place, fault in product(places, faults):
        where = folder()
        # Some faults need a folder or a name of their own.
        inner = fault in ("read-only", "a-file-as-folder", *MOUNTS)
        name = ("n" * 300 if fault == "name-too-long" else "x") + place.suffix
        path = where / "inner" / name if inner else where / name
        (OUTPUT_FAULTS if place.output else INPUT_FAULTS)[fault](path)
        at = f"{STORE}/x{place.suffix}" if fault == "address" else str(path)
        line = words(place.command, inputs, where, place, at.removesuffix(".bin"))
        says = STORE if fault == "address" and place.name not in NEEDLESS else ""
        if fault == "full-disk":
            says = str(where)  # the file that is being written
        trials.append(Trial(where, line, CODES.get(fault, {2, 4}), says))
        if "full" in fault and place.command in STAYS:
            stays.add(where)
        if fault in MOUNTS:
            mounted.append((MOUNTS[fault], path.parent, where in stays))
    empty = {}

    def limit():
        forked.obey_permissions()
        if faults == ["full-disk"]:
            forked.small_files_only(16)
        if mounted:
            forked.own_mounts()
        for mount, place, _ in mounted:
            mount(place)
            empty[place] = tree(place)

    def look_into_the_mounts():
        """Nobody else sees them, so their content is looked at in the fork."""
        for _, place, may_stay in mounted:
            left = (name for name in tree(place) if name not in empty[place] and not may_stay)
            print(*left, end="", file=sys.stderr, flush=True)

    try_all(inputs, trials, limit, look_into_the_mounts, may_change=lambda trial, code: trial.where in stays)


def cheap(names, *, first):
    """All of the names as parameters; those which are not first are for the slow tests."""
    return [pytest.param(name, marks=[] if name in first else pytest.mark.slow) for name in names]


FOLDERS = [place for place in places() if not place.output and not place.suffix]


@pytest.mark.parametrize("fault", cheap(INSIDE_FAULTS, first={"pipe"}))
def test_a_fault_inside_a_folder_is_one_line_or_without_effect(inputs, folder, fault):
    """Damage each file in turn. A command that does not need the file succeeds."""
    trials = []
    for place in FOLDERS:
        good = Path(place.good.format(inputs))
        found = good.rglob("*") if good.is_dir() else good.parent.glob(f"{good.name}.*")
        files = sorted(path.relative_to(good.parent) for path in found if path.is_file())
        for file in files:
            where = folder()
            for each in files:
                (where / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(good.parent / each, where / each)
            (where / file).unlink()
            INSIDE_FAULTS[fault](where / file)
            line = words(place.command, inputs, where, place, str(where / good.name))
            trials.append(Trial(where, line, {0, 2, 4}))
    try_all(inputs, trials, forked.obey_permissions, adds=True)


def enter_and_delete(where):
    """Work in a directory that is gone."""
    (where / "gone").mkdir()
    os.chdir(where / "gone")
    (where / "gone").rmdir()


#: Resources of which the machine has too little. A command that needs none of them succeeds.
TOO_LITTLE = {
    "descriptors": lambda: forked.few_descriptors(0),
    "descriptors-3": lambda: forked.few_descriptors(3),
    "descriptors-20": lambda: forked.few_descriptors(20),
    "descriptors-63": lambda: forked.few_descriptors(63),
    "memory": lambda: forked.little_memory(0),
    "memory-1-MiB": lambda: forked.little_memory(2**20),
    "memory-8-MiB": lambda: forked.little_memory(2**23),
    "memory-200-MiB": lambda: forked.little_memory(200 << 20),
    "memory-300-MiB": lambda: forked.little_memory(300 << 20),  # enough to begin
    "threads": forked.no_more_processes,
}


#: What takes a minute, and has tests of its own.
LONG = {"quickstart", "parity", "doctor", "bench"}
#: Those that are tried in the default suite.
WANTED_FIRST = {"descriptors-3", "memory-1-MiB", "threads"}
#: What each command leaves to the next as it was, so that all share a fork; memory it keeps.
WANTING = [
    pytest.param(what, group, id=f"{what}-{name}", marks=[] if what in WANTED_FIRST else pytest.mark.slow)
    for what in TOO_LITTLE
    for name, group in ({name: [name] for name in NAMES} if "memory" in what else {"all": NAMES}).items()
    # Enough memory to begin: nothing is refused, and the whole work of these would follow, for minutes.
    if not (name in LONG and what == "memory-300-MiB")
]


@pytest.mark.parametrize(("what", "commands"), WANTING)
def test_too_little_of_something_is_one_line_and_leaves_nothing(inputs, folder, what, commands):
    allowed = {3} if "descriptors" in what else {0, 3}
    trials = [Trial(where := folder(), words(name, inputs, where), allowed) for name in commands]
    try_all(
        inputs, trials, TOO_LITTLE[what], may_change=lambda trial, code: code == 0 or trial.words[0] in STAYS
    )


def test_a_deleted_working_directory_is_one_line_or_without_effect(inputs, folder):
    """Inputs are named from the root, outputs from the directory that is gone."""
    writes = {place.command for place in places() if place.output}
    codes = {name: {2} if name in writes else {0, 2} for name in NAMES}
    trials = [Trial(folder(), words(name, inputs, Path()), codes[name]) for name in NAMES]
    try_all(inputs, trials, enter=enter_and_delete, may_change=lambda *_: False)


def test_a_umask_that_takes_every_right_leaves_nothing(inputs, folder):
    names = [name for name in NAMES if name not in {*STAYS, *LONG}]
    trials = [Trial(where := folder(), words(name, inputs, where), {0, 2, 3, 4}) for name in names]
    try_all(inputs, trials, lambda: (forked.obey_permissions(), os.umask(0o777)))


#: Numbers that count nothing: any of them will do.
NO_COUNT = {"seed"}
#: The flags of each command that take a whole number and count something.
COUNTS = {}
for command in NAMES:
    for name, flag, _, kinds in parameters_of(command):
        if int in kinds and name not in NO_COUNT:
            COUNTS.setdefault(command, []).append(flag)


def test_an_enormous_count_is_one_line_or_without_effect(inputs, folder):
    trials = []
    for command, flags in COUNTS.items():
        for flag in flags:
            where = folder()
            trials.append(Trial(where, [*words(command, inputs, where), f"{flag}={10**15}"], {0, 2}))
    try_all(inputs, trials, lambda: forked.little_memory(4 << 30))


CALLED = [str(place) for place in places() if place.command in ("inspect", "tokenize", "report")]


@pytest.mark.parametrize("place", cheap([str(p) for p in places() if p.command not in LONG], first=CALLED))
def test_each_way_of_calling_is_valid(inputs, folder, place):
    """Else a command would be refused for another reason, and the table would prove nothing."""
    (called,), where = [each for each in places() if str(each) == place], folder()
    check([Trial(where, words(called.command, inputs, where, called), {0})])
