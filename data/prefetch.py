"""Make the batches of coming steps in a thread while a step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from ..parallel_state.engine import accelerator
from .batch import Batch


class Prefetch:
    """Return ``make(step)`` for ``prefetch(step)``, for steps from ``start`` to ``stop - 1`` in this order.

    While a step computes, a thread makes up to ``ahead`` of the next batches; with 0 there is no thread. A
    batch is a function of its step alone, so the numbers are the same either way. An error of ``make``
    reaches the caller at its own step. Leaving the context ends the thread. On a GPU the batches lie in
    pinned memory, so that the copy does not wait.
    """

    def __init__(
        self, make: Callable[[int], Batch], start: int, stop: int, *, ahead: int, device: torch.device
    ) -> None:
        self._make, self._steps, self._ahead, self._device = make, iter(range(start, stop)), ahead, device
        self._coming: deque[tuple[int, Future[Batch]]] = deque()
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=self._begin) if ahead else None
        )

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def __call__(self, step: int) -> Batch:
        if self._thread is None:
            return self._make(step)
        # One more than it holds in the end: the one to give now.
        while len(self._coming) <= self._ahead and (coming := next(self._steps, None)) is not None:
            self._coming.append((coming, self._thread.submit(self._made, coming)))
        made, batch = self._coming.popleft()
        assert made == step, (made, step)
        return batch.result()

    def _made(self, step: int) -> Batch:
        batch = self._make(step)
        return batch.pinned() if accelerator.copies_from_pinned(self._device) else batch

    def _begin(self) -> None:
        module = accelerator.module_of(self._device)
        if module is not None:  # or pinning would open a context on the first GPU, of every rank
            module.set_device(self._device)
