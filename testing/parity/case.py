"""Hold the results of one forward and backward of a model: its loss, every module's output, every
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models import ModelConfig
from ...parallel_state import Box, Layout, seed_of
from ..layouts import Pieces, as_pieces, differences, join, random_rows


@dataclass(frozen=True)
class Question:
    """Hold a model's folder, the layout to try, and the batch: ``samples`` x ``length`` random tokens.

    ``folder`` is a Hugging Face folder; the layout may be cut by hand with ``split``.
    """

    folder: str
    layout: Layout = field(default_factory=Layout)
    split: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    samples: int = 4
    length: int = 32
    seed: int = 0

    def batch(self, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Return (input_ids, labels), both (samples, length) int64; ignored labels are spread unevenly."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "parity"))
        return random_rows(self.samples, self.length, config.vocab_size, generator)


@dataclass
class Observation:
    """Hold the outputs, loss and gradients of one run, by our names.

    ``outputs``: in the order in which modules ran, in the pieces that ranks hold, each with its box of the
    whole (samples, length, features). ``gradients`` are whole.
    """

    loss: float
    outputs: dict[str, list[tuple[Box, Tensor]]]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """State how far a tensor is from the reference, relative to the reference's largest element."""

    kind: str
    name: str
    relative: float


def compared(reference: Observation, other: Observation) -> Iterator[Difference]:
    """Yield differences: of outputs in the order of computation, of the loss, of gradients in reverse.

    So the first large one is where things go wrong. The pieces of ``reference`` hold all of each output.
    """
    for name, parts in reference.outputs.items():
        if name in other.outputs:
            pieces: list[Pieces] = [{name: (box, True, part)} for box, part in other.outputs[name]]
            yield from (Difference("output", *one) for one in differences({name: join(parts)}, pieces))
    yield Difference("loss", "the step", abs(reference.loss - other.loss) / max(abs(reference.loss), 1e-300))
    gradients = differences(reference.gradients, [as_pieces(other.gradients)])
    yield from (Difference("gradient", *one) for one in gradients)


def first_beyond(found: list[Difference], tolerance: float) -> Difference | None:
    """Return the first that differs by more than ``tolerance``; NaN differs."""
    return next((one for one in found if not one.relative <= tolerance), None)
