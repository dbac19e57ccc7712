"""An output is absent or whole, whatever happens: refusals, crashes at every system call, two jobs."""

from __future__ import annotations

import errno
import os
import signal
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from trilith.checkpoints import Manifest, newest_checkpoint, verify
from trilith.checkpoints.rank_files import checkpoint_files
from trilith.checkpoints.stored_tensor import Part, StoredTensor
from trilith.parallel_state import BadInput, Box, Layout
from trilith.storage import TensorWriter, staging
from trilith.storage.disk import Disk, DiskFailed
from trilith.storage.output_places import check_output, clear_unfinished, make_folder, remove_checkpoint
from trilith.storage.staging import Staging, staged


def save(output, value):
    """Write a checkpoint of two files, as a training run would."""
    with staged(output) as staging:
        files, tensors = [], {}
        for i in range(2):
            writer = TensorWriter(staging.directory / f"{i}.safetensors", {f"w{i}": ("F32", (64,))})
            try:
                writer.write(f"w{i}", Box((0,), (32,)), torch.full((32,), value))
                writer.write(f"w{i}", Box((32,), (64,)), torch.full((32,), value))
                files.append(writer.close())
            finally:
                writer.abandon()
            parts = (Part(file=i, start=(0,), stop=(64,)),)
            tensors[f"w{i}"] = StoredTensor(dtype="F32", shape=(64,), parts=parts)
        manifest = Manifest(
            kind="training", model_type="m", config={}, layout=Layout(tensor=2),
            files=tuple(files), tensors=tensors,
        )  # fmt: skip
        staging.publish(manifest.accepted_bytes(staging.output))


def read(directory):
    """Return the one value of a whole checkpoint."""
    manifest = Manifest.load(directory)
    verify(directory, manifest)
    files = checkpoint_files(directory, manifest)
    (value,) = {file.read(name).unique().item() for file in files for name in file.tensors}
    return float(value)


def test_a_published_checkpoint_reads_back_and_nothing_else_is_left(tmp_path):
    save(tmp_path / "new" / ".." / "new" / "run" / "step-00000001", 1.0)  # over a folder that is made
    assert read(tmp_path / "new" / "run" / "step-00000001") == 1.0
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["step-00000001"]
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", 2.0)  # an empty directory is taken over
    assert read(tmp_path / "empty") == 2.0


def test_G19_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for flags, found in ((0, "a read-only one"), (os.ST_RDONLY, "one on a read-only file system")):
        monkeypatch.setattr(os, "statvfs", lambda path, f=flags: SimpleNamespace(f_flag=f))
        with pytest.raises(BadInput, match=f"may write to, found {found}"):
            check_output(tmp_path / "out")


def test_G20_the_margin_is_a_tenth(tmp_path, monkeypatch):
    space = namedtuple("space", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: space(1100, 10**6))
    check_output(tmp_path / "out", need=10**9)
    with pytest.raises(BadInput, match=r"expected 1\.1 GB free \(1\.0 GB and a tenth\), found 1\.1 GB"):
        check_output(tmp_path / "out", need=10**9 + 10**6)
    monkeypatch.setattr(os, "statvfs", lambda path: space(0, 4096))
    with pytest.raises(BadInput, match=r"expected 11 bytes free \(10 bytes and a tenth\), found 0 bytes"):
        check_output(tmp_path / "out", need=10)


