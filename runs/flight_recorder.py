"""Keep torch's record of collectives where a run failed, and say from it which rank waited for which."""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..parallel_state import BadInput
from ..parallel_state.engine.measuring import dump_on_timeout, group_ranks, recorded_collectives
from ..storage.safe_open import read_small
from ..storage.small_files import read_json
from ..storage.torch_archive import read_records

#: Files in the folder ``status`` of a run: written by a rank that fails in a collective, and by NCCL.
_OURS, _NCCL = "collectives-rank", "nccl-rank"
_NAME = re.compile(rf"(?:{_OURS}|{_NCCL})([0-9]+)(?:\.json)?")
_MOST_BYTES = 64 << 20
#: Calls of each group that a rank writes, and ranks that read each other's records when they fail.
_NEWEST, _MOST_RANKS = 50, 64
#: Seconds in which torch's thread notes that a collective has ended whose caller already goes on.
_NOTED = 0.2


@dataclass(frozen=True, slots=True)
class Call:
    """Hold one collective as one rank called it.

    ``number`` counts the collectives of the group, from 1; ``ended``: whether this rank has its result.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    name: str
    shapes: str
    ended: bool


def keeping_nccl_record(folder: Path) -> AbstractContextManager[None]:
    """Let NCCL write its record into the folder if it times out; ranks join inside the block."""
    return dump_on_timeout(str(folder / _NCCL))


def write_record(folder: Path, rank: int) -> None:
    """Write what torch has recorded on this rank; a full disk must not hide what went wrong."""
    time.sleep(_NOTED)
    with suppress(OSError, RuntimeError, ValueError):
        records = {name: _newest(json.loads(text)) for name, text in recorded_collectives().items()}
        path = folder / f"{_OURS}{rank}.json"
        path.write_text(json.dumps({"groups": group_ranks(), "records": records}), encoding="utf-8")


def _newest(record: dict[str, Any]) -> dict[str, Any]:
    """Leave out all but the last calls in each group."""
    entries, counts = [], Counter[str]()
    for entry in reversed(record.get("entries", [])):
        counts[str(entry["process_group"])] += 1
        if counts[str(entry["process_group"])] <= _NEWEST:
            entries.append(entry)
    return {"entries": entries[::-1]}


def what_it_waited_for(folder: Path, world: int) -> str:
    """Return which rank waited for which, once all ranks have left a record; until then an empty text.

    Every rank calls this, so it reads nothing where there are many ranks.
    """
    if world > _MOST_RANKS:
        return ""
    records = read_records_of(folder)
    return "; ".join(who_waits(records)) if len(records) == world else ""


def read_records_of(folder: Path) -> dict[int, list[Call]]:
    """Read the records of a run's last start, by rank; a file that a kill cut short is passed over."""
    calls: dict[int, list[Call]] = {}
    for path in sorted(folder.glob("*-rank*")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        with suppress(BadInput, KeyError, TypeError, ValueError, AttributeError):
            calls.setdefault(int(name[1]), []).extend(_calls(path))
    return calls


def _calls(path: Path) -> list[Call]:
    if path.suffix == ".json":
        read = read_json(path, _MOST_BYTES)
        return [call for record in read["records"].values() for call in _calls_in(record, read["groups"])]
    raw = read_small(path, _MOST_BYTES)  # a pickle of plain data, which is read without running it
    record: Any = read_records(raw, path, {}, opcodes=5_000_000, waiting=200_000)
    return _calls_in(record, {key: json.loads(group["ranks"]) for key, group in record["pg_config"].items()})


def _calls_in(record: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> list[Call]:
    entries = [entry for entry in record.get("entries", ()) if not entry["is_p2p"]]
    # gloo calls a collective that failed retired too: then the last one is what the rank waited in.
    pending = [entry for entry in entries if not (entry["retired"] or entry["state"] == "completed")]
    waited = {entry["record_id"] for entry in pending or entries[-1:]}
    calls = []
    for entry in entries:
        name, description = map(str, entry["process_group"])
        pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
        calls.append(
            Call(
                group=description if description not in ("", "undefined") else name,
                ranks=tuple(groups[name]) if name in groups else (),
                number=int(entry["collective_seq_id"]),
                name=str(entry["profiling_name"]).partition(":")[2],
                shapes=", ".join(f"{dtype} {list(size)}" for dtype, size in pairs),
                ended=entry["record_id"] not in waited,
            )
        )
    return calls


def who_waits(records: Mapping[int, Sequence[Call]]) -> list[str]:
    """Return a sentence for each collective in which a rank waited: for whom, or who calls another one."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}  # of each group that has not ended on some rank
    for calls in records.values():
        for call in calls:
            if not call.ended:
                place = call.group, call.ranks
                first[place] = min(call.number, first.get(place, call.number))
    return [_wait_sentence(records, *place, number) for place, number in sorted(first.items())]


def _wait_sentence(
    records: Mapping[int, Sequence[Call]], group: str, ranks: tuple[int, ...], number: int
) -> str:
    # Of a rank with two records, its own and NCCL's, one may have been written before the other: it waited.
    last_calls = {
        rank: call
        for rank, calls in records.items()
        for call in sorted(calls, key=lambda call: not call.ended)
        if (call.group, call.ranks, call.number) == (group, ranks, number)
    }
    # torch names the groups of a device mesh by long hashes.
    where = f"collective {number} of ranks {list(ranks)}" + (f", group {group}" if len(group) < 20 else "")
    if len({call.name for call in last_calls.values()}) > 1:
        calls = [f"rank {rank} calls {call.name} {call.shapes}" for rank, call in sorted(last_calls.items())]
        return f"{where} differs: {'; '.join(calls)}"
    waiting = [rank for rank, call in sorted(last_calls.items()) if not call.ended]
    who = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} wait"
    absent = [_absent(records, rank, group, ranks) for rank in ranks if rank not in last_calls]
    whom = f" for {' and '.join(absent)}" if absent else ": all ranks have called it, so the network failed"
    call = last_calls[waiting[0]]
    return f"{who} in {call.name} {call.shapes} ({where}){whom}"


def _absent(records: Mapping[int, Sequence[Call]], rank: int, group: str, ranks: tuple[int, ...]) -> str:
    """Say what a rank that did not come did last in the group."""
    if rank not in records:
        return f"rank {rank}, which left no record"
    last = [call for call in records[rank] if (call.group, call.ranks) == (group, ranks)][-1:]
    last_call = f"{last[0].number}, {last[0].name}" if last else "none"
    return f"rank {rank}, whose last call there was {last_call}"
