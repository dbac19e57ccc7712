"""Count samples, cut them into pieces, and hand each rank its own: tensors by name, a sample in each row."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..parallel_state import BadInput, ParallelState, alone_or

#: Tensors by name, each with the samples on dim 0.
Samples = Mapping[str, Tensor]


def count_samples(samples: Samples) -> int:
    """Return the number of samples; ``BadInput`` if there are none, or if tensors differ in this number."""
    for name, sample in samples.items():
        if not isinstance(sample, Tensor) or not sample.ndim:
            found = "a tensor without dims" if isinstance(sample, Tensor) else type(sample).__name__
            raise BadInput(
                "batch", name, expected="a tensor with the samples on dim 0", found=found,
                todo="Give it a row for each sample; one value for all belongs to the model or the loss",
            )  # fmt: skip
    counts = {name: len(sample) for name, sample in samples.items()}
    if len(set(counts.values())) != 1:
        raise BadInput(
            "batch", expected="tensors with the same number of samples on dim 0", found=counts or "none"
        )
    if not (count := next(iter(counts.values()))):
        raise BadInput("batch", "samples", expected="at least one", found=count)
    return count


def some_samples(samples: Samples, start: int, count: int) -> dict[str, Tensor]:
    """Return ``count`` samples from number ``start`` on, or as many as are left."""
    return {name: sample[start : start + count] for name, sample in samples.items()}


def shard_batch(samples: Samples, state: ParallelState | None = None) -> dict[str, Tensor]:
    """Return this data rank's equal piece of a whole batch; raise ``BadInput`` if it cannot be cut evenly."""
    state = alone_or(state)
    count, data = count_samples(samples), state.layout.data
    if count % data:
        raise BadInput("batch", "samples", expected=f"a multiple of data={data}", found=count)
    return some_samples(samples, state.data_index * (count // data), count // data)
