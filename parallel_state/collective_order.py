"""Compare, for debugging, the collectives that ranks are about to call, and stop where they differ.

A collective that ranks of a group issue in different orders, or with different shapes, gives wrong numbers
or waits for ever, and nothing says where. Here each call is described (operator, reduction, dtype, shape, and
the lines of code that led to it) and compared through torch's key-value store before it runs. Sends between
two ranks, whose order differs between the stages of a pipeline by design, are left out.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..system.errors import PeerFailed
from . import engine
from .engine.autograd_and_compiler import TorchDispatchMode
from .engine.collectives import default_store, group_of_call
from .process_groups import TIMEOUT
from .state import ParallelState

_HERE, _TORCH = str(Path(__file__).parents[1]) + os.sep, os.path.dirname(torch.__file__) + os.sep
_OWN = (__file__, _HERE + os.path.join("parallel_state", "engine") + os.sep)
#: Not compared: what two ranks alone do, and waiting.
_LEFT_OUT = ("send", "recv", "wait", "monitored")
#: Here ranks give different sizes, or none at all.
_UNEVEN = ("gather_", "scatter_", "all_to_all", "alltoall", "broadcast")
#: After a failure, how long the others' last calls are waited for.
_AFTERWARDS = timedelta(seconds=5)


@dataclass
class _Log:
    """Hold what this rank has issued in one group."""

    ranks: list[int]
    count: int = 0
    #: Since ranks last compared: what is said of each call, and a digest of all lines that led to it.
    calls: list[tuple[str, str]] = field(default_factory=list)


class CollectiveOrder(TorchDispatchMode):
    """Compare collectives between ranks at every ``interval``-th call in a group, while entered.

    Raises ``PeerFailed`` on every rank of the group before the call runs, with both calls and the lines of
    code that made them. If a rank does not come within ``timeout``, the error names what it did last. With
    ``interval`` above 1 a call that differs may have run already; if it raises, or waits until its own
    timeout, the calls since the last comparison are compared. Those of other threads are not seen.
    """

    def __init__(self, state: ParallelState, *, interval: int = 1, timeout: timedelta = TIMEOUT) -> None:
        super().__init__()
        self._rank, self._interval, self._timeout = state.rank, interval, timeout
        self._store = default_store()
        # All ranks make as many of these: what an earlier one left in the store is not read.
        number = self._store.add(f"trilith/order/{state.rank}", 1)
        self._prefix = f"trilith/order/{number}"
        self._logs: dict[str, _Log] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if "c10d" in space and not name.startswith(_LEFT_OUT):
            self._note(name.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, PeerFailed):
            for group, log in self._logs.items():
                if log.calls:
                    self._compare(log, f"{group}/left", _AFTERWARDS, failing=True)

    def _note(self, name: str, args: Any) -> None:
        group = group_of_call(args)
        log = self._logs.get(group.group_name)
        if log is None:
            log = self._logs[group.group_name] = _Log(torch.distributed.get_process_group_ranks(group))
        if len(log.ranks) == 1:
            return
        log.calls.append(_described(name, args))
        log.count += 1
        message = f"collective {log.count} of ranks {log.ranks}: {log.calls[-1][0]}"
        self._store.set(f"{self._prefix}/last/{self._rank}", message)
        if log.count % self._interval == 0:
            meeting = log.count // self._interval
            self._compare(log, f"{group.group_name}/{meeting}", self._timeout)
            log.calls.clear()
            if self._rank == log.ranks[0] and meeting > 1:  # which all have left, or they would not be here
                with suppress(RuntimeError):  # a store that cannot delete only grows
                    for rank in log.ranks:
                        self._store.delete_key(self._key(f"{group.group_name}/{meeting - 1}", rank))

    def _compare(self, log: _Log, meeting: str, timeout: timedelta, *, failing: bool = False) -> None:
        """Raise ``PeerFailed`` if another rank's calls since the last meeting differ from this rank's."""
        self._store.set(self._key(meeting, self._rank), json.dumps(log.calls))
        others = [rank for rank in log.ranks if rank != self._rank]
        try:
            self._store.wait([self._key(meeting, rank) for rank in others], timeout)
        except Exception as error:
            if failing:
                return
            raise PeerFailed(self._missing(log, meeting, others, timeout)) from error
        for rank in others:
            their_calls = [tuple(call) for call in json.loads(self._store.get(self._key(meeting, rank)))]
            if their_calls != log.calls:
                raise PeerFailed(self._difference(log, rank, their_calls))

    def _difference(self, log: _Log, rank: int, their_calls: list[tuple[str, ...]]) -> str:
        """Describe the first call that two ranks make differently; the lower rank's comes first."""
        pairs = zip_longest(log.calls, their_calls, fillvalue=("nothing more", ""))
        first = log.count - len(log.calls) + 1
        number, pair = next((number, pair) for number, pair in enumerate(pairs, first) if pair[0] != pair[1])
        rank_calls = sorted([(self._rank, pair[0][0]), (rank, pair[1][0])])
        both = "; ".join(f"rank {caller} calls {call}" for caller, call in rank_calls)
        return f"collective {number} of ranks {log.ranks} differs: {both}"

    def _missing(self, log: _Log, meeting: str, others: list[int], timeout: timedelta) -> str:
        absent = [rank for rank in others if not self._store.check([self._key(meeting, rank)])]
        lines = [
            f"rank {self._rank} waits at collective {log.count} of ranks {log.ranks}: {log.calls[-1][0]}"
        ]
        for rank in absent:
            key = f"{self._prefix}/last/{rank}"
            last = self._store.get(key).decode() if self._store.check([key]) else "no collective at all"
            lines.append(f"rank {rank}'s last was {last}")
        return f"after {timeout.total_seconds():g} s " + "; ".join(lines)

    def _key(self, meeting: str, rank: int) -> str:
        return f"{self._prefix}/{meeting}/{rank}"


def _described(name: str, args: Any) -> tuple[str, str]:
    """Return a text of a call for people, and a digest of every line of code that led to it."""
    frames, reduction = _frames(sys._getframe(3))
    kind = name.strip("_").removesuffix("_")
    words = [kind, *(arg for arg in args if isinstance(arg, str) and arg in ("sum", "max", "min", "avg"))]
    words += [reduction] if reduction else []
    argument = args[1] if kind.endswith("base") else args[0]
    for nest in argument if isinstance(argument, list) else [argument]:
        for tensor in engine.tensors_in(nest)[:1]:
            shape = "" if kind.startswith(_UNEVEN) else f" {list(tensor.shape)}"
            words.append(f"{str(tensor.dtype).removeprefix('torch.')}{shape}")
    digest = hashlib.blake2b("\n".join(frames).encode(), digest_size=8).hexdigest()
    callers = [next(lines) for _, lines in groupby(frames, lambda line: line.partition(":")[0])]
    return f"{' '.join(words)} at {' < '.join(callers[:5]) or 'torch alone'}", digest


def _frames(frame: FrameType | None) -> tuple[list[str], str]:
    """Return the lines of code outside torch and this package, innermost first, and the reduction's name."""
    lines, reduction = [], ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            if not reduction and "op" in frame.f_locals and file.endswith("distributed_c10d.py"):
                reduction = str(frame.f_locals["op"]).rpartition(".")[2].lower()
        elif not file.startswith((*_OWN, "<")):
            short = (
                file.removeprefix(_HERE) if file.startswith(_HERE) else os.sep.join(file.split(os.sep)[-2:])
            )
            lines.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines, reduction
