"""Give each step of a run this rank's batch, whose micro-batches are made one by one, ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..parallel_state import ParallelState
from .batch import Batch, BatchParts
from .batches import GlobalBatches
from .prefetch import Prefetch
from .shuffle import piece_of


class MicroBatches:
    """Read rows for the next micro-batch only: a step begins at once, whatever its number of rows.

    A pipeline's schedule takes all micro-batches at once: there the rank's rows are one batch. Each part is
    checked on the host, before it is copied to a device that could only stop with an id beyond
    ``vocab_size``.
    """

    def __init__(
        self, batches: GlobalBatches, state: ParallelState, *, micro_batch: int, vocab_size: int
    ) -> None:
        self._batches, self._state, self._vocab_size = batches, state, vocab_size
        self._rows = piece_of(batches.global_batch, state.data_index, state.layout.data)
        size = len(self._rows) if state.layout.pipeline > 1 else micro_batch
        self._size, self._parts = size, len(self._rows) // size

    @contextmanager
    def running(self, start: int, stop: int, *, ahead: int) -> Iterator[Callable[[int], Batch | BatchParts]]:
        """Give the function that returns the batch of each step from ``start`` to ``stop - 1``, in order.

        While a step computes, threads make up to ``ahead`` of the next micro-batches, and count the labels of
        as many steps; with 0 there is no thread.
        """
        count, device = self._parts, self._state.device
        with (
            Prefetch(self._part, start * count, stop * count, ahead=ahead, device=device) as part_of,
            Prefetch(self._labels, start, stop, ahead=ahead, device=device) as labels_of,
        ):
            yield lambda step: self._batch(step, labels_of(step), part_of)

    def batch(self, step: int) -> Batch | BatchParts:
        """Return the batch of any step, whose parts are made by the caller's thread."""
        return self._batch(step, self._labels(step), self._part)

    def _batch(self, step: int, labels: int, part_of: Callable[[int], Batch]) -> Batch | BatchParts:
        if self._state.layout.pipeline > 1:
            return part_of(step)
        numbers = range(step * self._parts, (step + 1) * self._parts)
        return BatchParts(
            len(self._rows), self._batches.sequence_length, labels, (part_of(number) for number in numbers)
        )

    def _labels(self, step: int) -> int:
        return self._batches.count_labels(step, self._rows)

    def _part(self, number: int) -> Batch:
        """Return a micro-batch; they are numbered from the first of step 0."""
        step, part = divmod(number, self._parts)
        begin = self._rows.start + part * self._size
        rows = self._batches.rows(step, range(begin, begin + self._size))
        return rows.check_ids(self._vocab_size)
