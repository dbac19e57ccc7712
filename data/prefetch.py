"""Make what coming steps need, such as their micro-batches, in a thread while a step computes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar, cast

import torch

from ..parallel_state.engine import accelerator
from .batch import Batch

Made = TypeVar("Made")


class Prefetch(Generic[Made]):
    """Return ``make(number)`` for ``prefetch(number)``: numbers from ``start`` to ``stop - 1`` in this order.

    While the caller computes, a thread makes up to ``ahead`` of the next; with 0 there is no thread. What is
    made is a function of its number alone, so it is the same either way. An error of ``make`` reaches the
    caller at its own number. Leaving the context ends the thread. For a GPU a batch lies in pinned memory, so
    that the copy does not wait.
    """

    def __init__(
        self, make: Callable[[int], Made], start: int, stop: int, *, ahead: int, device: torch.device
    ) -> None:
        self._make, self._numbers, self._ahead, self._device = make, iter(range(start, stop)), ahead, device
        self._coming: deque[tuple[int, Future[Made]]] = deque()
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=self._begin) if ahead else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def __call__(self, number: int) -> Made:
        if self._thread is None:
            return self._made(number)
        # One more than it holds in the end: the one to give now.
        while len(self._coming) <= self._ahead and (coming := next(self._numbers, None)) is not None:
            self._coming.append((coming, self._thread.submit(self._made, coming)))
        made, result = self._coming.popleft()
        assert made == number, (made, number)
        return result.result()

    def _made(self, number: int) -> Made:
        made = self._make(number)
        if not accelerator.copies_from_pinned(self._device):
            return made
        if isinstance(made, Batch):
            return cast(Made, made.pinned())
        if isinstance(made, dict):
            return cast(Made, {name: sample.pin_memory() for name, sample in made.items()})
        return made

    def _begin(self) -> None:
        module = accelerator.module_of(self._device)
        if module is not None:  # or pinning would open a context on the first GPU, of every rank
            module.set_device(self._device)
