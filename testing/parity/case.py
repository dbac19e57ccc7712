"""Hold the results of one forward and backward of a model: its loss, every module's output, every
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...layers import IGNORE
from ...models import ModelConfig
from ...parallel_state import Box, Layout, seed_of


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
        tokens = torch.randint(config.vocab_size, (self.samples, self.length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for sample in range(self.samples):
            labels[sample, : (3 * sample) % self.length] = IGNORE
        return tokens[:, :-1].contiguous(), labels


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


def differences(reference: Observation, other: Observation) -> Iterator[Difference]:
    """Yield differences: of outputs in the order of computation, of the loss, of gradients in reverse.

    So the first large one is where things go wrong. The pieces of ``reference`` hold all of each output.
    """
    for name, pieces in reference.outputs.items():
        if name in other.outputs:
            whole = _whole(pieces)
            held = [(box, piece) for box, piece in other.outputs[name] if box.size]
            worst = max(_relative(whole[box.slices], piece, whole) for box, piece in held)
            yield Difference("output", name, worst)
    yield Difference("loss", "the step", abs(reference.loss - other.loss) / max(abs(reference.loss), 1e-300))
    largest = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    for name, gradient in reversed(reference.gradients.items()):
        # Some gradients are zero but for rounding (a key's bias without rotation): none is held to that.
        least = largest * torch.finfo(gradient.dtype).eps ** (1 / 3)
        found = other.gradients[name][Box.whole(tuple(gradient.shape)).slices]  # without padding
        yield Difference("gradient", name, _relative(gradient, found, gradient, least))


def first_beyond(found: list[Difference], tolerance: float) -> Difference | None:
    """Return the first that differs by more than ``tolerance``; NaN differs."""
    return next((one for one in found if not one.relative <= tolerance), None)


def _whole(pieces: Sequence[tuple[Box, Tensor]]) -> Tensor:
    shape = tuple(map(max, zip(*(box.stop for box, _ in pieces), strict=True)))
    whole = torch.full(shape, float("nan"), dtype=pieces[0][1].dtype)
    for box, piece in pieces:
        whole[box.slices] = piece
    return whole


def _relative(expected: Tensor, found: Tensor, whole: Tensor, least: float = 1e-300) -> float:
    if expected.shape != found.shape:
        return float("inf")
    scale = max(float(whole.abs().max()), least)
    return float((expected.double() - found.double()).abs().max()) / scale
