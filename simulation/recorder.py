"""Note what operators without numbers make, keep, send and compute."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..parallel_state.engine import UncompiledMode
from ..parallel_state.process_groups import STAND_IN
from .asked_numbers import refuse_numbers
from .collectives import collective_of
from .flops import flops_of_call, is_causal, multiplies
from .forms import remembered
from .memory_traffic import Chain, fuses, moved_by, read_by
from .record import Collective
from .tensors import DEVICE, device_of, tensors_of

#: When something runs: in the forward, when a backward computes the forward again, or in the backward.
Phase = Literal["forward", "again", "backward"]


@dataclass(frozen=True, slots=True)
class Operator:
    """State an operator that starts a kernel: its FLOPs (a multiplication and an addition are two) and the
    bytes that it reads and writes.

    ``weight``: whether it is a product with a matrix of weights; ``trained``: whether these are trained;
    ``gradient``: whether a backward gets the gradient of a matrix of weights from it. ``causal``: whether it
    is attention that leaves out the half of the scores that a causal mask hides; the FLOPs count both halves.
    ``fused``: the bytes of the kernel that a compiler starts with it: what a chain of pointwise operators is
    given from outside, and what is there after it; ``None`` if it is part of the kernel before.
    """

    name: str
    phase: Phase
    flops: int
    moved: int
    weight: bool = False
    trained: bool = False
    gradient: bool = False
    causal: bool = False
    fused: int | None = 0


#: What a trace notes that something ran.
Step = Operator | Collective | str

#: The forwards that run now of modules that a backward may compute again.
_FORWARDS: list[object] = []


def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that tells recorders when it runs: in a backward, to compute something again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _FORWARDS.append(forward)
        try:
            return forward(*args, **kwargs)
        finally:
            _FORWARDS.pop()

    return run


class Recorder(UncompiledMode):
    """Note each storage that operators make and when it goes, and what the operators do.

    ``now``: the bytes alive that were made while it was entered. ``weights``: those of parameters, by the ids
    of their storages, with whether they are trained. A number that the host reads is 0.
    """

    def __init__(self, weights: dict[int, bool] | None = None, axes: dict[str, str] | None = None) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.at = self.now = 0
        self.collectives: list[Collective] = []
        #: The place of each operator that starts a kernel, each collective, and other operators' names.
        self._steps: list[int | Collective | str] = [""]
        #: Whether a weight is trained, by the numbers of casts of it.
        self._casts: dict[int, bool] = {}
        #: Fields of operators in order; the bytes of the last chain are added to its first one when it ends.
        self._operators: list[list[Any]] = []
        self._chain = Chain()
        self._weights, self._axes = weights or {}, axes or {}
        #: After which operator a storage of this number came (+) or went (-), and its bytes.
        self._events: list[tuple[int, int, int]] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        if func is _NUMBER or func is _PLACES:
            refuse_numbers(func.name())
        if func is _NUMBER:
            return 0.0 if args[0].is_floating_point() else 0
        if func is _WAIT:  # the collective's own result; torch's form without numbers makes another
            return args[0]
        if func is _PLACES:  # where documents start: each row is one
            shape = args[0].shape
            return args[0].new_empty((shape[0] if len(shape) > 1 else 1, len(shape)), dtype=torch.int64)
        read = tensors_of((*args, *kwargs.values()))
        out = remembered(func, args, kwargs)
        self.at += 1
        made = tensors_of((out,))
        here = {id(tensor.untyped_storage()) for tensor in read}
        for tensor in made:
            storage = tensor.untyped_storage()
            if (key := id(storage)) not in here and key not in self._alive:
                number, size = len(self._events), storage.nbytes()
                self.now += size
                self._events.append((self.at, number, size))
                self._alive[key] = number, weakref.ref(storage, partial(self._gone, key, number, size))
        self._count(func, args, kwargs, out, read, made)
        return out

    def _gone(self, key: int, number: int, size: int, gone: object) -> None:
        self._alive.pop(key, None)
        self.now -= size
        self._events.append((self.at, number, -size))

    def _count(
        self, func: Any, args: Any, kwargs: Any, out: Any, read: list[Tensor], made: list[Tensor]
    ) -> None:
        known = _known(func)
        name, phase = known.name, self.phase
        if _FORWARDS and phase == "backward":
            phase = "again"
        self._steps.append(name)
        if known.kind is not None:
            self.end_chain()
            group = next(word for word in reversed(args) if isinstance(word, str))
            axis = self._axes.get(group, group.removeprefix(STAND_IN))
            collective = Collective(axis, known.kind, args[0].nbytes, phase)
            self._steps[-1] = collective
            self.collectives.append(collective)
        elif known.starts:
            flops = flops_of_call(name, func, args, kwargs, out) if known.multiplies else 0
            trained = gradient = causal = False
            if known.multiplies:
                causal = is_causal(func, args, kwargs)
            if known.product:
                weights = [self._trained(tensor) for tensor in read]
                trained = False not in weights
                gradient = phase == "backward" and weights.count(None) == len(weights)
            elif name in _CASTING and (cast := self._trained(read[0])) is not None:
                self._casts[self._name(made[0])] = cast
            if not known.fuses or phase != self._chain.phase:
                self.end_chain()
            moved, chain = moved_by(name, read, made), self._chain
            if known.fuses:
                if not chain.made:
                    chain.first, chain.phase, chain.at = len(self._operators), phase, self.at
                self._read(chain, read_by(name, read, made))
                for tensor in made:
                    chain.made.add(self._name(tensor), tensor)
            fused = None if known.fuses and chain.first < len(self._operators) else moved
            fields = [name, phase, flops, moved, known.product, trained, gradient, causal, fused]
            self._steps[-1] = len(self._operators)
            self._operators.append(fields)

    def _trained(self, tensor: Tensor) -> bool | None:
        """Return whether a weight, or a cast of it, is trained; ``None`` for another tensor."""
        trained = self._weights.get(id(tensor.untyped_storage()))
        return self._casts.get(self._name(tensor)) if trained is None else trained

    def _name(self, tensor: Tensor) -> int:
        """Return what tells a storage from others: its number, or its id if it was there before."""
        known = self._alive.get(key := id(tensor.untyped_storage()))
        return key if known is None else known[0]

    def _read(self, chain: Chain, tensors: Iterable[Tensor]) -> None:
        """Note which of these come from outside a chain."""
        for tensor in tensors:
            name = self._name(tensor)
            inside = name < len(self._events) and self._events[name][0] >= chain.at
            if not (inside or chain.made.holds(name, tensor)):
                chain.given.add(name, tensor)

    def end_chain(self) -> None:
        """Note what the last chain of pointwise operators moves, if a compiler makes one kernel of it."""
        chain = self._chain
        if chain.made:
            alive, numbers = {number for number, _ in self._alive.values()}, range(len(self._events))
            written = chain.made.total(lambda name: name in alive or name not in numbers)
            self._operators[chain.first][-1] = chain.given.total() + written
            self._chain = Chain()

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Return the operators that started a kernel, in order."""
        self.end_chain()
        return tuple(Operator(*fields) for fields in self._operators)

    def steps(self, operators: Sequence[Operator]) -> list[Step]:
        """Return each operator of ``operators``, each collective, and the names of what is neither, in order;
        first of all nothing.
        """
        return [operators[step] if isinstance(step, int) else step for step in self._steps]

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, if it was made here."""
        known = self._alive.get(id(tensor.untyped_storage()))
        return None if known is None else known[0]

    def alive(self, number: int | None) -> int:
        """Return the bytes of the storage of this number, while it is alive."""
        numbers = {number for number, _ in self._alive.values()}
        return self._events[number][2] if number is not None and number in numbers else 0

    def alive_since(self, start: int) -> int:
        """Return the bytes alive that the operators from ``start`` on made."""
        numbers = (number for number, _ in self._alive.values())
        return sum(self._events[number][2] for number in numbers if self.born(number) >= start)

    def born(self, number: int) -> int:
        """Return after which operator the storage of this number came."""
        return self._events[number][0]

    def bytes(self, start: int, end: int, leaving_out: frozenset[int] = frozenset()) -> list[int]:
        """Return the bytes after each operator from ``start`` to ``end``, but for some storages."""
        change = [0] * (end + 2)
        for at, number, size in self._events:
            if number not in leaving_out and at <= end:
                change[at + (size < 0)] += size  # what goes after an operator was there with it
        return [*accumulate(change)][start : end + 1]


_PLACES = torch.ops.aten.nonzero.default
_NUMBER = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
        *("detach", "lift_fresh", "alias", "_unsafe_view", "promote_types"),
    )
)
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "addmm_", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
)
#: What keeps a weight's numbers, but for their precision and a scale.
_CASTING = frozenset(("aten::_to_copy", "aten::mul", "aten::clone"))


class _Known(NamedTuple):
    """Hold what is known of an operator before it is called.

    ``kind``: if it is a collective. ``starts``: whether it starts a kernel; ``fuses``: whether a compiler
    makes it part of another. ``product``: whether one of its matrices may be weights.
    """

    name: str
    kind: str | None
    starts: bool
    fuses: bool
    multiplies: bool
    product: bool


@lru_cache(maxsize=4096)
def _known(func: Any) -> _Known:
    name, kind, _ = collective_of(func)
    kind = kind if func.namespace == "_c10d_functional" else None
    starts = not func.is_view and name not in _NO_KERNEL
    return _Known(name, kind, starts, fuses(name, func), multiplies(name, func), name in _PRODUCTS)
