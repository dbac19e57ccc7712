"""Count the bytes that operators read and write: alone, and where a compiler fuses chains of them."""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from .flops import multiplies

_GATHERING = frozenset(f"aten::{name}" for name in ("embedding", "gather", "index", "index_select"))
_SCATTERING = frozenset(
    f"aten::{name}"
    for name in (
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_copy_"),
        *("index_put", "index_put_", "_index_put_impl_"),
    )
)
#: Whose first argument is written and not read.
_OVERWRITING = frozenset(f"aten::{name}" for name in ("copy_", "fill_", "zero_", "bernoulli_"))
#: What no compiler fuses with operators around it, beside what multiplies matrices, and scatters.
_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("sort", "argsort", "topk", "bincount", "histc", "cumsum", "cumprod", "nonzero", "multinomial"),
        *("embedding_dense_backward", "searchsorted", "repeat_interleave"),
    )
)


def fuses(name: str, func: Any) -> bool:
    """Return whether a compiler fuses an operator with others: pointwise ones, reductions, gathers."""
    alone = name in _ALONE or name in _SCATTERING
    return name.startswith("aten::") and not alone and not multiplies(name, func)


def read_by(name: str, inputs: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    """Return tensors as large as what an operator reads, of those that it is given."""
    if name in _GATHERING:  # of the first one as much as it gives
        return [*inputs[1:], *made]
    return inputs[1:] if name in _OVERWRITING else inputs


def moved_by(name: str, inputs: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    if name in _SCATTERING:  # of the first tensor what the indices name
        return 3 * sum(map(_size, inputs[1:]))
    return sum(map(_size, (*read_by(name, inputs, made), *made)))


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor that lie in memory: those of an expanded one lie there once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    return tensor.itemsize * prod(size for size, stride in zip(tensor.shape, strides, strict=True) if stride)


class Parts:
    """Add up the bytes of tensors that lie in some storages; those at one place of a storage count once."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, dict[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, name: int, tensor: Tensor) -> None:
        """Add a tensor, in the storage of this name."""
        whole = tensor.untyped_storage().nbytes()
        parts = self._of.setdefault(name, (whole, {}))[1]
        place = int(tensor.storage_offset())
        parts[place] = max(_size(tensor), parts.get(place, 0))

    def holds(self, name: int, tensor: Tensor) -> bool:
        """Return whether a tensor was added at the same place."""
        return name in self._of and int(tensor.storage_offset()) in self._of[name][1]

    def total(self, counts: Callable[[int], bool] = lambda name: True) -> int:
        """Return the bytes in storages of names that count."""
        return sum(
            min(whole, sum(parts.values())) for name, (whole, parts) in self._of.items() if counts(name)
        )


class Chain:
    """Hold what a chain of pointwise operators is given from outside, and what it writes.

    ``first``: its first operator's place among those that start kernels; ``at``: among all.
    """

    def __init__(self) -> None:
        self.phase = "forward"
        self.first = self.at = 0
        self.given, self.made = Parts(), Parts()
