"""Define how a parameter is cut: loading, saving, gradient sums and norms follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm

import torch
from torch import nn

from ..system.errors import BadInput, nearest_divisors, require
from .initial_weights import OWN, ZERO, Initial
from .layout import Coordinates, Layout
from .pieces import Box

#: The data type of every declared buffer, whatever the model's dtype is.
BUFFER_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut dim ``dim`` into equal pieces along a mesh axis, each a whole number of units of ``unit`` rows."""

    dim: int
    axis: str = "tensor"
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declare how one parameter is cut over the ranks.

    ``shape``: the whole shape, the same in every layout; checkpoints and exports hold it. ``multiple`` (for a
    vocabulary): memory has rows of zeros after those of dim 0, up to a multiple of this number that the
    layout can cut (``held_shape``). ``partial``: the axes over which each rank's gradient is partial and must
    be summed (a norm's weight with sequence parallelism, a shared key/value head). ``ends``: both ends of a
    pipeline hold the parameter (a tied embedding).

    ``experts``: dim 0 counts experts, which are shared out in equal pieces along the ``expert`` axis, in
    addition to ``cut``. ``buffer``: numbers that belong to the model and that no gradient changes (a router's
    bias, in ``BUFFER_DTYPE``; of ``integer`` ones, such as a table of experts by tokens, in int64); they are
    whole on every rank at every ZeRO stage, and have no moments. ``initial`` fills the parameter.
    """

    shape: tuple[int, ...]
    cut: Cut | None = None
    multiple: int | None = None
    partial: tuple[str, ...] = ()
    ends: bool = False
    experts: bool = False
    buffer: bool = False
    integer: bool = False
    initial: Initial = ZERO

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype that a buffer has in any model, ``None`` for what has the model's."""
        return torch.int64 if self.integer else BUFFER_DTYPE if self.buffer else None

    def held_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the whole shape in the memory of this layout's ranks, padding included."""
        if self.multiple is None:
            return self.shape
        pieces = 1
        if self.cut is not None and self.cut.dim == 0:
            pieces = getattr(layout, self.cut.axis) * self.cut.unit
        return (padded_rows(self.shape[0], self.multiple, pieces), *self.shape[1:])

    def check(self, layout: Layout, name: str) -> None:
        """Refuse a layout that cannot cut this parameter into equal pieces of whole units."""
        if self.experts and self.shape[0] % layout.expert:
            expected = f"a number that expert={layout.expert} divides"
            todo = nearest_divisors("expert", gcd(self.shape[0], layout.expert_pool), layout.expert)
            raise BadInput(name, "experts", expected=expected, found=self.shape[0], todo=todo)
        if self.cut is None:
            return
        size, dim = getattr(layout, self.cut.axis), self.held_shape(layout)[self.cut.dim]
        if dim % (size * self.cut.unit):
            units = dim // self.cut.unit
            key = f"{units} units of {self.cut.unit} on dim {self.cut.dim}"
            todo = nearest_divisors(self.cut.axis, units, size)
            expected = f"a number that {self.cut.axis}={size} divides"
            raise BadInput(name, key, expected=expected, found=units, todo=todo)

    def check_shared(self, name: str) -> None:
        """Refuse a scalar, which FSDP cannot hold."""
        expected, todo = "a dim, where data or context ranks share weights", "Make it of shape (1,)"
        require(self.shape or self.buffer, name, "shape", expected, "()", todo)

    def box(self, layout: Layout, at: Coordinates) -> Box:
        """Return what the rank at these coordinates holds, with padding, before the data axes shard it."""
        shape = self.held_shape(layout)
        whole = Box.whole(shape)
        if self.experts:
            length = self.shape[0] // layout.expert
            first = layout.data_place(at, experts=True)[2] * length
            whole = whole.narrow(0, first, first + length)
        if self.cut is None:
            return whole
        size, index = getattr(layout, self.cut.axis), getattr(at, self.cut.axis)
        length = shape[self.cut.dim] // size
        return whole.narrow(self.cut.dim, index * length, (index + 1) * length)

    def shard_box(self, layout: Layout, at: Coordinates) -> Box:
        """Return what the rank holds between steps: its box, cut on ``shard_dim`` over the data axes.

        The cut is that of ``torch.chunk``: pieces of ``ceil(rows / ranks)`` rows, the last ones shorter or
        empty. At ``zero=0`` nothing is cut, and the context ranks hold the same.
        """
        if self.buffer or not self.shape:
            return self.box(layout, at)
        box, dim = self.box(layout, at), self.shard_dim(layout)
        ranks, index = layout.data_sizes(self.experts)[1], layout.data_place(at, self.experts)[1]
        rows = box.shape[dim]
        piece = -(-rows // ranks)
        return box.narrow(dim, min(index * piece, rows), min((index + 1) * piece, rows))

    def shard_dim(self, layout: Layout) -> int:
        """Return the dim that FSDP cuts: the first, or the second of stacked experts fewer than ranks."""
        if not self.experts:
            return 0
        ranks, rows = layout.data_sizes(experts=True)[1], self.shape[1]
        if self.cut is not None and self.cut.dim == 1:
            rows //= getattr(layout, self.cut.axis)
        rank_experts = self.shape[0] // layout.expert
        return int(rank_experts % ranks != 0 and rows % ranks == 0)

    def true_part(self, box: Box) -> Box:
        """Return the part of a box that is not padding; it is empty (zero rows) if all of it is padding."""
        if self.multiple is None:
            return box
        start, stop = (min(bound, self.shape[0]) for bound in (box.start[0], box.stop[0]))
        return Box((start, *box.start[1:]), (stop, *box.stop[1:]))

    def owner(self, layout: Layout, at: Coordinates, *, sharded: bool = True) -> bool:
        """Tell whether, of the ranks that hold the same box, this one is its owner: it counts and writes it.

        ``sharded=False``: before the data axes shard it.
        """
        cut_over = () if self.cut is None else (self.cut.axis,)
        copy, shard, _ = layout.data_place(at, self.experts)
        return (
            copy == 0
            and (shard == 0 or (sharded and not self.buffer))
            and ("tensor" in cut_over or at.tensor == 0)
            and not (self.ends and at.pipeline != 0)
        )


def padded_rows(rows: int, multiple: int, pieces: int = 1) -> int:
    """Return the fewest rows, at least ``rows``, that are a multiple of ``multiple`` and of ``pieces``.

    >>> padded_rows(503, 128), padded_rows(503, 128, 4), padded_rows(503, 128, 3)
    (512, 512, 768)
    """
    step = lcm(multiple, pieces)
    return -(-rows // step) * step


def declarations(model: nn.Module) -> dict[str, Declaration]:
    """Return the declaration of every parameter, by its name.

    An undeclared parameter is whole on all ranks and starts as its module's ``reset_parameters`` fills it. A
    parameter that two modules share is listed once, as by ``named_parameters``.
    """
    modules = dict(model.named_modules())
    by_name = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        of_module = modules[path].__dict__.get("declared", {})
        by_name[name] = of_module.get(leaf) or Declaration(tuple(parameter.shape), initial=OWN)
    return by_name


def buffer_names(declared: Mapping[str, Declaration]) -> frozenset[str]:
    """Return the names of those parameters that no gradient changes, in any run."""
    return frozenset(name for name, declaration in declared.items() if declaration.buffer)
