"""Count the bytes of live tensors, now and at the worst moment: to the byte, on any device.

Memory that an operator uses only while it runs is not seen. What it leaves behind is seen, also if only
autograd holds it.
"""

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..parallel_state.engine import UncompiledMode, local_data
from .tensors import tensors_in


class LiveBytes(UncompiledMode):
    """Count the bytes of the storages that operators make while this context is entered, and of those given
    at first.

    ``LiveBytes(model.parameters())`` counts the parameters too. ``now``: the bytes alive. ``peak``: the most
    bytes after any operator. A storage that was emptied (FSDP's) counts as empty, and so does one on the meta
    device, which has no memory.
    """

    def __init__(self, *first: Any) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._most: dict[int, int] = {}  # the most bytes that each of them has had
        self._sum = 0  # of these
        self._note(_storages([list(part) if isinstance(part, Iterator) else part for part in first]))
        self.peak = self.now

    @property
    def now(self) -> int:
        # Loop over a copy: another thread may drop a storage meanwhile, which removes it from the dict.
        alive = [storage for known in tuple(self._storages.values()) if (storage := known()) is not None]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {id(storage): storage for storage in _storages((args, kwargs) if kwargs else args)}
        out = func(*args, **(kwargs or {}))
        # A view of what is not counted is not counted either.
        self._note([storage for storage in _storages(out) if id(storage) not in known])
        for key, storage in known.items():
            most = self._most.get(key)
            if most is not None and (size := storage.nbytes()) > most:
                self._most[key] = size
                self._sum += size - most
        if self._sum > self.peak:  # or there are no more: asking each is slow
            self.peak = max(self.peak, self.now)
        return out

    def _note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            key, size = id(storage), storage.nbytes()
            self._storages[key] = weakref.ref(storage, partial(self._forget, key))
            self._sum += size - self._most.get(key, 0)
            self._most[key] = size

    def _forget(self, key: int, gone: object) -> None:
        """Forget a storage, in whichever thread drops it: nothing is called while the sum changes."""
        self._storages.pop(key, None)
        self._sum -= self._most.pop(key, 0)


def _storages(value: object) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dicts that have memory."""
    return [
        (local_data(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()
        for tensor in tensors_in(value)
        if tensor.device.type != "meta"
    ]
