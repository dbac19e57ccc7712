"""Around a rank's whole run: its heartbeat, and its last word when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ..parallel_state import ParallelState, PeerFailed
from .status import Heartbeat, blame


@contextmanager
def watched(folder: Path, state: ParallelState) -> Iterator[Heartbeat]:
    """While it lasts, ``folder/rank<r>.json`` says that this rank lives; a failure leaves its code and
    message there.

    A collective that failed becomes ``PeerFailed`` (exit code 3), naming the rank that failed or fell silent.
    """
    with Heartbeat(folder, state.rank) as beat:
        try:
            yield beat
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if isinstance(code, int):
                beat.end(code, str(error))
                raise
            if not is_collective_failure(error):
                beat.end(1, f"{type(error).__name__}: {error}")
                raise
            who = blame(folder, state.layout.world, but=state.rank)
            text = f"{beat.place}: a collective failed: {who or str(error).splitlines()[0]}"
            beat.end(PeerFailed.exit_code, text)
            raise PeerFailed(text) from error


def is_collective_failure(error: Exception) -> bool:
    """Whether it says that a peer or the wire failed, not this rank: torch has no one type for that."""
    text = str(error)
    signs = ("gloo", "Gloo", "NCCL", "Connection", "Socket", "Timed out", "Broken pipe", "recvValue")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    )
