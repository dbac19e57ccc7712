"""Guard a rank's whole run: write its heartbeat, and its last message if it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ..parallel_state import PeerFailed, rank_at_fault
from ..system.refusals import UNEXPECTED
from .blame import blame_together
from .flight_recorder import what_it_waited_for, write_record
from .heartbeat import Heartbeat

#: Marks of gloo (its files), NCCL, c10d and TORCH_DISTRIBUTED_DEBUG=DETAIL; words such as "Timed out" are
#: those of others too.
_OF_A_COLLECTIVE = ("/gloo/", "NCCL", "[c10d]", "monitoredBarrier", "mismatch between collectives")
_LESS_MEMORY = "Try a smaller data.micro_batch, more tensor or pipeline ranks, or layout.zero=3"


class OutOfMemory(RuntimeError):
    """Report that this rank needed more memory than there is."""

    exit_code = 3


@contextmanager
def watched(folder: Path, rank: int, world: int, *, run: str | None) -> Iterator[Heartbeat]:
    """Write ``folder/rank<r>.json`` while the block runs: the rank lives; a failure leaves code and message.

    ``run`` names this start; with ``None`` nothing is written before ``publish``, because the folder may be
    another run's. A failed collective becomes ``PeerFailed`` (exit code 3) and names the rank that failed or
    fell silent.
    """
    with Heartbeat(folder, rank, world) as beat:
        if run is not None:
            beat.publish(run)
        with report_error_before_cleanup(beat):
            yield beat


@contextmanager
def report_error_before_cleanup(beat: Heartbeat) -> Iterator[None]:
    """Write an error that leaves the block to the status at once, before anything around the block cleans up.

    Only the first one counts.
    """
    try:
        yield
    except Exception as error:
        cause = rank_at_fault(error, here=beat.rank) == beat.rank
        if cause and not hasattr(error, "exit_code") and is_out_of_memory(error):
            error = OutOfMemory(f"{beat.place}: out of memory: {str(error).splitlines()[0]}. {_LESS_MEMORY}")
        code = getattr(error, "exit_code", None)
        if isinstance(code, int):
            beat.end(code, str(error), cause=cause)
            raise error
        if not is_collective_failure(error):
            beat.end(UNEXPECTED, f"{type(error).__name__}: {error}", cause=cause)
            raise
        if beat.run is not None:
            write_record(beat.folder, beat.rank)
        why = (
            blame_together(beat) or what_it_waited_for(beat.folder, beat.world) or str(error).splitlines()[0]
        )
        text = f"{beat.place}: a collective failed: {why}"
        beat.end(PeerFailed.exit_code, text, cause=False)
        raise PeerFailed(text) from error


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether this rank had no memory left; on a CPU torch raises a plain ``RuntimeError``."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def is_collective_failure(error: Exception) -> bool:
    """Tell whether the error says that a peer or the network failed, not this rank; torch has no single
    type for it.
    """
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OF_A_COLLECTIVE)
    )
