"""Count samples, cut them into pieces, and hand each rank its own: tensors by name, a sample in each row."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from ..layers import cut_sequence
from ..layers.host_numbers import change_alike
from ..parallel_state import ParallelState, alone_or, require
from ..pipeline.stages import Samples as Samples


def count_samples(samples: Samples) -> int:
    """Return the number of samples; ``BadInput`` if there are none, or if tensors differ in this number."""
    for name, sample in samples.items():
        kind = "a tensor without dims" if isinstance(sample, Tensor) else type(sample).__name__
        require(
            isinstance(sample, Tensor) and sample.ndim, "batch", name,
            "a tensor with the samples on dim 0", kind,
            "Give it a row for each sample; one value for all belongs to the model or the loss",
        )  # fmt: skip
    counts = {name: len(sample) for name, sample in samples.items()}
    expected = "tensors with the same number of samples on dim 0"
    require(len(set(counts.values())) == 1, "batch", None, expected, counts or "none")
    count = next(iter(counts.values()))
    require(count, "batch", "samples", "at least one", count)
    return count


def some_samples(samples: Samples, start: int, count: int) -> dict[str, Tensor]:
    """Return ``count`` samples from number ``start`` on, or as many as are left."""
    return {name: sample[start : start + count] for name, sample in samples.items()}


def shard_batch(samples: Samples, state: ParallelState | None = None) -> dict[str, Tensor]:
    """Return this data rank's equal piece of a whole batch; raise ``BadInput`` if it cannot be cut evenly."""
    state = alone_or(state)
    count, data = count_samples(samples), state.layout.data
    require(count % data == 0, "batch", "samples", f"a multiple of data={data}", count)
    return some_samples(samples, state.data_index * (count // data), count // data)


def cut_over_context(samples: Samples, dims: Mapping[str, int], state: ParallelState) -> dict[str, Tensor]:
    """Return this context rank's chunks of the samples that have a dim of the sequence, and others whole."""

    def cut(name: str, sample: Tensor) -> Tensor:
        if state.context.size == 1 or name not in dims:
            return sample
        return change_alike(lambda x: cut_sequence(x, state, dim=dims[name]), sample)

    return {name: cut(name, sample) for name, sample in samples.items()}


def rows_of_step(rows: Tensor, state: ParallelState) -> tuple[Tensor, slice]:
    """Return the rows of all data ranks, in their order, and which of them are this rank's.

    Collective over the data ranks.
    """
    first, rows = state.data_index * len(rows), rows.contiguous()
    own_rows = slice(first, first + len(rows))
    if state.layout.data == 1:
        return rows, own_rows
    everyone = rows.new_empty(state.layout.data * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(everyone, rows, group=state.data_group)
    return everyone, own_rows
