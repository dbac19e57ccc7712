"""The journal of a killed tokenization: the last mark that the files bear out, and that of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest
from trilith.data.token_journal import Journal, Mark


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file marked at 3, 7 and 9 bytes, and two more that no mark knows."""
    journal = Journal(tmp_path / "journal", "this job", every=0.0)
    assert journal.begin() is None
    with (tmp_path / "tokens").open("wb") as tokens:
        for portions, content in enumerate((b"abc", b"defg", b"hi"), 1):
            tokens.write(content)
            journal.mark(Mark(portions, 5, 7, {"tokens": tokens.tell()}), {"tokens": tokens})
        tokens.write(b"jk")
    journal.close()
    return tmp_path


def begun(folder: Path, job: str = "this job") -> Mark | None:
    journal = Journal(folder / "journal", job, every=0.0)
    mark = journal.begin()
    journal.close()
    return mark


def test_the_last_mark_is_found_and_again_by_a_third(folder: Path) -> None:
    assert begun(folder) == begun(folder) == Mark(3, 5, 7, {"tokens": 9})


def test_a_line_cut_short_is_passed_over_and_written_behind(folder: Path) -> None:
    path = folder / "journal"
    path.write_bytes(path.read_bytes()[:-4])
    assert begun(folder) == Mark(2, 5, 7, {"tokens": 7})
    journal = Journal(path, "this job", every=0.0)
    journal.begin()
    with (folder / "tokens").open("r+b") as tokens:
        tokens.seek(8)
        journal.mark(Mark(4, 6, 7, {"tokens": 8}), {"tokens": tokens})
    journal.close()
    assert begun(folder) == Mark(4, 6, 7, {"tokens": 8})


def test_a_file_shorter_than_its_mark_takes_an_earlier_one(folder: Path) -> None:
    (folder / "tokens").write_bytes(b"abcde")
    assert begun(folder) == Mark(1, 5, 7, {"tokens": 3})
    (folder / "tokens").unlink()
    assert begun(folder) is None


def test_marks_are_no_closer_than_asked(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "this job", every=3600.0)
    journal.begin()
    assert not journal.due and not journal.marked
    journal.close()


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"portions": 9, "left_out": 0, "unended": 0, "sizes": {"tokens": "x"}}', "\x00"]
)
def test_nonsense_is_no_mark(folder: Path, line: str) -> None:
    with (folder / "journal").open("a") as journal:
        journal.write(line + "\n")
    assert begun(folder) == Mark(3, 5, 7, {"tokens": 9})


def test_another_job_begins_anew(folder: Path) -> None:
    assert begun(folder, "another") is None
    assert (folder / "journal").read_bytes().startswith(b'{"job": "another"} ')
    assert begun(folder) is None
