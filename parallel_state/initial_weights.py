"""Initial weights as a function of (seed, parameter name) alone: the same bits in every layout.

A whole matrix is a quilt of tiles, each drawn from a generator of its own; a rank draws the tiles that its
box touches and keeps its part of them, so no rank makes more than one tile beyond what it holds.
"""

import hashlib
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .pieces import Box

_TILE = (256, 4096)


@dataclass(frozen=True, slots=True)
class Normal:
    """Fill a parameter from a normal distribution around zero."""

    std: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Fill a parameter evenly between ``-bound`` and ``bound``."""

    bound: float


@dataclass(frozen=True, slots=True)
class LogUniform:
    """Fill a parameter with the logarithms of numbers drawn evenly between ``low`` and ``high``."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Constant:
    """Fill a parameter with one number."""

    value: float


@dataclass(frozen=True, slots=True)
class Own:
    """Fill a parameter by ``reset_parameters`` of its module, as ``torch.nn``'s layers do."""


#: What fills a parameter.
Initial = Normal | Uniform | LogUniform | Constant | Own

ZERO = Constant(0.0)
#: Leaves a parameter to its module's ``reset_parameters``.
OWN = Own()


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed from anything with a stable text, the same on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def fill(local: Tensor, box: Box, shape: tuple[int, ...], initial: Initial, seed: int) -> None:
    """Fill ``local``, which holds ``box`` of a whole tensor of ``shape``, in place.

    Numbers are drawn in fp32 on the CPU and cast: the same, but for rounding, on any device and dtype.
    """
    assert tuple(local.shape) == box.shape, (local.shape, box)
    assert not isinstance(initial, Own), "its module knows how, and is not here"
    if isinstance(initial, Constant):
        local.fill_(initial.value)
        return
    if not shape:
        shape, box, local = (1,), Box((0,), (1,)), local.unsqueeze(0)
    sizes = [1] * (len(shape) - 2) + list(_TILE[-len(shape) :])
    ranges = [range(a // n, -(-b // n)) for a, b, n in zip(box.start, box.stop, sizes, strict=True)]
    for index in product(*ranges):
        tile = Box(
            tuple(i * n for i, n in zip(index, sizes, strict=True)),
            tuple(min((i + 1) * n, d) for i, n, d in zip(index, sizes, shape, strict=True)),
        )
        part = tile.intersect(box)
        if part is not None:
            values = _draw(tile.shape, initial, seed_of(seed, *index))
            local[part.within(box).slices] = values[part.within(tile).slices].to(local.device, local.dtype)


def _draw(shape: tuple[int, ...], initial: Normal | Uniform | LogUniform, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if isinstance(initial, Normal):
        return values.normal_(0.0, initial.std, generator=generator)
    if isinstance(initial, LogUniform):
        return values.uniform_(initial.low, initial.high, generator=generator).log_()
    return values.uniform_(-initial.bound, initial.bound, generator=generator)
