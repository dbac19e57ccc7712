"""What a rank sends in a training step: how many collectives of which kind, and the bytes given to them.

Of a block over ``t`` tensor ranks, for N tokens of a micro-batch, D wide (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4). Products that share their input, q, k and v or gate and
up, pay one together:

=============================  =================================  =================================
                               forward                            backward
=============================  =================================  =================================
tensor                         2 all-reduces of N D               2 all-reduces of N D
tensor, sequence               2 all-gathers of N D / t,          2 all-gathers of N D / t,
                               2 reduce-scatters of N D           2 reduce-scatters of N D
=============================  =================================  =================================

Over c context ranks, which hold N tokens each, a block's attention also fetches keys and values, K numbers
here: an all-gather of K forward, and backward another and a reduce-scatter of c K gradients; around a ring
c - 1 exchanges of K forward, 2 (c - 1) backward.

Shared experts pay as a feed-forward does, beside the others. The embedding pays what a block's exit does, the
output layer what an entrance does, tied or not; the loss two all-reduces of 4 N numbers together, at least
fp32; norms, rotation, attention, activation functions and dropout nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod

from ..layers import Stage, checkpointed
from ..parallel_state import Coordinates, Declaration
from .activations import block_shape
from .rank_parameters import group_of
from .step_shape import Work


@dataclass(frozen=True)
class Traffic:
    """``count`` collectives of a ``kind`` over ``ranks`` ranks; ``bytes``: what a rank gives to all of them.

    ``axis``: tensor, context, data (ranks that shards lie on), replicas (of shards), pipeline, ends, or all.
    """

    axis: str
    kind: str
    what: str
    count: int
    bytes: int
    ranks: int

    @property
    def wire(self) -> int:
        """Bytes that a rank puts on the wire where rings are used."""
        others, whole = self.ranks - 1, self.bytes
        rings = {"all_reduce": 2 * others * whole / self.ranks, "all_gather": others * whole}
        rings |= {"reduce_scatter": others * whole / self.ranks, "send": whole, "exchange": whole}
        return int(rings[self.kind])


def block_traffic(work: Work, *, forward: bool, branches: int = 2) -> list[Traffic]:
    """One block, one micro-batch, one direction: nothing over one tensor rank.

    ``branches``: attention and feed-forward, and one more where shared experts stand beside the others.
    """
    there, back = _entrance(work), _exit(work)
    pairs = ((there.forward, back.forward), (there.backward, back.backward))[not forward]
    what = "forward" if forward else "backward"
    return [traffic for sent in pairs for traffic in _tensor(work, what, sent, branches)]


def recomputed_traffic(work: Work, number: int, branches: int = 2) -> list[Traffic]:
    """What block ``number`` sends again in its backward, where it forgets (``checkpoint_blocks``).

    Selective keeps sums, and gathers again. Otherwise all is sent again but the last sum, unless a dropout
    that follows it needs that for its mask.
    """
    mode = work.checkpointing
    if not checkpointed(number, mode, work.checkpoint_every):
        return []
    sums = 0 if mode == "selective" else branches - 1 + bool(getattr(work.config, "resid_pdrop", 0.0))
    return [
        *_tensor(work, "computed again", _entrance(work).forward, branches),
        *_tensor(work, "computed again", _exit(work).forward, sums),
    ]


def step_traffic(
    work: Work,
    stated: Mapping[str, Declaration],
    stage: Stage,
    at: Coordinates,
    *,
    frozen: Collection[str] = (),
) -> list[Traffic]:
    """A step of the rank at these coordinates, up to its clipped gradients.

    ``frozen`` names parameters whose gradients nobody sums; activations are counted as if all were trained.
    What routers and experts exchange depends on the tokens and is not counted.
    """
    found: list[Traffic] = []
    stated = {name: one for name, one in stated.items() if not one.buffer}  # which nobody sends
    for number in stage.blocks:
        branches = 2 + (f"layers.{number}.mlp.shared.down.weight" in stated)
        for forward in (True, False):
            found += block_traffic(work, forward=forward, branches=branches)
        found += recomputed_traffic(work, number, branches)
        found += _over_context(work, stated, number, at)
    if stage.first:
        found += _tensor(work, "embedding", _exit(work).forward) + _tensor(
            work, "embedding", _exit(work).backward
        )
    if stage.last:
        found += _tensor(work, "output layer", _entrance(work).forward)
        found += _tensor(work, "output layer", _entrance(work).backward)
        chunks = ceil(work.tokens / work.loss_chunk) if work.loss_chunk else 1
        if work.layout.tensor > 1:
            size = 4 * work.tokens * work.inner
            found.append(Traffic("tensor", "all_reduce", "loss", 2 * chunks, size, work.layout.tensor))
    found = [_times(one, work.micro_batches) for one in found]
    found += _between_stages(work, at)
    found += _over_data(work, stated, at, frozen)
    found += _once(work, stated, at, frozen)
    return _added(one for one in found if one.count and one.ranks > 1)


@dataclass(frozen=True)
class _Pair:
    """(kind, numbers given) of a collective pair's two directions; ``None`` sends nothing."""

    forward: tuple[str, int] | None
    backward: tuple[str, int] | None


