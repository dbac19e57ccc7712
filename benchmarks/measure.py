"""Share what all benchmarks need: contenders in turn, ratios of rounds, the machine, a table of results."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trilith.machine.facts import host
from trilith.machine.measure.timing import seconds_of as seconds_of


@dataclass
class Row:
    """Hold one line of the table: a figure, its spread over the rounds, and its goal."""

    name: str
    figure: float
    low: float
    high: float
    unit: str = "x"
    goal: str = ""
    good: bool | None = None
    details: dict[str, float] = field(default_factory=dict)


def in_turn(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds. A round runs each of them once; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            taken = run()
            if number:
                seconds[name].append(taken)
    return seconds


def ratio(name: str, ours: list[float], theirs: list[float], *, goal: float | None = None) -> Row:
    """Return how many times as fast as theirs ours is: the median over the rounds of their seconds / ours.

    The seconds beside it are those of the round that has the median, so that they have this ratio.
    """
    rounds = sorted((b / a, a, b) for a, b in zip(ours, theirs, strict=True))
    median, own_seconds, their_seconds = rounds[(len(rounds) - 1) // 2]
    row = Row(name, median, rounds[0][0], rounds[-1][0])
    if goal is not None:
        row.goal, row.good = f">= {goal}", median >= goal
    row.details = {"ours, s": own_seconds, "theirs, s": their_seconds}
    return row


def at_most(
    name: str, values: Sequence[float] | float, most: float | None = None, unit: str = "s", said: str = ""
) -> Row:
    """Return the row of a figure, or of each round's, that should be at most ``most``; ``said`` is why."""
    every = [values] if isinstance(values, float | int) else values
    median = statistics.median(every)
    goal = "" if most is None else f"<= {most:.4g}{said and f' ({said})'}"
    return Row(name, median, min(every), max(every), unit, goal, None if most is None else median <= most)


def afresh(path: Path, work: Callable[[], object]) -> float:
    """Delete what is at the path, and return the seconds of the work, which makes it anew.

    What others wrote is on the disk before it begins: cp leaves gigabytes that the system writes later.
    """
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()
    return seconds_of(work)


def copy(src: Path, dst: Path) -> float:
    """Return the seconds of ``cp`` to a place that may exist."""
    return afresh(dst, lambda: subprocess.run(["cp", "-r", "--reflink=never", src, dst], check=True))


def anonymous(pid: int) -> int:
    """Return RssAnon of a process in bytes: memory of its own, without the pages of files."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class Peak:
    """Measure, every 10 ms, the largest RssAnon of a process and its children during the ``with`` block."""

    def __init__(self, pid: int) -> None:
        self.bytes, self._pid, self._done = 0, pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.bytes = max(self.bytes, anonymous(self._pid))


def commit() -> str:
    """Return the commit of the checkout, or what the environment says where there is no git."""
    if noted := os.environ.get("TRILITH_COMMIT"):
        return noted
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, object]:
    """Return the date, the commit of the tree that is measured, the machine, its load, and the versions."""
    facts: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), **host()}
    return facts | {"load at the start": round(os.getloadavg()[0], 2)}


def check_load(limit: float = 0.5) -> None:
    """Refuse to measure while the machine does other work."""
    if os.getloadavg()[0] > limit:
        raise SystemExit(
            f"the load is {os.getloadavg()[0]:.2f}, above {limit}: wait until it is idle, or pass --busy"
        )


def write_results(out: Path, title: str, rows: list[Row], facts: Mapping[str, object]) -> None:
    """Write ``out``.json and ``out``.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(
        json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    )
    lines = [f"# {title}", ""]
    lines += [f"{key}: {value}  " for key, value in facts.items()]
    lines += ["", "| what | figure | spread | goal | |", "|---|---|---|---|---|"]
    for row in rows:
        mark = "" if row.good is None else ("reached" if row.good else "**not reached**")
        details = "".join(f"; {key} {value:.3g}" for key, value in row.details.items())
        places = 2 if row.unit else 3
        spread = f"{row.low:.{places}f} to {row.high:.{places}f}{details}"
        lines.append(f"| {row.name} | {row.figure:.{places}f} {row.unit} | {spread} | {row.goal} | {mark} |")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
