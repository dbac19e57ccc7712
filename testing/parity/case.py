"""State what to compare of a model, and compare two observations of it: loss, outputs, gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models import Implementation, ModelConfig
from ...parallel_state import Layout, seed_of
from ..layouts import Observation, Pieces, assemble, differences, join, random_rows


@dataclass(frozen=True)
class Question:
    """Hold a model's folder, the layout to try, and the batch: ``samples`` x ``length`` random tokens.

    ``folder`` is a Hugging Face folder; the layout may be cut by hand with ``split``. ``device``: of every
    run, ``cpu`` or ``cuda``, where each rank has a GPU of its own. ``implementation``: as in a recipe.
    """

    folder: str
    layout: Layout = field(default_factory=Layout)
    split: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    samples: int = 4
    length: int = 32
    seed: int = 0
    device: str = "cpu"
    implementation: Implementation = "auto"

    def batch(self, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Return (input_ids, labels), both (samples, length) int64; ignored labels are spread unevenly."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "parity"))
        return random_rows(self.samples, self.length, config.vocab_size, generator)


@dataclass(frozen=True)
class Difference:
    """State how far a tensor is from the reference, relative to the reference's largest element."""

    kind: str
    name: str
    relative: float


@dataclass(frozen=True)
class Comparison:
    """Hold the differences of every output, the loss and every gradient, and the ``tolerance`` for each."""

    what: str
    tolerance: float
    differences: list[Difference]

    @property
    def first(self) -> Difference | None:
        """Return the first difference beyond the tolerance, in the order of computation; NaN differs."""
        return next((gap for gap in self.differences if not gap.relative <= self.tolerance), None)

    def worst(self, kind: str) -> Difference:
        """Return the largest difference of the outputs, the loss or the gradients."""
        return max((gap for gap in self.differences if gap.kind == kind), key=lambda gap: gap.relative)


def compare(reference: Observation, other: Observation, tolerance: float, what: str = "") -> Comparison:
    """Compare one step's loss, outputs and gradients. The pieces of ``reference`` hold all of each."""
    return Comparison(what, tolerance, [*_differences(reference, other)])


def _differences(reference: Observation, other: Observation) -> Iterator[Difference]:
    """Yield differences: of outputs in the order of computation, of the loss, of gradients in reverse.

    So the first large one is where things go wrong.
    """
    for name, parts in reference.outputs.items():
        if name in other.outputs:
            pieces: list[Pieces] = [{name: (box, True, part)} for box, part in other.outputs[name]]
            yield from (Difference("output", *gap) for gap in differences({name: join(parts)}, pieces))
    wanted, loss = reference.losses[0], other.losses[0]
    yield Difference("loss", "the step", abs(wanted - loss) / max(abs(wanted), 1e-300))
    gradients = differences(assemble([reference.gradients]), [other.gradients])
    yield from (Difference("gradient", *gap) for gap in gradients)