def _entrance(work: Work) -> _Pair:
    """Into products that are cut by columns: ``enter_tensor``."""
    size = work.tokens * work.config.hidden_size
    if work.layout.sequence:
        return _Pair(("all_gather", size // work.layout.tensor), ("reduce_scatter", size))
    return _Pair(None, ("all_reduce", size))


def _exit(work: Work) -> _Pair:
    """Out of products that are cut by rows: ``leave_tensor``."""
    size = work.tokens * work.config.hidden_size
    if work.layout.sequence:
        return _Pair(("reduce_scatter", size), ("all_gather", size // work.layout.tensor))
    return _Pair(("all_reduce", size), None)


def _tensor(work: Work, what: str, sent: tuple[str, int] | None, count: int = 1) -> list[Traffic]:
    if sent is None or work.layout.tensor == 1 or not count:
        return []
    kind, numbers = sent
    return [Traffic("tensor", kind, what, count, count * numbers * work.compute, work.layout.tensor)]


def _over_context(
    work: Work, stated: Mapping[str, Declaration], number: int, at: Coordinates
) -> list[Traffic]:
    """One block's keys and values to the other context ranks, their gradients back (docs/context.md)."""
    ranks, layout = work.layout.context, work.layout
    if ranks == 1:
        return []
    shape = block_shape(work, stated, number, at)
    here = 2 * shape.key_value * work.tokens
    inner = max(work.compute, 4)
    again = int(checkpointed(number, work.checkpointing, work.checkpoint_every))
    if layout.ring:
        rounds = ranks - 1
        size, times = rounds * here, 2 + again
        return [
            Traffic(
                "context", "exchange", "keys, values", rounds * times, times * size * work.compute, ranks
            ),
            Traffic("context", "exchange", "their gradients", rounds, size * inner, ranks),
        ]
    return [
        Traffic("context", "all_gather", "keys, values", 2 + again, (2 + again) * here * work.compute, ranks),
        Traffic("context", "reduce_scatter", "their gradients", 1, ranks * here * inner, ranks),
    ]


def _between_stages(work: Work, at: Coordinates) -> list[Traffic]:
    """Hidden states to the stage after, their gradients to the one before, a message a micro-batch.

    Of two stages that follow each other on one rank (a V's lowest) nothing is sent.
    """
    layout = work.layout
    borders = 0
    for number in layout.stages_of(at.pipeline):
        for other in (number - 1, number + 1):
            borders += 0 <= other < layout.stages and layout.rank_of_stage(other) != at.pipeline
    size = work.tokens * work.config.hidden_size * work.compute // (layout.tensor if layout.sequence else 1)
    count = work.micro_batches * borders
    return [Traffic("pipeline", "send", "hidden states", count, count * size, layout.pipeline)]


def _over_data(
    work: Work, stated: Mapping[str, Declaration], at: Coordinates, frozen: Collection[str]
) -> list[Traffic]:
    """FSDP's, a group of parameters at a time: each block, and the rest. Pieces are padded to one length."""
    layout, rounds = work.layout, work.micro_batches
    copies, shards, _ = layout.data_sizes()
    found = []
    for group in sorted({group_of(name) for name in stated}):
        names = [name for name in stated if group_of(name) == group]
        pieces = {name: _piece(stated[name], work, at) for name in names}
        summed = sum(size for name, size in pieces.items() if name not in frozen)
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * rounds}[layout.zero]
        if layout.zero == 3 and not group and work.loss_chunk:
            gathers = rounds  # stays whole for the loss
        sums = bool(summed) * (rounds if layout.zero >= 2 else 1)
        weights = gathers * sum(pieces.values()) * work.compute
        size = sums * summed * work.reduce
        found += [
            Traffic("data", "all_gather", "weights", gathers, weights, shards),
            Traffic("data", "reduce_scatter", "gradients", sums, shards * size, shards),
            Traffic("replicas", "all_reduce", "gradients", sums, size, copies),
        ]
    return found


def _once(
    work: Work, stated: Mapping[str, Declaration], at: Coordinates, frozen: Collection[str]
) -> list[Traffic]:
    """A step's own: gradients of which each rank holds a part, in one sum; three single numbers."""
    layout = work.layout
    trained = {name: one for name, one in stated.items() if name not in frozen}

    def numbers(chosen: Iterable[Declaration]) -> int:
        return sum(one.shard_box(layout, at).size for one in chosen)

    partial = [one for one in trained.values() if "tensor" in one.partial]
    ends = [one for one in trained.values() if one.ends]
    size = max(work.master, work.reduce)
    return [
        Traffic(
            "tensor", "all_reduce", "partial gradients", bool(partial), numbers(partial) * size, layout.tensor
        ),
        Traffic("ends", "all_reduce", "tied embedding", bool(ends), numbers(ends) * size, 2),
        Traffic("all", "all_reduce", "tokens", 1, 8, layout.world),
        # With the loss go three numbers that tell whether every parameter has a gradient.
        Traffic("all", "all_reduce", "loss", 1, 4 * work.inner, layout.world),
        Traffic("all", "all_reduce", "gradient norm", 1, max(work.master, 4), layout.world),
    ]


def _piece(declaration: Declaration, work: Work, at: Coordinates) -> int:
    """Numbers of a data rank's piece, padded: ``ceil`` of the rows."""
    rows, *rest = declaration.box(work.layout, at).shape
    return ceil(rows / work.layout.data_sizes()[1]) * prod(rest)


def _times(one: Traffic, count: int) -> Traffic:
    return Traffic(one.axis, one.kind, one.what, count * one.count, count * one.bytes, one.ranks)


def _added(every: Iterable[Traffic]) -> list[Traffic]:
    """One line for each axis, kind and purpose."""
    found: dict[tuple[str, str, str], Traffic] = {}
    for one in every:
        key = (one.axis, one.kind, one.what)
        before = found.get(key, Traffic(*key, 0, 0, one.ranks))
        found[key] = Traffic(*key, before.count + one.count, before.bytes + one.bytes, one.ranks)
    return list(found.values())