@pytest.mark.parametrize("name", ["with space", "ünïcødé", "x" * 250, "é" * 127, "-dash"])
def test_G24_names_of_every_kind(tmp_path, name):
    save(tmp_path / name, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# ---- failures on the way ----


@contextmanager
def failing(method, code, after=0):
    """Let a call of the disk fail, after so many that do not."""
    calls, real = count(), getattr(Disk, method)

    def call(disk, *arguments):
        if next(calls) == after:
            raise OSError(code, os.strerror(code))
        return real(disk, *arguments)

    with mock.patch.object(Disk, method, call):
        yield


@pytest.mark.parametrize("method", ["create", "write", "sync", "sync_directory", "make_directory", "rename"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["G21-disk-full", "G21-error"])
@pytest.mark.parametrize("name", ["step-00000002", "new/newer/step-00000002"])
def test_a_failure_leaves_the_older_one_and_the_folders_around(tmp_path, method, after, code, name):
    save(tmp_path / "step-00000001", 1.0)
    before = {*tmp_path.rglob("*")}
    try:
        with failing(method, code, after):
            save(tmp_path / name, 2.0)
    except DiskFailed as error:
        assert error.exit_code == 3 and str(tmp_path) in str(error) and "\n" not in str(error)
    if (tmp_path / name).exists():  # it needed fewer of these, or only the last sync failed
        assert read(tmp_path / name) == 2.0
    else:
        assert {*tmp_path.rglob("*")} - before <= {tmp_path / "new", tmp_path / "new/newer"}
    assert read(tmp_path / "step-00000001") == 1.0


def test_G23_no_permission_to_rename(tmp_path):
    with pytest.raises(BadInput, match="permission to rename"), failing("rename", errno.EACCES, after=1):
        save(tmp_path / "out", 1.0)
    assert list(tmp_path.iterdir()) == []


def test_G16_files_that_appear_meanwhile_are_not_touched(tmp_path):
    with pytest.raises(BadInput, match="appeared"), staged(tmp_path / "out") as staging:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        staging.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_G25_an_output_that_another_job_finished_before_the_lock_was_had_is_refused(tmp_path, monkeypatch):
    def late(output):
        output.mkdir(exist_ok=True)
        (output / "theirs").touch()
        return take(output)

    take = staging.lock_output
    monkeypatch.setattr(staging, "lock_output", late)
    with pytest.raises(BadInput, match="found one with files in it"):
        Staging.begin(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out", "theirs"]


def test_G25_a_second_job_is_refused_and_harms_nothing(tmp_path):
    with staged(tmp_path / "out", identity="0" * 16) as first:
        for identity in ("0" * 16, "1" * 16, None):
            with pytest.raises(BadInput, match="another process"):
                Staging.begin(tmp_path / "out", identity=identity)
        assert first.directory.is_dir()
        with staged(tmp_path / "other") as other:  # of another output: no matter
            other.publish()
        first.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_G25_a_killed_job_blocks_nobody_and_is_cleared(tmp_path):
    child = os.fork()
    if child == 0:
        staging = Staging.begin(tmp_path / "out", identity="0123456789abcdef")
        (staging.directory / "half.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["out.tmp-0123456789abcdef", "out.tmp-lock"]
    bystander = tmp_path / "out.tmp-mine"
    bystander.mkdir()
    save(tmp_path / "out", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.tmp-mine"]


def test_what_killed_runs_left_is_cleared_but_not_what_is_being_written(tmp_path):
    for name in ("step-2.tmp-0123456789abcdef", "step-4", "step-4.tmp-mine", "other.tmp-0123456789abcdef"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "step-8.tmp-lock").touch()  # killed before it made anything else, or after all was done
    (tmp_path / "notes.lock").write_text("no lock of ours")
    writing = Staging.begin(tmp_path / "step-6")
    clear_unfinished(tmp_path)
    stay = {"step-4", "step-4.tmp-mine", "step-6.tmp-lock", "notes.lock", writing.directory.name}
    assert {path.name for path in tmp_path.iterdir()} == stay
    writing.abandon()
    clear_unfinished(tmp_path / "nowhere")


def test_a_users_own_files_called_like_a_lock_stay(tmp_path):
    precious = [tmp_path / name for name in ("out.lock", "out.tmp-lock")]
    (tmp_path / "new.lock").touch()
    for path in precious:
        path.write_text("precious")
    save(tmp_path / "out", 1.0)
    save(tmp_path / "new", 1.0)
    with pytest.raises(BadInput):
        save(tmp_path / "out", 1.0)
    clear_unfinished(tmp_path)
    assert [path.read_text() for path in precious] == ["precious"] * 2
    assert (tmp_path / "new.lock").exists()


def test_K8_a_deletion_that_is_cut_short_leaves_no_checkpoint(tmp_path):
    save(tmp_path / "step-00000001", 1.0)
    save(tmp_path / "step-00000002", 2.0)
    with mock.patch.object(Disk, "remove_tree", lambda disk, path: (path / "0.safetensors").unlink()):
        remove_checkpoint(tmp_path / "step-00000002")
    assert newest_checkpoint(tmp_path).directory.name == "step-00000001"
    assert len([*tmp_path.iterdir()]) == 2
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    remove_checkpoint(tmp_path / "step-00000001")
    assert not (tmp_path / "step-00000001").exists()


# ---- every crash ----


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Directory:
    names: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)


CALLS = ("create", "write", "sync", "sync_directory", "make_directory", "rename")


@contextmanager
def recorded():
    """Yield the calls of the disk, as they come."""
    log, paths = [], {}

    def recording(name):
        real = getattr(Disk, name)

        def call(disk, first, *rest):
            done = real(disk, first, *rest)
            if name == "create":
                paths[done] = first
            if name == "write":
                rest = bytes(rest[0]), rest[1]
            log.append((name, paths.get(first, first), *rest))
            return done

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(Disk, name, recording(name))
        yield log


class Model:
    """Model what a file system may hold after a crash: every write, or only those that were synced."""

    def __init__(self, root):
        self.root, self.top = root, Directory()

    def at(self, path):
        node = self.top
        for name in path.relative_to(self.root).parts:
            node = node.names[name]
        return node

    def apply(self, call):
        kind, path = call[0], call[1]
        home = self.top if path == self.root else self.at(path.parent)
        match kind:
            case "create":
                home.names[path.name] = File()
            case "make_directory":
                home.names[path.name] = Directory()
            case "write":
                file, data, offset = home.names[path.name], call[2], call[3]
                file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
                file.data[offset : offset + len(data)] = data
            case "sync":
                home.names[path.name].durable = bytes(home.names[path.name].data)
            case "sync_directory":
                node = self.at(path)
                node.durable = dict(node.names)
            case "rename":
                self.at(call[2].parent).names[call[2].name] = home.names.pop(path.name)

    def lay_out(self, target, *, all_names, all_data):
        def put(node, place):
            place.mkdir(exist_ok=True)
            for name, child in (node.names if all_names else node.durable).items():
                if isinstance(child, Directory):
                    put(child, place / name)
                else:
                    (place / name).write_bytes(child.data if all_data else child.durable)

        put(self.top, target)


def crash_states(root, log, scratch):
    """Yield every state that a crash after each call may leave, laid out in a directory of its own."""
    for length in range(len(log) + 1):
        for names in (True, False):
            for data in (True, False):
                model = Model(root)
                for call in log[:length]:
                    model.apply(call)
                target = scratch / f"{length}-{names}-{data}"
                model.lay_out(target, all_names=names, all_data=data)
                yield length, target


def check_crashes(root, log, scratch, old_calls):
    """Check the values that the states read as: old or new, and only new once it is published."""
    seen = set()
    for length, target in crash_states(root, log, scratch):
        new = target / "step-00000002"
        if new.exists():
            assert read(new) == 2.0, f"after call {length}"
        if length >= old_calls:
            value = read(newest_checkpoint(target).directory)
            assert value == 2.0 or (value == 1.0 and length < len(log)), f"after call {length}: {value}"
            seen.add(value)
    return seen


def two_saves(root, scratch):
    """Return the calls of the disk by which two checkpoints were saved, and how many were of the first."""
    root.mkdir()
    scratch.mkdir()
    with recorded() as log:
        save(root / "step-00000001", 1.0)
        old_calls = len(log)
        save(root / "step-00000002", 2.0)
    return log, old_calls


def test_every_crash_reads_as_old_or_new(tmp_path):
    root, scratch = tmp_path / "run", tmp_path / "crashes"
    log, old_calls = two_saves(root, scratch)

    assert check_crashes(root, log, scratch, old_calls) == {1.0, 2.0}


@pytest.mark.parametrize("forgotten", ["sync", "sync_directory"])
def test_a_forgotten_sync_is_found(tmp_path, forgotten):
    root, scratch = tmp_path / "run", tmp_path / "crashes"
    log, old_calls = two_saves(root, scratch)
    log = log[:old_calls] + [call for call in log[old_calls:] if call[0] != forgotten]
    with pytest.raises((AssertionError, BadInput)):
        check_crashes(root, log, scratch, old_calls)


def test_folders_many_levels_deep_are_made(tmp_path):
    deep = tmp_path.joinpath(*["a"] * 1500)
    make_folder(deep)
    assert deep.is_dir()
    for path in (deep, *deep.parents[:1499]):  # pytest gives up on so many
        path.rmdir()
