"""Refuse more ranks or workers than one machine can run or hold, before any of them is started."""

from collections.abc import Mapping, Sequence
from math import prod

from ..system import counted, most_at_once
from ..system.errors import BadInput
from ..system.machine import memory_available
from .declaration import Declaration
from .layout import Coordinates, Layout


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
    """Raise ``BadInput``, naming ``where``, for no worker, or more than this machine should start."""
    if not 1 <= workers <= most_at_once():
        expected = f"from 1 to {most_at_once():,} on this machine"
        raise BadInput(where, "workers", expected=expected, found=f"{workers:,}")


def check_host_memory(
    stages: Sequence[Mapping[str, Declaration]], layout: Layout, *, itemsize: int, trained: bool
) -> None:
    """Refuse ranks that are all on this host, and compute on its CPU, if it cannot hold their weights and,
    where all are ``trained``, gradients and AdamW's moments. Linux would kill them later, without a word.

    It is the least that a step needs, for activations come on top. Free swap counts as memory. ``stages``:
    the declarations of each; ``itemsize``: bytes of a number.
    """
    available = memory_available(swap=True)
    declared = [declaration for stage in stages for declaration in stage.values()]
    whole = sum(prod(declaration.held_shape(layout)) for declaration in declared)
    if available is None or whole * layout.world * itemsize * (4 if trained else 1) <= available:
        return  # even if each rank had all of it
    first_stage = [at for at in map(layout.coordinates, range(layout.world)) if at.pipeline == 0]
    need = itemsize * sum(
        _numbers(declaration, layout, at, trained) for declaration in declared for at in first_stage
    )
    if need > available:
        raise BadInput(
            "this machine",
            "memory",
            expected=f"at least {need / 1e9:,.1f} GB for {counted(layout.world, 'rank')}: weights"
            + (", gradients and moments" if trained else ""),
            found=f"{available / 1e9:,.1f} GB free",
            todo="Train on GPUs (device) or a smaller model"
            + (", or share these over layout.data with layout.zero = 3" if layout.zero < 3 else ""),
        )


def _numbers(declaration: Declaration, layout: Layout, at: Coordinates, trained: bool) -> int:
    """Return how many numbers a rank holds of a parameter, its gradient and its moments."""
    box, shard = declaration.box(layout, at).size, declaration.shard_box(layout, at).size
    weights = shard if layout.zero == 3 else box
    return weights + 3 * shard if trained and not declaration.buffer else weights
