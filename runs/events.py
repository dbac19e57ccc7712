"""Log events of a run besides its steps in ``events.jsonl``, and tell how its last start ended.

The log has one JSON line for each event, never rewritten. Recipes in it tell in which keys a run's recipe has
changed since the run last started. How a start ended stands in the status of its ranks: torchrun turns every
exit code of a rank into 1.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ..parallel_state import BadInput, PeerFailed
from ..storage.disk import DiskFailed, writing
from ..storage.file_names import FolderKind, kinds_of
from ..storage.small_files import log_line, read_good_lines
from ..system import counted
from .heartbeat import RankStatus, all_status, first_failure, status_folder
from .requests import PREEMPTED, Preempted

#: What a line about an event must have besides.
_FACTS: dict[str, dict[str, type]] = {
    "started": {"world": int, "layout": str},
    "resumed": {"world": int, "layout": str, "checkpoint": str, "written_by": str},
    "saved": {"checkpoint": str},
    "finished": {"goal": int},
}
NAME_A_RUN = "Name the folder that the key out of its recipe names; `trilith train RECIPE` starts a run there"
#: The end of the year 9999, after which no date can be written.
_LAST_SECOND = 253402300799


class Events:
    """Written by rank 0 alone; a file of ``None`` notes nothing.

    Each line has ``time`` (seconds since 1970), ``event`` and ``step``, how many steps were done. Events:
    ``started``, ``resumed`` (with the checkpoint and the layout that wrote it; both with layout, world size
    and the whole recipe, with ``reached``, how many steps the attempts before had done, and with ``fitted``,
    a line, if the layout was chosen for the ranks that were left),
    ``saved``, ``stopped`` (asked to), ``failed``, ``finished``. A run that was killed says nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def note(self, event: str, step: int, **facts: Any) -> None:
        """Append one line; ``facts`` are what JSON can say."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = log_line({"time": time.time(), "event": event, "step": step, **facts})
        torn = self.path.exists() and _last_byte(self.path) not in (b"", b"\n")
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")

    def note_end(self, error: BaseException | None, step: int, *, goal: int) -> None:
        """Note how a run ended that had ``goal`` steps to do. Raises nothing if it ended by an error."""
        if error is None:
            self.note("finished", step, goal=goal)
            return
        with suppress(OSError, DiskFailed):  # a full disk must not hide what went wrong
            why = " ".join(f"{error}".split()) or type(error).__name__
            self.note("stopped" if isinstance(error, Preempted) else "failed", step, why=why)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read a run's events in order, none without a file; what no run can have written is passed over."""
    return [line for line in read_good_lines(path) if _is_whole(line)]


def _is_whole(line: Mapping[str, Any]) -> bool:
    event, step, at = line.get("event"), line.get("step"), line.get("time")
    if not isinstance(event, str) or type(step) is not int or step < 0:
        return False
    facts = all(type(line.get(key)) is kind for key, kind in _FACTS.get(event, {}).items())
    facts = facts and isinstance(line.get("recipe", {}), dict) and type(line.get("reached", 0)) is int
    dated = isinstance(at, int | float) and type(at) is not bool and 0 <= at <= _LAST_SECOND
    return facts and dated


def flat_recipe(recipe: Any) -> dict[str, str]:
    """Return each key of a recipe, sections and key joined by dots, with its value as JSON."""
    return {key: json.dumps(leaf, ensure_ascii=False) for key, leaf in _flat(recipe, "").items()}


def _flat(node: Any, prefix: str) -> dict[str, Any]:
    if isinstance(node, dict) and node:
        parts = (_flat(child, f"{prefix}{name}.") for name, child in node.items())
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {prefix.rstrip("."): node}


def plain_recipe(recipe: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """Return each key of a recipe with its value; a list, which not every tracker takes, as JSON."""
    return {
        key: json.dumps(value) if isinstance(value, list | dict) else value
        for key, value in _flat(dict(recipe), "").items()
    }


def last_recipe(events: Path) -> dict[str, Any]:
    """Return the recipe of the run's last event that has one, as plain data; empty if none has."""
    return next((event["recipe"] for event in reversed(read_events(events)) if "recipe" in event), {})


def recipe_changes(before: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """Return a text such as ``compute: "float32", now "bfloat16"`` for each key that has changed."""
    if not before:
        return []
    then, now = flat_recipe(dict(before)), flat_recipe(dict(recipe))
    return [
        f"{key}: {then.get(key, 'null')}, now {now.get(key, 'null')}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key, "null") != now.get(key, "null")
    ]


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
    statuses = all_status(folder)
    if since is not None:
        begun = _changed(since)
        statuses = [status for status in statuses if status.time >= begun]
    if not statuses:
        if since is None and not folder.is_dir():
            raise BadInput(run, expected="a run's folder", found=what_is_there(run), todo=NAME_A_RUN)
        if folder.is_dir():
            os.listdir(folder)  # which raises for one that may not be read
        when = "" if since is None else f" since {since} was written"
        raise BadInput(
            run, "status", expected="a run's folder", found=f"no rank that started{when}",
            todo="What the command wrote to standard error says why",
        )  # fmt: skip
    start = max(statuses, key=lambda status: status.time).run
    ranks = sorted((status for status in statuses if status.run == start), key=lambda status: status.rank)
    last = _judged(ranks, first_failure(folder, run=start))
    return replace(last, text=last.text + _more_of(run, last.code))


def what_is_there(folder: Path) -> str:
    """Return what there is in the place of a run's folder, in words."""
    if not folder.is_dir():
        return "a file" if folder.exists() else "nothing there"
    kind = next(iter(kinds_of(folder)), None)
    return "a folder without a run" if kind in (None, FolderKind.RUN) else kind.value


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


def _more_of(run: Path, code: int | None) -> str:
    """Return how many steps the recipe has, where ``stop_after`` ended the run before them; how the run ended
    before a start that was refused and did nothing; otherwise an empty text.

    A start that has begun to train has noted its own failure as the run's last event.
    """
    ends = {"finished": "finished", "stopped": "stopped and saved"}
    event: dict[str, Any] = next(reversed(read_events(run / "events.jsonl")), {})
    if (end := ends.get(event.get("event", ""))) is None:
        return ""
    if code == BadInput.exit_code:
        return f"; before that start the run {end} after step {event['step']}"
    early = code == 0 and end == "finished" and event["step"] < event["goal"]
    return f" of {event['goal']:,}, as asked" if early else ""


def _changed(path: Path) -> float:
    with suppress(OSError):
        status = path.stat()
        if S_ISREG(status.st_mode):
            return status.st_mtime
    raise BadInput("status", "--since", expected="a file that exists", found=str(path))
