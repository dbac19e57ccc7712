"""Tell from a run's folder how its last start ended: torchrun turns every exit code of a rank into 1."""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ..parallel_state import BadInput, PeerFailed
from ..system import counted
from .events import read_events
from .heartbeat import RankStatus, all_status, first_failure, status_folder
from .requests import PREEMPTED


@dataclass(frozen=True)
class Outcome:
    """Say how a start of a run ended: its exit code (``None`` while it runs) and a line about it."""

    code: int | None
    text: str


def outcome(run: Path, *, since: Path | None = None) -> Outcome:
    """Read how the newest start of the run in this folder ended.

    Codes: 0 finished, 75 saved and stopped, 2 bad input, 3 failed or lost, 4 damaged checkpoint. ``since``: a
    file on the same disk; a start before its last change does not count. Raises ``BadInput`` if no rank has
    started: its recipe was refused, or there is no such run.
    """
    folder = status_folder(run)
    known = all_status(folder)
    if since is not None:
        begun = _changed(since)
        known = [status for status in known if status.time >= begun]
    if not known:
        when = "" if since is None else f" since {since} was written"
        raise BadInput(
            run, "status", expected="a run's folder", found=f"no rank that started{when}",
            todo="What the command wrote to standard error says why",
        )  # fmt: skip
    start = max(known, key=lambda status: status.time).run
    ranks = sorted((status for status in known if status.run == start), key=lambda status: status.rank)
    last = _judged(ranks, first_failure(folder, run=start))
    further = {0: _of_goal, BadInput.exit_code: _before}
    return replace(last, text=last.text + further[last.code](run)) if last.code in further else last


def _judged(ranks: list[RankStatus], failure: RankStatus | None) -> Outcome:
    now, last = time.time(), max(status.step for status in ranks)
    lost = [status for status in ranks if status.silent(now)]
    alive = [status for status in ranks if status.code is None and status not in lost]
    if alive:
        return Outcome(None, f"{len(alive)} of {counted(len(ranks), 'rank')} run; step {last}")
    if failure is not None and failure.code != PREEMPTED:
        return Outcome(failure.code, f"rank {failure.rank} failed with code {failure.code}: {failure.error}")
    if lost:
        first = lost[0]
        text = f"rank {first.rank} on {first.host} was lost in {first.phase} of step {first.step}"
        return Outcome(PeerFailed.exit_code, text)
    if failure is not None:
        return Outcome(PREEMPTED, f"stopped and saved after step {last}; the same command goes on")
    return Outcome(0, f"finished after step {last}")


def _of_goal(run: Path) -> str:
    """Return how many steps the recipe has, where ``stop_after`` ended the run before them."""
    event = _last_event(run)
    early = event.get("event") == "finished" and event["step"] < event["goal"]
    return f" of {event['goal']:,}, as asked" if early else ""


def _last_event(run: Path) -> dict[str, Any]:
    return next(reversed(read_events(run / "events.jsonl")), {})


def _before(run: Path) -> str:
    """Return how the run ended before a start that was refused and did nothing; empty if it had not begun.

    A start that has begun to train has noted its own failure as the run's last event.
    """
    ends = {"finished": "finished", "stopped": "stopped and saved"}
    event = _last_event(run)
    end = ends.get(event.get("event", ""))
    return "" if end is None else f"; before that start the run {end} after step {event['step']}"


def _changed(path: Path) -> float:
    with suppress(OSError):
        status = path.stat()
        if S_ISREG(status.st_mode):
            return status.st_mtime
    raise BadInput("status", "--since", expected="a file that exists", found=str(path))
