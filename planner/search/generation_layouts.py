"""List the layouts of ``trilith generate`` on some GPUs: what a rank holds, and how many rows fit.

A rank holds weights, the cache of keys and values, and what reading the prompts takes. Both are traced: a
forward of one block of each kind with a cache, without a backward after it. Prompts of different lengths need
a mask over all pairs of their tokens. Reading is an upper bound, because a stage may hold fewer kinds of
blocks.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...layers import Stage
from ...models import Family, ModelConfig
from ...parallel_state import BadInput, Layout, ParallelState
from ...simulation.micro_batch import MicroBatch
from ...training.own_module import OwnFamily
from ..sampled_model import sampled
from .candidates import divisors
from .choice import Tally
from .request import Request
from .shortage import none_legal

#: Bytes of a token's position, and of its id, while it is read.
_PLACE = 8
#: By how much reading may hold more than the blocks: what is made of ids and positions, and what a stage
#: gives.
_BESIDE = 1.05


@dataclass(frozen=True)
class GenerationMemory:
    """Hold the bytes of one rank. ``cache``: of all rows; ``reading``: at most, while prompts are read."""

    weights: int
    cache: int
    reading: int

    @property
    def total(self) -> int:
        """Return the bytes at the worst moment."""
        return self.weights + self.cache + self.reading


def generation_memory(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    *,
    rows: int,
    length: int,
    fused: bool = True,
) -> list[GenerationMemory]:
    """Return the memory of the first rank of each pipeline rank while ``rows`` rows are generated at once.

    ``length``: the most tokens of a row, those of its prompt included; a prompt may be nearly as long.
    ``fused``: whether a GPU's fused kernels run, see ``MicroBatch``. Raises ``BadInput`` for a layout that
    cannot cut the model.
    """
    sample = sampled(family, config, layout)
    traced = sample.pieces.generation(sample.blocks, MicroBatch(rows, length, dtype.itemsize, fused))
    # A sum over tensor ranks may be held a little longer by whoever sends it.
    sent = rows * length * config.hidden_size * dtype.itemsize if layout.tensor > 1 else 0
    plans = []
    for rank in range(layout.pipeline):
        state = ParallelState.stand_in(layout, layout.first_rank(rank))
        stage = Stage.of(config.num_hidden_layers, state=state)
        kinds = [sample.kinds[number] for number in stage.blocks]
        parameters = sample.parameters(state).every
        # The last token's logits: this rank's, all ranks' together, and in fp32 for the choice.
        logits = rows * config.vocab_size * (2 * dtype.itemsize + 4) if stage.last else 0
        weights = parameters.unsharded * dtype.itemsize + parameters.fixed_bytes
        cache = sum(traced.caches[kind] for kind in kinds)
        reading = int(_BESIDE * traced.reading) + rows * length * 2 * _PLACE + logits + sent
        plans.append(GenerationMemory(weights, cache, reading))
    return plans


def rows_that_fit(
    family: Family, config: ModelConfig, layout: Layout, dtype: torch.dtype, *, length: int, room: int
) -> int:
    """Return the most rows that can be generated at once with ``room`` bytes on each rank; 0 if none fits."""

    def totals(rows: int) -> list[int]:
        planned = generation_memory(family, config, layout, dtype, rows=rows, length=length)
        return [memory.total for memory in planned]

    # From two rows on, where masks are needed, each further row takes as much as the one before.
    two, three = totals(2), totals(3)
    if max(two) > room:
        return int(max(totals(1)) <= room)
    return min(2 + (room - size) // (other - size) for size, other in zip(two, three, strict=True))


@dataclass(frozen=True)
class GenerationChoice:
    """State a layout with the memory of its heaviest rank, and the ``most`` rows that fit at once."""

    request: Request
    layout: Layout
    memory: GenerationMemory
    most: int

    @property
    def bytes(self) -> int:
        """Return the bytes that the heaviest rank needs, the runtime's included."""
        return self.memory.total + self.request.runtime

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        request = self.request
        return {
            "model": request.name,
            "gpus": request.gpus,
            "machine": request.machine.name,
            "room_bytes": request.room,
            "tensor": self.layout.tensor,
            "pipeline": self.layout.pipeline,
            "rows": request.recipe.data.global_batch,
            "length": request.recipe.data.sequence_length,
            **vars(self.memory),
            "bytes": self.bytes,
            "rows_that_fit": self.most,
        }


def generation_layouts(request: Request, dtype: torch.dtype) -> list[GenerationChoice]:
    """Return every legal layout, those in which most rows fit first.

    Rows and their length are those of the request's batch. Raises ``BadInput`` if no layout is legal, or not
    even one row fits in any.
    """
    if isinstance(request.family, OwnFamily):
        expected, actual = "a model that writes text, of the zoo", "a module of your own"
        raise BadInput("plan", "--generate", expected=expected, found=actual)
    if request.family.adopted:
        expected, kind = "a family of the zoo", request.family.model_type
        raise BadInput("plan", "--generate", expected=expected, found=f"{kind}, which transformers computes")
    family, config, data, tally = request.family, request.config, request.recipe.data, Tally()
    room, length, choices = request.room - request.runtime, request.recipe.data.sequence_length, []
    for tensor in divisors(request.gpus):
        layout = Layout.of(tensor=tensor, pipeline=request.gpus // tensor)
        try:
            planned = generation_memory(family, config, layout, dtype, rows=data.global_batch, length=length)
            most = rows_that_fit(family, config, layout, dtype, length=length, room=room)
        except BadInput as error:
            tally.illegal(error, 1)
            continue
        choices.append(GenerationChoice(request, layout, max(planned, key=lambda memory: memory.total), most))
    if not choices:
        raise none_legal(request, tally)
    choices.sort(key=lambda choice: -choice.most)
    if not choices[0].most:
        least = min(choices, key=lambda choice: choice.memory.weights)
        shorter = ", or --dtype bfloat16" if dtype.itemsize > 2 else ""
        raise BadInput(
            f"plan {request.name}", "memory",
            expected=f"at most {request.room / 1e9:.1f} GB on a GPU with one row of {length:,} tokens",
            found=f"weights of {least.memory.weights / 1e9:.1f} GB a rank with {least.layout}",
            todo=f"Take more --gpus, a --gpu-type with more memory, or a shorter --sequence-length{shorter}",
        )  # fmt: skip
    return choices
