"""Count what a rank sends in a training step: the collectives of each kind, and the bytes given to them.

What blocks, ends and loss send is read off traces of them. For a block over ``t`` tensor ranks and N tokens
of a micro-batch, D wide, it adds up to the table below (Shoeybi et al. 2019, section 3; Korthikanti et al.
2022, section 4). Products that share their input (q, k and v; gate and up) need one collective together:

=============================  =================================  =================================
                               forward                            backward
=============================  =================================  =================================
tensor                         2 all-reduces of N D               2 all-reduces of N D
tensor, sequence               2 all-gathers of N D / t,          2 all-gathers of N D / t,
                               2 reduce-scatters of N D           2 reduce-scatters of N D
=============================  =================================  =================================

Over c context ranks with N tokens each, a block's attention also fetches keys and values; let a rank have K
such numbers. Forward is an all-gather of K; backward is another one and a reduce-scatter of c K gradients.
Around a ring, forward is c - 1 exchanges of K, and backward is 2 (c - 1).

Experts, routed and shared together, send as much over the tensor ranks as a feed-forward. The embedding
sends as much as a block's exit, and the output layer, tied or not, as much as a block's entrance. The loss
has two all-reduces of 4 N numbers together, in at least fp32. Norms, rotation, attention, activation
functions and dropout send nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..layers import checkpointed
from ..simulation.piece import Piece
from .gathers_and_sums import (
    gathered_in_vain,
    gathers_ahead,
    gathers_of_block,
    gathers_of_root,
    sums,
    sums_of_replicas,
)
from .own_module import Loss, stages_of
from .rank_parameters import Group, RankParameters, rank_parameters
from .ring_and_tree import ring_wire_bytes
from .stage_costs import StageCost
from .step_shape import Work


@dataclass(frozen=True)
class Traffic:
    """State ``count`` collectives of a ``kind`` over ``ranks`` ranks; ``bytes``: what a rank gives to all of
    them.

    ``axis``: tensor, context, data (ranks that hold shards), replicas (of shards), pipeline, ends, or all.
    ``expert data`` and ``expert replicas`` are those of experts that ranks share out.
    """

    axis: str
    kind: str
    what: str
    count: int
    bytes: int
    ranks: int

    @property
    def wire(self) -> int:
        """Return the bytes that a rank puts on the wire with ring collectives."""
        return int(ring_wire_bytes(self.kind, self.bytes, self.ranks))


_DIRECTIONS = {"forward": "forward", "again": "computed again", "backward": "backward"}


def traffic_of_piece(work: Work, piece: Piece, *, again: bool = False) -> list[Traffic]:
    """Return what a piece sends for one micro-batch; ``again``: what it sends when it is recomputed.

    What the ranks of experts exchange depends on the tokens and is not counted.
    """
    mode = work.checkpointing if again else "none"
    return [
        Traffic(
            collective.axis,
            collective.kind,
            piece.what or _DIRECTIONS[collective.phase],
            1,
            collective.bytes,
            getattr(work.layout, collective.axis),
        )
        for collective in piece.sends(mode, again=again)
        if collective.axis != "expert"
    ]


def step_traffic(
    work: Work, model: nn.Module, *, samples: Mapping[str, Tensor] | None = None, loss: Loss | None = None
) -> list[Traffic]:
    """Return the collectives in a step of the rank of ``work``, whose stages ``model`` holds, up to clipped
    gradients.

    What a backward sends depends on the parameters that are trained: it ends at the first of them. What
    the ranks of experts exchange depends on the tokens and is not counted. ``samples``, ``loss``: as for
    ``plan_memory``. Raises ``BadInput`` for a module that cannot be traced.
    """
    work = replace(work, trains_all=getattr(model, "trains_all", False))
    parameters = rank_parameters(model, work.state)
    return traffic_of(
        work, parameters, stages_of(work, model, samples, loss), parameters.numbered.__getitem__
    )


def traffic_of(
    work: Work, parameters: RankParameters, stages: Sequence[StageCost], group: Callable[[int], Group]
) -> list[Traffic]:
    """Return ``step_traffic`` of a rank, from its parameters and the costs of its stages; ``group``: counts
    the parameters of the block of a number.
    """
    collectives: list[Traffic] = []
    for stage in stages:
        for piece in (*stage.blocks.values(), *stage.beside.parts, *([stage.loss] if stage.loss else [])):
            collectives += traffic_of_piece(work, piece)
        for number, piece in (*stage.blocks.items(), *stage.further.items()):
            if checkpointed(number, work.checkpointing, work.checkpoint_every):
                collectives += traffic_of_piece(work, piece, again=True)
    collectives = [_times(collective, work.micro_batches) for collective in collectives]
    collectives += _between_stages(work)
    of_root = gathers_of_root(work, reached=all(stage.has_backward for stage in stages))
    collectives += _gathers(work, parameters.root, of_root, of_root)
    # Each end's backward sums what it uses from ZeRO 2 on; otherwise the step's end sums the root as a whole.
    for end in (work.layout.zero >= 2 and parameters.ends) or (parameters.root,):
        collectives += _sums(work, end, root=True)
    numbers = work.layout.stages_of(work.at.pipeline)
    vain = set() if all(stage.has_backward for stage in stages) else gathered_in_vain(work)
    for place, stage, blocks in zip(numbers, stages, parameters.stages, strict=True):
        collectives += _gathers(work, group(max(stage.blocks)), 1, 0) if place in vain else []
        collectives += _gathers_of_blocks(work, place, stage, blocks, group)
        for block, number in blocks:
            collectives += [_times(sent, number) for sent in _sums(work, block, root=False)]
    collectives += _once(work, parameters)
    return _added(collective for collective in collectives if collective.count and collective.ranks > 1)


def _between_stages(work: Work) -> list[Traffic]:
    """Count hidden states to the next stage and gradients to the one before, a message for each micro-batch.

    Between two stages on the same rank (the lowest of a V) nothing is sent.
    """
    layout, sizes = work.layout, list[int]()
    for number in layout.stages_of(work.at.pipeline):
        for other in (number - 1, number + 1):
            if 0 <= other < layout.stages and layout.rank_of_stage(other) != work.at.pipeline:
                sizes.append(work.sent_by(min(number, other)))
    count, size = work.micro_batches * len(sizes), work.micro_batches * sum(sizes)
    return [Traffic("pipeline", "send", "hidden states", count, size, layout.pipeline)]


def _gathers(work: Work, group: Group, count: int, apart: int) -> list[Traffic]:
    """Count FSDP's gathers of a group of parameters, a block or the rest, and those of the experts in it that
    are gathered ``apart``.
    """
    return [
        Traffic(axis, "all_gather", "weights", number, number * padded * work.compute, ranks)
        for axis, ranks, padded, number in (
            ("data", work.layout.data_sizes()[1], group.padded, count),
            ("expert data", work.layout.data_sizes(experts=True)[1], group.apart, apart),
        )
        if padded
    ]


def _gathers_of_blocks(
    work: Work,
    place: int,
    stage: StageCost,
    blocks: Iterable[tuple[Group, int]],
    group: Callable[[int], Group],
) -> list[Traffic]:
    """Count FSDP's gathers of all blocks of a stage, whose number is ``place``."""
    counts, collectives = Counter[Group](), list[Traffic]()
    for block, number in blocks:
        counts[block] += number
    for number in stage.before_trained:
        counts[group(number)] -= 1
        forward = gathers_of_block(work, place, reached=False)
        # Where experts are gathered by themselves the block that holds them is gathered after them, too.
        # FSDP gathers the block before the one whose backward runs.
        ahead = gathers_ahead(work) * (number == stage.before_trained[-1] and stage.has_backward)
        collectives += _gathers(work, group(number), forward + ahead, forward)
    for block, number in counts.items():
        gathers = gathers_of_block(work, place)
        collectives += [_times(sent, number) for sent in _gathers(work, block, gathers, gathers)]
    return collectives


