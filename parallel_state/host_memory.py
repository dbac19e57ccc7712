"""Refuse ranks that one machine cannot hold, before any of them is started."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from ..system import counted
from ..system.errors import BadInput
from ..system.machine import memory_available
from .declaration import Declaration
from .layout import Layout


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
    need = 0
    for declaration, at in product(declared, first_stage):
        shard = declaration.shard_box(layout, at).size
        need += itemsize * (shard if layout.zero == 3 else declaration.box(layout, at).size)
        need += itemsize * 3 * shard if trained and not declaration.buffer else 0  # a gradient, two moments
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
