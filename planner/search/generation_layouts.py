"""List the layouts of ``trilith generate`` on so many GPUs: what a rank holds, and how many rows fit."""

from dataclasses import dataclass
from typing import Any

import torch

from ...parallel_state import BadInput, Layout
from ...training.own.module import OwnFamily
from ..generation_memory import GenerationMemory, generation_memory, rows_that_fit
from .candidates import divisors
from .request import Request
from .shortage import none_legal
from .tally import Tally


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
            "weights": self.memory.weights,
            "cache": self.memory.cache,
            "reading": self.memory.reading,
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
        raise BadInput(
            f"plan {request.name}",
            "memory",
            expected=f"at most {request.room / 1e9:.1f} GB on a GPU with one row of {length:,} tokens",
            found=f"weights of {least.memory.weights / 1e9:.1f} GB a rank with {least.layout}",
            todo="Take more --gpus, a --gpu-type with more memory, or a shorter --sequence-length"
            + (", or --dtype bfloat16" if dtype.itemsize > 2 else ""),
        )
    return choices