def _sums(work: Work, group: Group, *, root: bool) -> list[Traffic]:
    """Count the sums of a group's gradients over the ranks that hold shards, and over the replicas."""
    scatters, replicas = sums(work), sums_of_replicas(work, root=root)
    collectives = []
    for experts, name, trained in ((False, "", group.trained_padded), (True, "expert ", group.trained_apart)):
        if trained:
            (copies, shards, _), piece = work.layout.data_sizes(experts), trained * work.reduce
            size = scatters * shards * piece
            collectives += [
                Traffic(f"{name}data", "reduce_scatter", "gradients", scatters, size, shards),
                Traffic(f"{name}replicas", "all_reduce", "gradients", replicas, replicas * piece, copies),
            ]
    return collectives


def _once(work: Work, parameters: RankParameters) -> list[Traffic]:
    """Count the traffic that a step has once: the sums of partial gradients, and single numbers."""
    layout, size, terms = work.layout, max(work.master, work.reduce), parameters.terms
    total = parameters.every
    partial, ends = bool(total.partial_tensors), bool(total.end_tensors)
    return [
        Traffic("tensor", "all_reduce", "partial gradients", partial, total.partial * size, layout.tensor),
        Traffic("ends", "all_reduce", "tied embedding", ends, total.ends * size, 2),
        # With the counts of the loss's terms go five numbers that tell whether every rank can use its batch.
        Traffic("all", "all_reduce", "tokens", 1, (5 + terms) * 8, layout.world),
        # With its sums go two numbers that tell whether every parameter has a gradient.
        Traffic("all", "all_reduce", "loss", 1, (2 + terms) * 8, layout.world),
        Traffic("all", "all_reduce", "gradient norm", 1, max(work.master, 4), layout.world),
    ]


def _times(collective: Traffic, count: int) -> Traffic:
    return replace(collective, count=count * collective.count, bytes=count * collective.bytes)


def _added(collectives: Iterable[Traffic]) -> list[Traffic]:
    """Add up the traffic of each axis, kind and purpose."""
    by_key: dict[tuple[str, str, str], Traffic] = {}
    for collective in collectives:
        key = (collective.axis, collective.kind, collective.what)
        before = by_key.get(key, Traffic(*key, 0, 0, collective.ranks))
        by_key[key] = Traffic(
            *key, before.count + collective.count, before.bytes + collective.bytes, collective.ranks
        )
    return list(by_key.values())
