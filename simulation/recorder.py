"""Note what operators without numbers make, keep, send and compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..parallel_state.engine import TorchDispatchMode
from ..parallel_state.process_groups import STAND_IN
from .flops import flops_of_call
from .record import Collective

#: When something runs: in the forward, when a backward computes the forward again, or in the backward.
Phase = Literal["forward", "again", "backward"]


@dataclass(frozen=True, slots=True)
class Operator:
    """State an operator that starts a kernel: its FLOPs (a multiplication and an addition are two) and the
    bytes that it reads and writes.

    ``weight``: whether it is a product with a matrix of weights; ``trained``: whether these are trained.
    """

    name: str
    phase: Phase
    flops: int
    moved: int
    weight: bool = False
    trained: bool = False


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


class Recorder(TorchDispatchMode):
    """Note each storage that operators make and when it goes, and what the operators do.

    ``now``: the bytes alive that were made while it was entered. ``weights``: those of parameters, by the ids
    of their storages, with whether they are trained. A number that the host reads is 0.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call this mode as it is: else it imports its compiler, and asks it at each operator."""
        return False

    def __init__(self, weights: dict[int, bool] | None = None, axes: dict[str, str] | None = None) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.at = self.now = 0
        self.collectives: list[Collective] = []
        self.operators: list[Operator] = []
        self._weights, self._axes = weights or {}, axes or {}
        #: After which operator a storage of this number came (+) or went (-), and its bytes.
        self._events: list[tuple[int, int, int]] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _NUMBER:
            return 0.0 if args[0].is_floating_point() else 0
        if func is _WAIT:  # the collective's own result; torch's form without numbers makes another
            return args[0]
        if func is _PLACES:  # where documents start: each row is one
            shape = args[0].shape
            return args[0].new_empty((shape[0] if len(shape) > 1 else 1, len(shape)), dtype=torch.int64)
        if func is _DEVICE:
            return func(*args, **kwargs)
        given = tensors_of((*args, *kwargs.values()))
        out = _call(func, args, kwargs)
        self.at += 1
        made = tensors_of((out,))
        here = {id(tensor.untyped_storage()) for tensor in given}
        for tensor in made:
            storage = tensor.untyped_storage()
            if (key := id(storage)) not in here and key not in self._alive:
                number, size = len(self._events), storage.nbytes()
                self.now += size
                self._events.append((self.at, number, size))
                self._alive[key] = number, weakref.ref(storage, partial(self._gone, key, number, size))
        self._count(func, args, kwargs, out, given, made)
        return out

    def _gone(self, key: int, number: int, size: int, gone: object) -> None:
        self._alive.pop(key, None)
        self.now -= size
        self._events.append((self.at, number, -size))

    def _count(
        self, func: Any, args: Any, kwargs: Any, out: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        name, kind = _named(func)
        phase: Phase = "again" if self.phase == "backward" and _FORWARDS else self.phase
        if kind is not None:
            group = next(word for word in reversed(args) if isinstance(word, str))
            axis = self._axes.get(group, group.removeprefix(STAND_IN))
            self.collectives.append(Collective(axis, kind, args[0].nbytes, phase))
        elif not func.is_view and name not in _NO_KERNEL:
            flops = flops_of_call(name, func, args, kwargs, out)
            trained = [self._weights.get(id(tensor.untyped_storage())) for tensor in given]
            weight = name in _PRODUCTS
            self.operators.append(
                Operator(
                    name,
                    phase,
                    flops,
                    sum(tensor.nbytes for tensor in (*given, *made)),
                    weight,
                    weight and False not in trained,
                )
            )

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, if it was made here."""
        known = self._alive.get(id(tensor.untyped_storage()))
        return None if known is None else known[0]

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
_WAIT, _DEVICE = torch.ops._c10d_functional.wait_tensor.default, torch.ops.prim.device.default
_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
        *("detach", "lift_fresh", "alias"),
    )
)
_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm"))
_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "exchange",
}


#: The forms of what an operator gives on the "meta" device, by the operator and the forms of its arguments.
_FORMS: dict[object, Any] = {}


class _Form(NamedTuple):
    """Hold what a tensor is but its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator gives. Torch finds some forms on the "meta" device in Python, which takes long,
    so that they are remembered.
    """
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        key = func, *map(_form, args), *((name, _form(value)) for name, value in kwargs.items())
        known = _FORMS.get(key)
    except TypeError:  # an argument that has no hash
        return func(*args, **kwargs)
    if known is not None:
        several, forms = known
        made = tuple(form.empty() if isinstance(form, _Form) else form for form in forms)
        return made if several else made[0]
    out = func(*args, **kwargs)
    made = out if (several := isinstance(out, tuple)) else (out,)
    here = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
    if all(
        type(x) is Tensor and x.is_meta and x.untyped_storage()._cdata not in here
        for x in made
        if isinstance(x, Tensor)
    ):
        _FORMS[key] = several, tuple(_form(x) if isinstance(x, Tensor) else x for x in made)
    return out


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Form(value.shape, value.stride(), value.dtype, value.device)
    return tuple(map(_form, value)) if isinstance(value, list) else (type(value), value)


@lru_cache(maxsize=4096)
def _makes_new(func: Any) -> bool:
    """Return whether an operator changes none of its arguments, and gives no view of one."""
    schema = func._schema
    return not schema.is_mutable and all(
        one.alias_info is None and "[]" not in str(one.type) for one in schema.returns
    )


@lru_cache(maxsize=4096)
def _named(func: Any) -> tuple[str, str | None]:
    """Return an operator's name, and its kind if it is a collective."""
    name = func.name().split(".")[0]
    space, _, short = name.partition("::")
    return name, _KINDS.get(short) if space == "_c10d_functional" else None


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples among these."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [inner for inner in value if isinstance(inner, Tensor)]
    return found
