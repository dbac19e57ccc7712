"""A mirror has whole copies of the newest checkpoints or none, wherever the copying stops."""

import re
import shutil
from contextlib import suppress
from itertools import count
from unittest import mock

import fsspec
import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.damage import flip_bit
from support.folders import contents
from support.inputs import saver_of
from support.refusals import Refused, refusals
from support.short_runs import run_recipe, tiny_recipe
from torch import nn
from trilith.checkpoints import Manifest, Progress, complete_checkpoints, save, verify
from trilith.checkpoints.mirror import AfterCommit, Mirror
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadCheckpoint, BadInput, Layout
from trilith.recipes import parse_recipe
from trilith.storage import remote_folder
from trilith.storage.file_names import MANIFEST
from trilith.storage.output_places import clear_unfinished
from trilith.storage.remote_folder import RemoteFailed, RemoteFolder
from trilith.training.run_plan import plan


def written(root, step, width=8):
    """Write a checkpoint whose numbers are those of its step."""
    model = nn.Linear(width, width)
    with torch.no_grad():
        model.weight.copy_(torch.arange(float(width * width)).view(width, width) + step)
    return save(root, model, step=step, keep=9)


def fetched(place, to):
    system, root = fsspec.core.url_to_fs(place)
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for path in system.find(root):
        target = to / path.removeprefix(root).strip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(system.cat_file(path))
    return to


def test_what_a_start_passed_over_is_not_copied_and_counts_once_it_is_written_anew(tmp_path):
    for step in (1, 2):
        written(tmp_path, step)
    after = AfterCommit(tmp_path, 1, print)
    after.mirror = mock.Mock()
    after.resume(1)
    after.wait()
    assert [call.args[0].name for call in after.mirror.copy.call_args_list] == ["step-00000001"]
    after.begin(tmp_path / "step-00000002")
    after.wait()
    after.close(wait=True)
    assert accepted(tmp_path) == [2]


def accepted(folder, read=lambda path: verify(path, Manifest.load(path))):
    """Return the steps of the folders that are read."""
    steps = []
    for path in sorted(folder.glob("step-*")):
        with suppress(BadCheckpoint, FileNotFoundError):
            read(path)
            steps.append(int(path.name.removeprefix("step-")))
    return steps


def test_committed_checkpoints_are_copied_and_the_newest_kept_in_both(place, tmp_path):
    lines = []
    with saver_of(tmp_path / "run", nn.Linear(3, 2), keep=2, mirror=place, say=lines.append) as saver:
        for step in (1, 2, 3, 4):
            saver.save(Progress(step, Layout()))
            saver._after.wait()
        Mirror(RemoteFolder(place), keep=1).copy(tmp_path / "run" / "step-00000003")  # not the newest here
    copies = fetched(place, tmp_path / "fetched")
    assert accepted(copies) == accepted(tmp_path / "run") == [3, 4]
    assert sorted(path.name for path in copies.iterdir()) == ["step-00000003", "step-00000004"]
    assert all(contents(copies / path.name) == contents(path) for path in (tmp_path / "run").iterdir())
    assert [line for line in lines if line.startswith("MIRRORED")] == [
        f"MIRRORED {place}/step-{step:08d}" for step in (1, 2, 3, 4)
    ]


def test_a_crash_at_any_operation_leaves_whole_copies_and_loses_none(place, tmp_path, stopped_at):
    """Step 2 comes after step 1, and one is kept; half of a file, or of a manifest, may have arrived."""
    first, second = written(tmp_path / "run", 1), written(tmp_path / "run", 2)
    for at in count(1):
        url = f"{place}-{at}"
        mirror = Mirror(RemoteFolder(url), keep=1)
        mirror.copy(first)
        with mock.patch.object(remote_folder, "_PIECE", 100), stopped_at(at) as operations:
            mirror.copy(second)
        if len(operations) < at:
            break
        there = accepted(fetched(url, tmp_path / "fetched"))
        assert there in ([1], [1, 2], [2]), (at, operations)
        stated = accepted(
            tmp_path / "fetched", lambda path: Manifest.parse((path / MANIFEST).read_bytes(), path)
        )
        assert stated == there, (at, operations)
        for step, original in ((1, first), (2, second)):
            copy = tmp_path / "fetched" / original.name
            assert step not in there or contents(copy) == contents(original), (at, operations)
        mirror.copy(second)  # the next commit, or the next start
        assert sorted(path.name for path in fetched(url, tmp_path / "fetched").iterdir()) == [second.name]
        assert contents(tmp_path / "fetched" / second.name) == contents(second)
    assert at > 10 and {*operations} == {"_put", "remove"}


