"""Make the batches of a global step: the same samples in the same order for any number of data ranks.

The only position is the step. Everything else follows from (seed, step) and the token files. A rank's
micro-batches are made one by one, ahead in a thread.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..layers import IGNORE
from ..parallel_state import BadInput, ParallelState
from ..parallel_state.engine import accelerator, map_tensors
from .batch import Batch, BatchParts
from .rows import Documents, Overlong, SampleRows, Samples, WindowRows, rows_of
from .sample_order import Interleave, SampleOrder, piece_of
from .token_file import TokenFile

Made = TypeVar("Made")
#: Rows whose labels are counted at once: a bound of memory.
_COUNTED_AT_ONCE = 2**16


class GlobalBatches(SampleOrder):
    """Make batches of ``global_batch`` rows of ``sequence_length`` tokens each.

    Running text gives windows, a chat set whole samples: see ``rows``. Several token files are drawn from by
    weight, which is positive and of any sum: any prefix holds each file's share of samples to within one. A
    file that runs out starts its next epoch, alone, in a new order. All files must come from one tokenizer.
    ``vocab_size`` is larger than every id.

    ``BadInput`` for a file that does not fill one window, or whose samples do not fit.
    """

    def __init__(
        self,
        tokens: TokenFile | Sequence[tuple[TokenFile, float]],
        sequence_length: int,
        global_batch: int,
        seed: int,
        *,
        documents: Documents = "joined",
        samples: Samples = "packed",
        overlong: Overlong = "refuse",
    ) -> None:
        mixture = [(tokens, 1.0)] if isinstance(tokens, TokenFile) else tokens
        interleave, self.files = Interleave([weight for _, weight in mixture]), [file for file, _ in mixture]
        for file in self.files[1:]:
            key, first, fingerprint = "tokenizer_fingerprint", self.files[0], file.index.tokenizer_fingerprint
            if fingerprint != first.index.tokenizer_fingerprint:
                expected = f"{first.index.tokenizer_fingerprint}, as of {first.path}"
                todo = "Tokenize all files of a mixture with one tokenizer"
                raise BadInput(file.paths.index, key, expected=expected, found=fingerprint, todo=todo)
        self.sequence_length, self.vocab_size = sequence_length, max(file.vocab_size for file in self.files)
        self._rows = [rows_of(file, sequence_length, documents, samples, overlong) for file in self.files]
        super().__init__(interleave, [len(rows) for rows in self._rows], global_batch, seed)

    @property
    def fingerprint(self) -> str:
        """Return what a manifest keeps: the files' fingerprints, how each makes its rows, and the shares."""
        return self._shared([rows.fingerprint for rows in self._rows])

    @property
    def packed(self) -> bool:
        """Return whether rows may hold several documents, which do not see each other."""
        return any(rows.separate for rows in self._rows)

    def shared(self, first: range | None = None) -> bool:
        """Tell whether some row, or one of these of the first step, holds several documents that do not see
        each other; reads the documents' starts alone.
        """
        if first is None:
            return any(rows.shared(np.arange(len(rows))) for rows in self._rows)
        return any(rows.shared(numbers) for rows, numbers in self._by_file(0, first))

    def separate_padding(self) -> None:
        """Let positions start again where padding does: else it counts in the length of the last sample."""
        for rows in self._rows:
            if isinstance(rows, SampleRows):
                rows.padding_separate = True

    def rows(self, step: int, rows: range) -> Batch:
        """Return these rows, which follow one another, of the global batch of ``step``; it reads no other.

        All int64 of shape ``[len(rows), sequence_length]``; ``positions`` unless every row is one run of
        joined text. ``BadInput`` for a token that is not below the file's ``vocab_size``.
        """
        sources, numbers = self.sample_ids(step, rows)
        shape = (len(numbers), self.sequence_length)
        ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        positions = np.broadcast_to(np.arange(self.sequence_length), shape).copy()
        for row, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True)):
            self._rows[source].fill(number, ids[row], labels[row], positions[row])
        # By the files and not by what this batch drew: all ranks and steps compute alike.
        packed_positions = torch.from_numpy(positions) if self.packed else None
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), packed_positions)

    def count_labels(self, step: int, rows: range) -> int:
        """Return how many labels count in ``rows(step, rows)``, without reading a token.

        Of a chat set the targets are read, which are a byte a token, once for each sample.
        """
        if not self.packed:
            return len(rows) * self.sequence_length
        return sum(of_file.count_labels(numbers) for of_file, numbers in self._by_file(step, rows))

    def _by_file(self, step: int, rows: range) -> Iterator[tuple[WindowRows | SampleRows, NDArray[np.int64]]]:
        """Yield the rows of a file, and the numbers among them of some rows of a step's batch."""
        for begin in range(rows.start, rows.stop, _COUNTED_AT_ONCE):
            chunk = range(begin, min(begin + _COUNTED_AT_ONCE, rows.stop))
            sources, numbers = self.sample_ids(step, chunk)
            for source in np.unique(sources).tolist():
                yield self._rows[source], numbers[sources == source]


