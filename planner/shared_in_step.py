"""Count the bytes of weights and gradients that data ranks share: those that last, and those of an instant.

FSDP handles a group of parameters at a time: a block, or the root, all that is in no block. In a backward it
gathers a group and, with ZeRO 3, the group before it. After the backward of a group it copies the gradients
into a buffer, which is summed; a shard of the sum stays. The buffer stays until the next group has its
gradients, so that of the last group stays until the next backward (``reduce_scatter_states`` in torch).
"""

from __future__ import annotations

from typing import Literal

from ..parallel_state import BUFFER_DTYPE
from ..pipeline.schedule_kinds import schedule_kind
from .rank_parameters import Group, RankParameters
from .step_shape import Work

#: Instants of a micro-batch on a stage: in the last block's forward, in that of a step's first micro-batch
#: with ZeRO 1 and 2, which gather only then; in the loss; in the backward of the output layer, of the
#: stage's last block, of another block (or before that, when its weights are copied); after that of a block;
#: in that of the embedding. Then those of a backward in two parts: in the first part, and at the start and
#: the end of the second one. The model's first stage computes all of a backward in the second part, and sums
#: no gradient before its end: its last block, others, its end. The rest are in the last backward of a stage
#: in a step (``IN_LAST``).
Place = Literal[
    "forward", "first forward", "loss", "head", "last block", "block", "sum", "entry",
    "inputs", "weights", "weights made",
    "unsummed last block", "unsummed block", "unsummed end",
    "last sum", "last entry", "last weights made", "last unsummed end",
]  # fmt: skip

#: Instants at which gradients are summed over the data ranks: in each backward, or in the last one alone.
IN_LAST: dict[Place, Place] = {
    "sum": "last sum",
    "entry": "last entry",
    "weights made": "last weights made",
    "unsummed end": "last unsummed end",
}


def holds_alone(work: Work) -> bool:
    """Tell whether the weights are shared with no rank, and not by FSDP (``compute_weights``)."""
    return work.layout.holds_alone and not work.offload


def gathered_bytes(work: Work, parameters: RankParameters) -> int:
    """Return the bytes of the weights that a rank computes with, where they are not the stored ones. With
    offload they are others even without ZeRO; otherwise only those that are stored in another dtype, as the
    frozen weights beside adapters are not.
    """
    if not work.layout.zero and not work.offload:
        total = parameters.every
        frozen, stored = (
            total.here - total.trained,
            total.fixed_bytes - total.buffers * BUFFER_DTYPE.itemsize,
        )
        cast = total.trained * (work.compute != work.master)
        return (cast + frozen * (stored != frozen * work.compute)) * work.compute
    return (parameters.every if work.layout.zero < 3 else parameters.root).here * work.compute


def gradient_bytes(work: Work, parameters: RankParameters) -> tuple[int, int]:
    """Return the bytes of gradients: (summed over the data ranks and sharded, whole and not summed yet)."""
    sharded = parameters.every.trained_stored * work.master
    whole = parameters.every.trained * work.reduce
    if work.micro_batches == 1:
        return sharded, 0
    if holds_alone(work):
        return 0, whole
    if work.layout.zero >= 2:  # the last group's buffer
        return sharded, _last_summed(parameters) * work.reduce
    # Sums over the micro-batches; each is freed when its sharded sum is made.
    return (sharded if work.offload else 0), whole


def _last_summed(parameters: RankParameters) -> int:
    """Return the elements of the group that FSDP sums last in a backward: the root, or a block where a stage
    uses nothing of it.
    """
    ends = parameters.ends or (parameters.root,)
    return max((group.trained for group in ends), default=0) or parameters.largest_trained_block


def shared_bytes(parameters: RankParameters, key: SharedKey) -> dict[tuple[Place, int], float]:
    """Return the bytes of each instant on each of the rank's stages, beside those that last. The blocks that
    ZeRO 3 gathers are not included (``Instant.gathered``), except in a backward in two parts.
    """
    shared: dict[tuple[Place, int], float] | None = parameters.known_shared.get(key)
    if shared is None:
        shared = parameters.known_shared[key] = places_shared(parameters, *key)
    return shared


#: The arguments of ``places_shared`` that follow from a step.
SharedKey = tuple[int, int, bool, bool, bool, bool, int, int, int]


def shared_key(work: Work) -> SharedKey:
    """Return all of a step that ``places_shared`` depends on."""
    cut = work.layout.pipeline > 1
    in_two = cut and schedule_kind(work.schedule).two_backwards
    return (
        work.layout.zero, work.layout.data_sizes()[1], holds_alone(work), work.micro_batches > 1, cut, in_two,
        work.compute, work.reduce, work.master,
    )  # fmt: skip