def test_a_start_copies_what_a_kill_left_uncopied_and_nothing_twice(place, tmp_path):
    lines = []
    with saver_of(tmp_path / "run", nn.Linear(3, 2)) as saver:
        saver.save(Progress(1, Layout()))
    for _ in range(2):
        with saver_of(tmp_path / "run", nn.Linear(3, 2), mirror=place, say=lines.append):
            pass
    assert lines == [f"MIRRORED {place}/step-00000001"]
    assert accepted(fetched(place, tmp_path / "fetched")) == [1]


def test_a_damaged_checkpoint_is_not_copied(place, tmp_path):
    mirror = Mirror(RemoteFolder(place), keep=1)
    older, path = (written(tmp_path / "run", step) for step in (1, 2))
    (file,) = path.glob("*.safetensors")
    flip_bit(file, -1)
    with pytest.raises(BadCheckpoint, match=f"CRC-32.*newest complete checkpoint before it is {older}"):
        mirror.copy(path)
    assert not (fetched(place, tmp_path / "fetched") / path.name / MANIFEST).exists()


def test_a_mirror_that_fails_ends_no_run_and_the_next_commit_reaches_it(place, tmp_path):
    lines = []
    with saver_of(tmp_path / "run", nn.Linear(3, 2), mirror=place, say=lines.append) as saver:
        with mock.patch.object(RemoteFolder, "_put", side_effect=ConnectionError("no route\nto host")):
            saver.save(Progress(1, Layout()))
            saver._after.wait()
        saver.save(Progress(2, Layout()))
    assert any(line.startswith("step 1 is not in the mirror: ") and "no route" in line for line in lines)
    assert not any("\n" in line for line in lines)
    assert accepted(fetched(place, tmp_path / "fetched")) == [2]


def test_nobody_waits_for_a_copy_and_what_is_copied_stays_until_it_is(place, tmp_path, blocked):
    root, copies = tmp_path / "run", blocked(RemoteFolder, "copy")
    with copies as (begun, go), saver_of(root, nn.Linear(3, 2), keep=1, mirror=place) as saver:
        for step in (1, 2, 3):
            saver.save(Progress(step, Layout()))
            assert begun.wait(60)
        saver._after._retention.wait()
        assert accepted(root) == [1, 3]  # step 2 was never begun, for step 3 came
        go.set()
    assert accepted(root) == accepted(fetched(place, tmp_path / "fetched")) == [3]


def begin(where, root="run", width=3):
    def call(folder):
        mirror = where if "://" in where else folder / where
        saver_of(folder / root, nn.Linear(width, width), mirror=str(mirror))

    return call


def another_run(folder):
    Mirror(RemoteFolder(str(folder / "mirror")), keep=1).copy(written(folder / "other", 5))


def another_model(folder):
    another_run(folder)
    written(folder / "run", 1, width=3)


def another_model_before(folder):
    """Leave a copy of another model below one of this model, as somebody who copies by hand may."""
    another_model(folder)
    Mirror(RemoteFolder(str(folder / "mirror")), keep=9).copy(written(folder / "run", 6, width=3))


def plan_recipe(mirror):
    def call(folder):
        saving = {"mirror": mirror.replace("OUT", str(folder / "run"))}
        plan(parse_recipe(tiny_recipe(folder / "run", folder / "tokens", checkpoint=saving)))

    return call


test_a_place_that_cannot_be_a_mirror_is_refused_before_the_first_step = refusals(
    Refused("unknown store", begin("nosuch://bucket"), "file system is installed"),
    Refused("inside", begin("run/sub"), "outside the input", given=lambda folder: (folder / "run").mkdir()),
    Refused("inside what is not there yet", begin("run/sub"), "outside the run's folder, found one in it"),
    Refused("the folder itself", begin("run"), "outside the run's folder, found one in it"),
    Refused("around", begin("run", "run/steps"), "outside the run's folder, found one around it"),
    Refused("another run", begin("mirror"), "no checkpoints, found step-00000005", given=another_run),
    Refused("another model", begin("mirror", width=8), "of another model than", given=another_model),
    Refused("an older copy of another model", begin("mirror"), "mirror/step-00000005: .* of another model",
            given=another_model_before),
    Refused("unknown store in a recipe", plan_recipe("nosuch://bucket"), "nosuch"),
    Refused("the folder itself in a recipe", plan_recipe("OUT"), "outside the run's folder"),
    Refused("no mirror to restore from",
            lambda folder: parse_recipe(tiny_recipe(folder, folder, checkpoint={"restore": True})),
            r"checkpoint\.restore: expected checkpoint\.mirror"),
)  # fmt: skip


def test_a_place_that_refuses_to_be_written_is_told_before_the_first_step(tmp_path):
    refusing = mock.patch.object(RemoteFolder, "_put", side_effect=PermissionError("not yours"))
    with refusing, pytest.raises(RemoteFailed, match="PermissionError: not yours"):
        saver_of(tmp_path / "run", nn.Linear(3, 2), mirror="memory://locked")


