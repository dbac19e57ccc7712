"""Count what a rank sends in a training step: the collectives of each kind, and the bytes given to them.

What blocks, ends and loss send is read off traces of them; docs/communication.md has the formulas. What FSDP
sends follows from the sizes of its groups of parameters, and from how often a step gathers and sums them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..layers import checkpointed
from ..parallel_state import Layout
from ..simulation.trace import Piece
from ..training.step_sums import StepReport
from .own_module import Loss
from .planned_model import planned_rank
from .rank_parameters import Group, RankParameters
from .stage_costs import StageCost
from .step_shape import Work


def ring_wire_bytes(kind: str, given_bytes: float, ranks: int) -> float:
    """Return the bytes that each of the ranks puts on the wire with a ring collective (Patarasu, Yuan 2009).

    ``given_bytes``: the size of the tensor that one rank gives to the collective: the whole one for
    ``all_reduce``, ``reduce_scatter``, ``broadcast`` and ``all_to_all``, its own shard for ``all_gather``,
    the message for ``send`` and ``exchange``.
    """
    others = ranks - 1
    match kind:
        case "all_reduce":  # a reduce-scatter, and an all-gather of what it makes
            return 2 * others * given_bytes / ranks
        case "all_gather":
            return others * given_bytes
        case "reduce_scatter" | "all_to_all":
            return others * given_bytes / ranks
        case "send" | "exchange" | "broadcast":
            return given_bytes if others else 0.0
    raise ValueError(f"no collective is called {kind!r}")


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


def group_of(layout: Layout, axis: str) -> tuple[int, int]:
    """Return the number of ranks of a group along an axis of ``Traffic``, and how far apart they are."""
    (copies, shards, _), (same, pieces, _) = layout.data_sizes(), layout.data_sizes(experts=True)
    stage = layout.world // layout.pipeline
    return {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "expert": (layout.expert, layout.tensor),
        "data": (shards, layout.tensor),
        "replicas": (copies, layout.tensor * shards),
        "expert data": (pieces, layout.tensor * layout.expert),
        "expert replicas": (same, layout.tensor * layout.expert * pieces),
        "pipeline": (layout.pipeline, stage),
        "ends": (min(2, layout.pipeline), stage * (layout.pipeline - 1)),
        "all": (layout.world, 1),
    }[axis]


#: What a block sends, by the phase in which it does.
_DIRECTIONS = {"forward": "forward", "again": "computed again", "backward": "backward"}


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
    return traffic_of(work, *planned_rank(work, model, samples, loss))


def traffic_of(work: Work, parameters: RankParameters, stages: Sequence[StageCost]) -> list[Traffic]:
    """Return ``step_traffic`` of a rank, from its parameters and the costs of its stages."""
    sent, reached = _Sent(work), all(stage.has_backward for stage in stages)
    for stage in stages:
        for piece in (*stage.blocks.values(), *stage.beside, *([stage.loss] if stage.loss else [])):
            sent.piece(piece)
        for number, piece in (*stage.blocks.items(), *stage.further.items()):
            if checkpointed(number, work.checkpointing, work.checkpoint_every):
                sent.piece(piece, again=True)
    sent.between_stages()
    of_root = work.gathers_of_root(reached=reached)
    sent.gathers(parameters.root, of_root, of_root)
    # Each end's backward sums what it uses from ZeRO 2 on; otherwise the step's end sums the root as a whole.
    for end in (work.layout.zero >= 2 and parameters.ends) or (parameters.root,):
        sent.sums(end, root=True)
    numbers = work.layout.stages_of(work.at.pipeline)
    for place, stage, blocks in zip(numbers, stages, parameters.stages, strict=True):
        sent.gathers_of_blocks(place, stage, blocks, parameters)
        for block, number in blocks:
            sent.sums(block, number)
    sent.once(parameters)
    return sent.traffic


class _Sent:
    """Add up what a rank sends in a step, by axis, kind and purpose."""

    def __init__(self, work: Work) -> None:
        self.work, self.layout = work, work.layout
        self._counts, self._sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()

    @property
    def traffic(self) -> list[Traffic]:
        return [
            Traffic(*sent, count, self._sizes[sent], group_of(self.layout, sent[0])[0])
            for sent, count in self._counts.items()
        ]

    def add(self, axis: str, kind: str, what: str, count: int, size: int) -> None:
        """Add ``count`` collectives whose inputs have ``size`` bytes on a rank in all."""
        if count and group_of(self.layout, axis)[0] > 1:
            self._counts[axis, kind, what] += count
            self._sizes[axis, kind, what] += size

    def piece(self, piece: Piece, *, again: bool = False) -> None:
        """Add what a piece sends for all micro-batches; ``again``: what it sends when it is recomputed.

        What the ranks of experts exchange depends on the tokens and is not counted.
        """
        rounds = self.work.micro_batches
        for sent in piece.sends(self.work.checkpointing if again else "none", again=again):
            if sent.axis != "expert":
                what = piece.what or _DIRECTIONS[sent.phase]
                self.add(sent.axis, sent.kind, what, rounds, rounds * sent.bytes)

    def between_stages(self) -> None:
        """Add hidden states to the next stage and gradients to the one before, for each micro-batch.

        Between two stages on the same rank (the lowest of a V) nothing is sent.
        """
        layout, rounds, own = self.layout, self.work.micro_batches, self.work.at.pipeline
        for number in layout.stages_of(own):
            for other in (number - 1, number + 1):
                if 0 <= other < layout.stages and layout.rank_of_stage(other) != own:
                    size = rounds * self.work.sent_by(min(number, other))
                    self.add("pipeline", "send", "hidden states", rounds, size)

    def gathers(self, group: Group, count: int, apart: int, times: int = 1) -> None:
        """Add FSDP's gathers of a group of parameters, and of its experts that are gathered ``apart``;
        ``times``: the number of such groups.
        """
        for axis, padded, number in (("data", group.padded, count), ("expert data", group.apart, apart)):
            if padded:
                size = times * number * padded * self.work.compute
                self.add(axis, "all_gather", "weights", times * number, size)

    def gathers_of_blocks(
        self, place: int, stage: StageCost, blocks: Iterable[tuple[Group, int]], parameters: RankParameters
    ) -> None:
        """Add FSDP's gathers of all blocks of a stage, whose number is ``place``."""
        work, counts = self.work, Counter[Group]()
        for block, number in blocks:
            counts[block] += number
        before_trained = [number for number in stage.blocks if number not in stage.reached]
        for number in before_trained:
            group = parameters.group(number)
            counts[group] -= 1
            forward = work.gathers_of_block(place, reached=False)
            # Where experts are gathered by themselves the block that holds them is gathered after them, too.
            # The backward of each block gathers the one before it with ZeRO 3. Here no backward takes what it
            # gathered, but the next forward does: only the step's last one is in vain.
            ahead = number == before_trained[-1] and stage.has_backward and work.layout.zero == 3
            self.gathers(group, forward + ahead, forward)
        gathers = work.gathers_of_block(place)
        for block, number in counts.items():
            self.gathers(block, gathers, gathers, number)

    def sums(self, group: Group, times: int = 1, *, root: bool = False) -> None:
        """Add the sums of a group's gradients over the ranks that hold shards, and over the replicas."""
        scatters, replicas = self.work.sums * times, self.work.sums_of_replicas(root=root) * times
        for name, trained in (("", group.trained_padded), ("expert ", group.trained_apart)):
            if trained:
                shards, piece = self.layout.data_sizes(bool(name))[1], trained * self.work.reduce
                self.add(f"{name}data", "reduce_scatter", "gradients", scatters, scatters * shards * piece)
                self.add(f"{name}replicas", "all_reduce", "gradients", replicas, replicas * piece)

    def once(self, parameters: RankParameters) -> None:
        """Add the traffic that a step has once: the sums of partial gradients, and single numbers."""
        total, terms, size = parameters.every, parameters.terms, max(self.work.master, self.work.reduce)
        for axis, what, count, nbytes in (
            ("tensor", "partial gradients", total.partial_tensors > 0, total.partial * size),
            ("ends", "tied embedding", total.end_tensors > 0, total.ends * size),
            # With the counts of the loss's terms go numbers that tell whether every rank can use its batch,
            # and with its sums two that tell whether every parameter has a gradient.
            ("all", "tokens", 1, (len(StepReport.NUMBERS) + terms) * 8),
            ("all", "loss", 1, (2 + terms) * 8),
            ("all", "gradient norm", 1, max(self.work.master, 4)),
        ):
            self.add(axis, "all_reduce", what, count, nbytes)
