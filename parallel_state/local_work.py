"""Refuse more ranks or workers than one machine can run, before any of them is started."""

from ..system import most_at_once
from ..system.errors import BadInput


def check_local_ranks(ranks: int, *, devices: int | None = None) -> None:
    """Raise ``BadInput`` for more ranks than this machine should start.

    The limit is one rank for each device of ``devices`` if ranks compute on GPUs, otherwise
    ``most_at_once()`` processes.
    """
    most = most_at_once() if devices is None else devices
    if ranks > most:
        what = "processes" if devices is None else "CUDA devices, one for each rank"
        cpu = "" if devices is None else ', or say device = "cpu"'
        raise BadInput(
            "ranks of this machine",
            expected=f"at most {most:,} {what}",
            found=f"{ranks:,}",
            todo=f"Start them on several hosts with torchrun, or ask for a smaller layout{cpu}",
        )


def check_workers(workers: int, where: str) -> None:
    """Raise ``BadInput``, naming ``where``, for no worker or for more workers than this machine should
    start.
    """
    if not 1 <= workers <= most_at_once():
        expected = f"from 1 to {most_at_once():,} on this machine"
        raise BadInput(where, "workers", expected=expected, found=f"{workers:,}")