FILE = "rank-00000-of-00001.safetensors"
#: What has happened to a file of the newest copy, as to one that a kill cut short, and what is said of it.
LOST = {
    "no-manifest": (MANIFEST, lambda raw: None, f": expected {MANIFEST}, found none: the copy has not ended"),
    "no-file": (FILE, lambda raw: None, f"/{FILE}: expected .* found no such file"),
    "short": (FILE, lambda raw: raw[:5], f"/{FILE}: expected .* found 5 bytes"),
    "bit": (FILE, lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), f"/{FILE}: CRC-32: expected .*"),
}


@pytest.mark.parametrize(("name", "damage", "says"), LOST.values(), ids=LOST)
def test_a_damaged_copy_is_passed_over_and_made_anew(place, tmp_path, name, damage, says):
    mirror = Mirror(RemoteFolder(place), keep=9)
    for step in (1, 2):
        mirror.copy(written(tmp_path / "run", step))
    original = tmp_path / "run" / "step-00000002"
    mirror.folder.remove(f"{original.name}/{name}")
    if (left := damage((original / name).read_bytes())) is not None:
        mirror.folder.write(f"{original.name}/{name}", left)
    path, (line,) = mirror.restore(tmp_path / "new")
    assert path == tmp_path / "new" / "step-00000001"
    assert contents(path) == contents(tmp_path / "run" / path.name)
    assert [*(tmp_path / "new").iterdir()] == [path]
    assert re.fullmatch(f"passed over: {place}/{original.name}{says}; using step-00000001", line)
    if "CRC" not in says:  # which is known only when the file is read
        assert mirror.copy(original) == f"{place}/{original.name}"
        assert contents(fetched(place, tmp_path / "fetched") / original.name) == contents(original)
    assert Mirror(RemoteFolder(f"{place}-empty"), keep=1).restore(tmp_path / "none") == (None, [])


def test_what_a_killed_copy_of_an_older_step_left_is_deleted(place, tmp_path, stopped_at):
    mirror = Mirror(RemoteFolder(place), keep=9)
    with mock.patch.object(remote_folder, "_PIECE", 100), stopped_at(4):
        mirror.copy(written(tmp_path / "run", 1))
    assert [*mirror.folder.sizes()] == ["step-00000001"] and accepted(fetched(place, tmp_path / "f")) == []
    mirror.copy(written(tmp_path / "run", 2))
    assert [*mirror.folder.sizes()] == ["step-00000002"]


def test_a_restore_that_is_killed_anywhere_leaves_a_whole_checkpoint_or_none(place, tmp_path, killed_at):
    """The next start completes the work, and leaves nothing else."""
    original = written(tmp_path / "run", 2)
    mirror = Mirror(RemoteFolder(place), keep=1)
    mirror.copy(original)
    outcomes = set()
    for at in count(1):
        root = tmp_path / f"new-{at}"
        with killed_at(at) as operations:
            mirror.restore(root)
        if len(operations) < at:
            break
        complete = complete_checkpoints(root) if root.is_dir() else []  # as a start looks for them
        assert bool(complete) == (root / original.name).exists(), (at, operations)
        outcomes.add(bool(complete))
        if not complete:
            mirror.restore(root)
        assert contents(root / original.name) == contents(original)
        clear_unfinished(root)  # as each start does
        assert [path.name for path in root.iterdir()] == [original.name], (at, operations)
    assert at > 10 and outcomes == {False, True}
    assert {*operations} == {"create", "write", "sync", "rename", "make_directory", "sync_directory"}


@pytest.mark.usefixtures("group_of_one")
def test_a_run_whose_folder_is_lost_goes_on_from_its_mirror(tmp_path):
    checkpoint = {"mirror": str(tmp_path / "mirror"), "every": 1, "keep": 9}
    tokens, model = write_tokens(tmp_path / "tokens"), {"config": TINIEST_LLAMA}
    raw = tiny_recipe(tmp_path / "run", tokens, steps=4, model=model, checkpoint=checkpoint)
    run_recipe(raw | {"stop_after": 2})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(BadInput, match=r"no checkpoints, found step-00000002.*checkpoint\.restore=true"):
        run_recipe(raw)
    restoring = raw | {"checkpoint": checkpoint | {"restore": True}}
    assert [one.step for one in run_recipe(restoring)] == [2, 3]
    run_recipe({**raw, "out": str(tmp_path / "whole"), "checkpoint": {"every": 1, "keep": 9}})
    for step in (3, 4):
        name = f"checkpoints/step-{step:08d}"
        assert contents(tmp_path / "run" / name) == contents(tmp_path / "whole" / name)
    assert run_recipe(restoring) == []  # its own checkpoints come first
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    assert [one.step for one in run_recipe(restoring)] == [3]
