"""Know how long each test function takes: what ``--quick`` leaves out, which files lanes take first."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Seconds that a test function takes, all its parameters together, from which ``--quick`` leaves it out.
LONG = 0.5
#: The functions that took so long when ``make seconds`` was last run, and the sum of all others.
SECONDS = Path(__file__).parent.parent / "seconds.txt"
#: Seconds of a session from which it ends with where they went.
_WORTH_A_SUMMARY = 60.0


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def known() -> dict[str, float]:
    """Return the seconds of the functions that ``seconds.txt`` names."""
    lines = (line.split() for line in SECONDS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines if name != "others"}


def seconds_of_files() -> Mapping[str, float]:
    """Return the seconds that a file's long functions take together; 0 for a file that has none."""
    return _by_file(known())


def _by_file(functions: Mapping[str, float]) -> defaultdict[str, float]:
    files: defaultdict[str, float] = defaultdict(float)
    for function, seconds in functions.items():
        files[file_of(function)] += seconds
    return files


def table(took: Mapping[str, float]) -> str:
    """Return the text of ``seconds.txt``: functions that took long, longest first, and the sum of others."""
    long = [
        (name, seconds)
        for name, seconds in sorted(took.items(), key=lambda item: -item[1])
        if seconds >= LONG
    ]
    others = sum(seconds for seconds in took.values() if seconds < LONG)
    return "".join(f"{seconds:.1f} {name}\n" for name, seconds in [*long, ("others", others)])


def summary(took: Mapping[str, float], seconds: float) -> Iterator[str]:
    """Yield where the time of a long session went: the files that took longest, and processor time."""
    if seconds < _WORTH_A_SUMMARY:
        return
    files = _by_file(took)
    longest = sorted(files, key=lambda file: -files[file])[:12]
    yield f"{sum(files.values()):.0f} s in {len(files)} files of tests; the longest:"
    yield from (f"{files[file]:7.1f} s  {file}" for file in longest)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(use.ru_utime + use.ru_stime for use in used)
    yield f"{processor:.0f} s of processor time in {seconds:.0f} s"