@contextmanager
def prefetched(
    make: Callable[[int], Made], numbers: range, *, ahead: int, device: torch.device
) -> Iterator[Iterator[Made]]:
    """Give an iterator over ``make(number)`` for each of ``numbers``, in this order.

    While the caller computes, a thread makes up to ``ahead`` of the next; with 0 there is no thread. What is
    made is a function of its number alone, so it is the same either way. An error of ``make`` reaches the
    caller at its own number. Leaving the context ends the thread.
    """

    def begin() -> None:
        module = accelerator.module_of(device)
        if module is not None:  # or pinning would open a context on the first GPU, of every rank
            module.set_device(device)

    def in_turn(thread: ThreadPoolExecutor) -> Iterator[Made]:
        coming = deque[Future[Made]]()
        for number in numbers:
            coming.append(thread.submit(make, number))
            if len(coming) > ahead:  # one more than it holds in the end: the one to give now
                yield coming.popleft().result()
        yield from (future.result() for future in coming)

    if not ahead:
        yield map(make, numbers)
        return
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=begin)
    try:
        yield in_turn(thread)
    finally:
        thread.shutdown(cancel_futures=True)


class MicroBatches:
    """Read rows for the next micro-batch only: a step begins at once, whatever its number of rows.

    A pipeline's schedule takes all micro-batches at once: there the rank's rows are one batch. Each part is
    checked on the host, before it is copied to a device that could only stop with an id beyond
    ``vocab_size``. With ``named`` the rank's rows are tensors by name, for a loss that knows no ``Batch``.
    For a GPU a batch lies in pinned memory, so that the copy does not wait.
    """

    def __init__(
        self,
        batches: SampleOrder,
        state: ParallelState,
        *,
        micro_batch: int,
        vocab_size: int,
        named: bool = False,
    ) -> None:
        self._batches, self._state, self._vocab_size, self._named = batches, state, vocab_size, named
        self._rows = piece_of(batches.global_batch, state.data_index, state.layout.data)
        self._at_once = named or state.layout.pipeline > 1
        size = len(self._rows) if self._at_once else micro_batch
        self._size, self._parts = size, len(self._rows) // size

    @contextmanager
    def running(self, start: int, stop: int, *, ahead: int) -> Iterator[Iterator[Any]]:
        """Give an iterator over the batches of the steps from ``start`` to ``stop - 1``, in order.

        While a step computes, threads make up to ``ahead`` of the next micro-batches, and count the labels of
        as many steps; with 0 there is no thread.
        """
        numbers, device = range(start * self._parts, stop * self._parts), self._state.device
        with (
            prefetched(self._part, numbers, ahead=ahead, device=device) as parts,
            prefetched(self._labels, range(start, stop), ahead=ahead, device=device) as labels,
        ):
            yield (self._batch(parts, labels) for _ in range(start, stop))

    def batch(self, step: int) -> Any:
        """Return the batch of any step, whose parts are made by the caller's thread."""
        return self._batch(map(self._part, itertools.count(step * self._parts)), map(self._labels, [step]))

    def _batch(self, parts: Iterator[Any], labels: Iterator[int]) -> Any:
        """Return the batch of the next step, whose parts are the next ones."""
        if self._at_once:
            return next(parts)
        coming = itertools.islice(parts, self._parts)
        return BatchParts(len(self._rows), next(labels), coming)

    def _labels(self, step: int) -> int:
        assert isinstance(self._batches, GlobalBatches)
        return self._batches.count_labels(step, self._rows)

    def _part(self, number: int) -> Batch | dict[str, Tensor]:
        """Return a micro-batch; they are numbered from the first of step 0."""
        step, part = divmod(number, self._parts)
        begin = self._rows.start + part * self._size
        rows = self._batches.rows(step, range(begin, begin + self._size))
        if isinstance(rows, Batch):
            rows = rows.check_ids(self._vocab_size)
            rows = rows.samples() if self._named else rows
        if accelerator.copies_from_pinned(self._state.device):
            rows = map_tensors(rows, Tensor.pin_memory)
        return rows
