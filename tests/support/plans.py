"""Plan each rank of a case in one process, where all cases that cut a model alike share its traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from unittest.mock import patch

from trilith.layers import use_float8
from trilith.layers.embedding import padded_vocabulary
from trilith.models import CausalLM
from trilith.parallel_state import ParallelState
from trilith.planner import Traffic, Work, plan_memory, rank_parameters, step_traffic
from trilith.simulation.pieces import ModelPieces
from trilith.simulation.trace import Piece

from support.short_training import Case, model_of

#: Number and bytes of the collectives of an axis and a kind.
Totals = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class RankPlan:
    """Hold what a rank is planned to send in a step, its bytes at the worst instant, and the elements of its
    parameters, gradients and moments. What is not asked is empty.
    """

    sends: Totals
    peak: int = 0
    elements: tuple[int, int, int] = (0, 0, 0)


def plans_of(case: Case, *, sends: bool, holds: bool) -> list[RankPlan]:
    """Return the plan of each rank of a case."""
    built = repr((case.config, case.lora, case.frozen, case.float8, case.dtype, case.compute))

    # In the loss the last tensor rank may hold a padded vocabulary, which changes nothing that it sends.
    vocabulary = int(case.config["vocab_size"])
    padded = holds and padded_vocabulary(vocabulary, case.layout.tensor) > vocabulary

    def pieces(model: CausalLM, state: ParallelState) -> ModelPieces:
        return shared_pieces((built, state.at.tensor if padded else None), model, state)

    with patch("trilith.planner.sampled_model.ModelPieces", pieces):
        return [plan_of(case, rank, sends=sends, holds=holds) for rank in range(case.layout.world)]


def plan_of(case: Case, rank: int, *, sends: bool, holds: bool) -> RankPlan:
    """Return the plan of a rank, whose model is built and traced for it."""
    model, _, config = model_of(case, ParallelState.stand_in(case.layout, rank))
    if case.float8 is not None:
        assert use_float8(model, case.float8) == []
    # What is sent does not depend on the kernels, and a GPU's are fewer; what is held is compared with a CPU.
    work = replace(work_of(case, model.state, config.hidden_size), fused=not holds)
    traffic = added(step_traffic(work, model)) if sends else {}
    if not holds:
        return RankPlan(traffic)
    memory, total = plan_memory(work, model), rank_parameters(model, model.state).every
    trained = total.trained_sharded
    elements = total.sharded + total.buffers, trained, 2 * trained
    return RankPlan(traffic, memory.total + memory.host * case.memory.offload, elements)


def work_of(case: Case, state: ParallelState, hidden: int) -> Work:
    """Describe the case's step to the planner: the only place where a test of ranks says this."""
    size = case.dtype.itemsize
    return Work(
        state,
        hidden,
        case.length,
        case.micro_batch,
        case.samples // (case.layout.data * case.micro_batch),
        schedule=case.schedule,
        master=size,
        compute=(case.compute or case.dtype).itemsize,
        reduce=size,
        checkpointing=case.memory.checkpointing,
        checkpoint_every=case.memory.every,
        loss_chunk=case.memory.stated_chunk,
        offload=case.memory.offload,
        fused=False,
    )


def added(collectives: Iterable[Traffic]) -> Totals:
    """Add up planned traffic by axis and kind."""
    totals: Totals = {}
    for collective in collectives:
        count, size = totals.get((collective.axis, collective.kind), (0, 0))
        totals[collective.axis, collective.kind] = count + collective.count, size + collective.bytes
    return totals


#: What pieces of models that are built and cut alike remember.
_TRACED: dict[object, dict[object, Piece]] = {}


def shared_pieces(alike: object, model: CausalLM, state: ParallelState) -> ModelPieces:
    """Return pieces that remember the traces of others: of models built alike and cut into equal blocks."""
    pieces = ModelPieces(model, state)
    pieces._known = _TRACED.setdefault((alike, state.layout.block_cut), {})
    return pieces
