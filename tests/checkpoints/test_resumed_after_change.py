"""A conversion that goes on after a stop writes the source as it is now, or nothing: never two mixed."""

import os
import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.configs import TINY_LLAMA
from support.damage import flip_bit
from support.folders import contents
from support.inputs import write_adapter
from trilith.checkpoints import ConversionOptions, carry_out, convert, plan_conversion, plan_merge
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadCheckpoint
from trilith.storage import safetensors_reader as tensor_file

#: The folder that changes, and the plan that reads it.
PLANS = {
    "to-sharded": ("hf", lambda at: plan_conversion(at / "hf", tensor=2, pipeline=2)),
    "to-hf": ("sharded", lambda at: plan_conversion(at / "sharded", to="hf")),
    "reshard": ("sharded", lambda at: plan_conversion(at / "sharded", to="sharded", tensor=4)),
    "merge-base": ("hf", lambda at: plan_merge(at / "hf", at / "adapter")),
    "merge-adapter": ("adapter", lambda at: plan_merge(at / "hf", at / "adapter")),
}
WAYS = (
    *("in place", "in place, time put back", "renamed over", "renamed over, time put back"),
    *("touched", "not"),
)
#: Where a bit is flipped, as a share of a file, and where else if there is time.
PLACES, MORE = (0.1, 0.5, 0.9), (0.0, 0.02, 0.2, 0.3, 0.4, 0.7, 0.97)


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    """Skip syncs to the disk: the process stops here, but the power is never cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folders ``old`` and ``new`` of the same names, shapes and sizes; every tensor differs."""
    root = tmp_path_factory.mktemp("originals")
    for which, change in (("old", 0.0), ("new", 1.0)):
        folder = root / which
        write_hf_folder(folder / "hf", TINY_LLAMA)
        weights = {name: one + change for name, one in load_file(folder / "hf" / "model.safetensors").items()}
        save_file(weights, folder / "hf" / "model.safetensors")
        convert(folder / "hf", folder / "sharded", tensor=2)
        write_adapter(folder / "adapter", folder / "hf", change + 1)
    yield root


def change(folder, new, way):
    """Give the folder's files the new content, or only new time stamps."""
    for path in [*folder.iterdir()]:
        before = path.stat()
        if way == "touched":
            os.utime(path)
        elif way.startswith("renamed"):
            shutil.copyfile(new / path.name, path.with_name("fresh"))
            path.with_name("fresh").rename(path)
        elif way.startswith("in place"):
            path.write_bytes((new / path.name).read_bytes())
        if way.endswith("back"):
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def begin(plan, dst, share):
    """Start the same work and stop it when so much of it was made, as Ctrl-C does; each piece is noted."""
    made = []

    def progress(done):
        made.append(done)
        if sum(made) > share * plan.nbytes:
            raise KeyboardInterrupt

    options = ConversionOptions(workers=1, note_every=1, progress=progress)
    with pytest.raises(KeyboardInterrupt):
        carry_out(plan, dst, options=options)
    assert list(dst.parent.glob(f"{dst.name}.tmp-*/journal.jsonl"))
    assert not list(dst.parent.glob("*.tmp-lock"))


@pytest.fixture
def old(originals, tmp_path):
    shutil.copytree(originals / "old", tmp_path, dirs_exist_ok=True)
    return tmp_path


def finish_and_compare(plan_of, at):
    """Do the same work again after a stop, and elsewhere at once: the outputs are equal."""
    carry_out(plan_of(at), at / "out")
    carry_out(plan_of(at), at / "whole")
    assert contents(at / "out") == contents(at / "whole")
    assert not [path.name for path in at.iterdir() if ".tmp-" in path.name]


@pytest.mark.parametrize(
    ("form", "number"),
    [
        # In the default suite each form is changed in every other way, and each way with every other form.
        pytest.param(form, at, id=f"{form}-{way}", marks=[pytest.mark.slow] * ((row + at) % 2))
        for row, form in enumerate(PLANS)
        for at, way in enumerate(WAYS)
    ],
)
def test_a_source_that_changed_between_is_wholly_the_new_one(originals, old, form, number):
    folder, plan_of = PLANS[form]
    begin(plan_of(old), old / "out", (0.3, 0.6, 0.9)[(number + [*PLANS].index(form)) % 3])
    change(old / folder, originals / "new" / folder, WAYS[number])
    finish_and_compare(plan_of, old)


@pytest.mark.parametrize("form", PLANS)
def test_new_weights_are_told_where_the_file_system_has_no_change_time(originals, old, form, monkeypatch):
    """Only the content differs then: not the inode, the size, or any time."""
    whole = tensor_file.identity_of
    monkeypatch.setattr(tensor_file, "identity_of", lambda status: whole(status)[:-1])
    folder, plan_of = PLANS[form]
    begin(plan_of(old), old / "out", 0.8)
    change(old / folder, originals / "new" / folder, "in place, time put back")
    finish_and_compare(plan_of, old)


@pytest.mark.parametrize("form", PLANS)
def test_a_source_that_changes_while_it_is_read_is_refused(originals, old, form):
    folder, plan_of = PLANS[form]
    changed = []

    def progress(done):
        if not changed:
            change(old / folder, originals / "new" / folder, "in place, time put back")
            changed.append(True)

    with pytest.raises(BadCheckpoint, match=r"a file changed since|CRC-32"):
        carry_out(plan_of(old), old / "out", options=ConversionOptions(workers=1, progress=progress))
    assert not list(old.glob("out*"))


@pytest.mark.parametrize("place", [*PLACES, *(pytest.param(at, marks=pytest.mark.slow) for at in MORE)])
@pytest.mark.parametrize("victim", ["journal", "tensors"])
@pytest.mark.parametrize("form", ["to-sharded", "to-hf", "merge-base"])
def test_a_flipped_bit_in_what_a_stop_left_has_no_effect(old, form, victim, place):
    """A piece that is not as noted, or of which the note is damaged, is made again."""
    plan_of = PLANS[form][1]
    begin(plan_of(old), old / "out", 0.9)
    (left,) = old.glob("out.tmp-*")
    path = left / "journal.jsonl" if victim == "journal" else min(left.glob("*.safetensors"))
    flip_bit(path, int(place * path.stat().st_size), bit=6)
    finish_and_compare(plan_of, old)
