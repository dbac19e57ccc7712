"""A conversion that is killed: the output is absent or whole, and the same call goes on where it was."""

import os
import shutil
from contextlib import suppress
from threading import Event
from unittest import mock

import pytest
from support.configs import TINY_LLAMA
from support.damage import flip_bit
from support.folders import bytes_read, contents
from support.kills import Work, kill_at, killed_work
from support.short_runs import tiny_recipe, train
from trilith.checkpoints import ConversionOptions, convert, read_source
from trilith.checkpoints.convert import carry_out
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadCheckpoint, BadInput
from trilith.storage import TensorWriter, output_places
from trilith.storage.small_files import FinishedWork
from trilith.storage.staging import staged

FORMS = {
    "to-sharded": ("hf", {"tensor": 2, "pipeline": 3}),
    "to-hf": ("sharded", {"to": "hf"}),
    "reshard": ("trained", {"to": "sharded", "tensor": 4}),
}
POINTS = [
    *("convert.before_data", "convert.noted", "convert.noted;time=9", "convert.after_data"),
    *("commit.before_rename", "commit.after_rename"),
]
QUICK = ["convert.noted;time=9", "commit.before_rename"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One of each form: a Hugging Face folder, its sharded twin, a run's checkpoint with moments."""
    folder = tmp_path_factory.mktemp("sources")
    write_hf_folder(folder / "hf", TINY_LLAMA)
    convert(folder / "hf", folder / "sharded", tensor=2, pipeline=2)
    tokens, layout = write_tokens(folder / "tokens"), {"data": 2, "zero": 1}
    train(tiny_recipe(folder / "trained", tokens, steps=1, layout=layout))
    return folder


def convert_noting(src, dst, arguments, every=4000):
    convert(src, dst, **arguments, options=ConversionOptions(note_every=every))


test_a_killed_conversion_is_absent_or_whole_and_goes_on_K15 = killed_work(
    Work(form, source, convert_noting, arguments, POINTS, quick=QUICK if form == "to-sharded" else [])
    for form, (source, arguments) in FORMS.items()
)


def killed(src, dst, arguments, point, every=4000):
    kill_at(point, convert_noting, str(src), str(dst), arguments, every)


@pytest.fixture
def written(monkeypatch):
    """Record the number of elements of each box that is written from here on."""
    sizes = []
    write = TensorWriter.write

    def counted(self, name, box, *rest):
        sizes.append(box.size)
        write(self, name, box, *rest)

    monkeypatch.setattr(TensorWriter, "write", counted)
    return sizes


@pytest.mark.parametrize("form", FORMS)
def test_what_was_noted_is_not_written_again(tmp_path, sources, form, written):
    name, arguments = FORMS[form]
    convert(sources / name, tmp_path / "whole", **arguments)
    all_of_it = sum(written)
    written.clear()
    every, seen = 40_000 if form == "reshard" else 4000, []
    killed(sources / name, tmp_path / "out", arguments, "convert.noted;time=5", every)
    options = ConversionOptions(progress=seen.append)
    plan = convert(sources / name, tmp_path / "out", **arguments, options=options)
    killed_before = [f"{tmp_path / 'out'}: a command that wrote it was killed; its work was used"]
    assert plan.source.warnings == killed_before
    assert 0 < sum(written) < 0.8 * all_of_it
    assert sum(seen) == plan.nbytes
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_damage_under_work_that_was_noted_is_seen(tmp_path, sources):
    """A resumed conversion does not use these numbers again, but still reads them for the checksums."""
    shutil.copytree(sources / "sharded", tmp_path / "src")
    file = next((tmp_path / "src").glob("*tensor-01*"))
    before = file.stat()
    killed(tmp_path / "src", tmp_path / "out", {"to": "hf"}, "convert.after_data", every=1)
    flip_bit(file, -50, bit=2)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BadCheckpoint, match="CRC-32"):
        convert(tmp_path / "src", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_a_journal_cut_by_the_kill_is_read_as_far_as_it_is_whole(tmp_path):
    synced = []
    journal = FinishedWork(tmp_path / "j", lambda: synced.append(True), sync_interval=10)
    journal.note(3, 5, lambda: [1])
    assert not (tmp_path / "j").exists()
    journal.note(4, 5, lambda: [2, 3])
    journal.note(7, 10, lambda: [])
    journal.wait()
    assert len(synced) == 2
    with (tmp_path / "j").open("ab") as file:
        file.write(b"[[9, [1")
    again = FinishedWork(tmp_path / "j", lambda: None, sync_interval=1)
    assert again.done == {3: [1], 4: [2, 3], 7: []}
    again.note(8, 1, lambda: [9])
    again.close()
    assert FinishedWork(tmp_path / "j", lambda: None).done == {**again.done, 8: [9]}


def test_work_goes_on_while_what_was_written_is_flushed_and_a_failure_ends_it(tmp_path):
    goes_on = Event()

    def sync():
        assert goes_on.wait(20)
        raise OSError("no such disk")

    journal = FinishedWork(tmp_path / "j", sync, sync_interval=1)
    journal.note(1, 1, lambda: [1])  # returns
    goes_on.set()
    with pytest.raises(OSError, match="no such disk"):
        journal.note(2, 1, lambda: [2])
    journal.close()
    assert FinishedWork(tmp_path / "j", lambda: None).done == {}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_an_output_is_read_for_the_journal(tmp_path, sources, form):
    name, arguments = FORMS[form]
    with bytes_read(tmp_path) as read:
        convert_noting(sources / name, tmp_path / "out", arguments)
    assert not read


@pytest.mark.parametrize("free", [None, 1000, 1 << 40])
def test_an_output_larger_than_half_the_free_memory_leaves_the_page_cache(
    tmp_path, sources, monkeypatch, free
):
    """Else it pushes out the source, which is then read from the disk once more."""
    advice = mock.Mock()
    monkeypatch.setattr(os, "posix_fadvise", advice)
    monkeypatch.setattr(carry_out, "memory_available", lambda: free)
    convert_noting(sources / "hf", tmp_path / "out", {"tensor": 2})
    assert (os.POSIX_FADV_DONTNEED in {call.args[-1] for call in advice.call_args_list}) == (free == 1000)


def test_a_file_that_is_gone_is_written_again_whatever_the_journal_says(tmp_path, sources):
    convert(sources / "hf", tmp_path / "whole", tensor=2)
    killed(sources / "hf", tmp_path / "out", {"tensor": 2}, "convert.after_data", every=1)
    (left,) = tmp_path.glob("out.tmp-" + "?" * 16)
    next(left.glob("*tensor-01*")).unlink()
    convert(sources / "hf", tmp_path / "out", tensor=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_a_killed_run_wrote_counts_as_room_for_the_next(tmp_path, sources, monkeypatch):
    """The disk has room for the output once and a fifth of it."""
    killed(sources / "hf", tmp_path / "out", {"tensor": 2}, "convert.after_data")
    (left,) = tmp_path.glob("out.tmp-" + "?" * 16)
    used = sum(path.stat().st_blocks * 512 for path in left.iterdir())
    small = mock.Mock(f_bavail=used // 5, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(BadInput, match="kB free"):
        convert(sources / "hf", tmp_path / "elsewhere", tensor=2)
    convert(sources / "hf", tmp_path / "out", tensor=2)


def test_an_output_that_is_being_written_is_named_as_that(tmp_path):
    for wait in (True, False):
        with suppress(KeyboardInterrupt), staged(tmp_path / "out", identity="0" * 16):
            with pytest.raises(BadInput, match=r"a command is writing now, into out\.tmp-0{16}\. Wait until"):
                read_source(tmp_path / "out")
            if wait:
                raise KeyboardInterrupt
    with pytest.raises(BadInput, match="found no such folder"):
        read_source(tmp_path / "out")
    (tmp_path / f"out.tmp-{'0' * 16}").mkdir()  # without a lock beside it
    with pytest.raises(BadInput, match="found what a killed command left"):
        read_source(tmp_path / "out")
    with (
        mock.patch.object(output_places, "leftovers", side_effect=PermissionError),  # root may look anywhere
        pytest.raises(BadInput, match="found no such folder"),
    ):
        read_source(tmp_path / "out")