def adds_at_once(zero: int, alone: bool, several: bool, compute: int, reduce: int) -> bool:
    """Tell whether each gradient is added to that of earlier micro-batches as soon as it is made.

    FSDP adds gradients to sums of another dtype only after the backward of their block.
    """
    return several and zero < 2 and (alone or compute == reduce)


def dropped_in_last(zero: int, alone: bool, cut: bool, compute: int, master: int) -> int:
    """Return the bytes of each gathered weight that a step's last backward drops after that of its block."""
    gathers = zero in (1, 2) or (not zero and not alone and compute != master)
    return compute * (gathers and not cut)


def places_shared(
    parameters: RankParameters, zero: int, shards: int, alone: bool, several: bool, cut: bool, in_two: bool,
    compute: int, reduce: int, master: int,
) -> dict[tuple[Place, int], float]:  # fmt: skip
    """Compute ``shared_bytes``. ``several``: whether a step has several micro-batches; ``cut``: whether the
    model is cut into stages; ``in_two``: whether a backward has two parts.
    """
    added, sums_each = several and zero < 2, zero >= (2 if several else 1)
    first = alone and not added  # the gradients that last
    largest = 0 if first else parameters.largest_of_blocks * compute
    made = 0 if alone or added else compute
    # What is summed, and the shard of the sum; without ZeRO one buffer.
    buffer = 0.0 if alone else reduce * (1 + (1 / shards if zero else 0))
    if not alone and reduce != master:
        buffer += master / shards
    # FSDP copies gradients into the buffer and frees them, but for the last one, before it makes the shard.
    freed = reduce if added else 0

    def summed(group: Group) -> float:
        if not zero or alone:
            return group.trained * (made + buffer)
        shard = group.trained * (buffer - freed) + group.last * (freed or compute)
        return max(group.trained * (made + reduce), shard)

    # The buffer of the last sum counts as gradients that last; the next group's gradients replace it.
    last = _last_summed(parameters) * reduce if sums_each and several else 0
    gathered = parameters.largest_block * compute if zero == 3 else 0
    ends, block = parameters.ends or (parameters.root,), parameters.largest_trained_block
    entry, of_entry = max(end.trained for end in ends), max(map(summed, ends))
    of_block = max((summed(group) for group, _ in parameters.blocks), default=0)
    # In the last backward, which alone sums with less than ZeRO 2, a block's weights are dropped before.
    dropped = (
        parameters.largest_block * dropped_in_last(zero, alone, cut, compute, master) * (added or not several)
    )
    # A tied weight's gradient waits for its second part also where others are added at once.
    tied = parameters.tied * compute if added else 0
    # Autograd adds the two parts of a tied weight's gradient into a third tensor, while the buffer of a block
    # is still there. On a rank alone the gradients that last contain one of the three.
    joined = parameters.tied * (3 * compute - master * first)
    joined += block * reduce * sums_each * (parameters.tied > 0)
    shared: dict[tuple[Place, int], float] = {}
    for place, (here, trained) in enumerate(parameters.sums_of_stages):
        # The model's last stage is its rank's last one.
        exit = parameters.exit * (place == len(parameters.stages) - 1)
        shared["forward", place] = 0
        shared["first forward", place] = parameters.largest_block * compute * (zero in (1, 2))
        shared["loss", place] = 0
        shared["head", place] = 0 if first else exit * compute
        shared["last block", place] = before = exit * made + tied
        shared["block", place] = before + (block * reduce - last if sums_each else 0)
        shared["sum", place] = of_block + exit * made + tied - last - dropped
        shared["entry", place] = max(of_entry + entry * compute * (alone and added), joined) - last
        if in_two:
            whole, grads = here * compute * (zero == 3), trained * made
            shared["inputs", place] = 0
            shared["weights", place] = whole + max(parameters.root.here * compute * (zero == 3), gathered)
            shared["weights made", place] = whole + max(
                largest, grads + exit * made + of_block - block * made - last
            )
            shared["unsummed last block", place] = whole
            shared["unsummed block", place] = whole + grads
            shared["unsummed end", place] = grads + of_entry - last
        for usual, in_last in IN_LAST.items():
            if (usual, place) in shared:
                shared[in_last, place] = shared[usual, place]
        if added and cut:
            shared["sum", place] = exit * made + tied
            shared["entry", place] = max(entry * compute * alone, joined)
            if in_two:
                shared["weights made", place] = whole + max(largest, grads + exit * made)
                shared["unsummed end", place] = grads
    return shared
