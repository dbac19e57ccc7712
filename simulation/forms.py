"""Remember the forms of what operators give: without numbers, finding them is most of an operator's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tensors import tensors_in

#: Classes of tensors of which operators make plain ones.
_PLAIN = frozenset(("Tensor", "Parameter", "FakeTensor"))


class Form(NamedTuple):
    """Hold what a tensor is but its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Forms:
    """Call operators on tensors of ``device``, a type such as "meta", that have no numbers.

    ``empty``: makes a tensor of a form. What an operator makes anew is made by that from the second time on,
    and what it writes into is given back without a call.
    """

    def __init__(self, device: str, empty: Callable[[Form], Tensor]) -> None:
        self._device, self._empty = device, empty
        self._known: dict[object, tuple[bool, tuple[Any, ...]]] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """Return what an operator gives; ``run``: calls it."""
        kind = _kind(func)
        if kind == "writes" and type(args[0]).__name__ in _PLAIN and args[0].device.type == self._device:
            return args[0]
        if kind != "makes":
            return run(func, *args, **kwargs)
        try:
            key = func, *map(_form, args), *((name, _form(value)) for name, value in kwargs.items())
            known = self._known.get(key)
        except TypeError:  # an argument that has no hash, or a tensor of another class
            return run(func, *args, **kwargs)
        if known is not None:
            several, forms = known
            made = tuple(self._empty(form) if isinstance(form, Form) else form for form in forms)
            return made if several else made[0]
        out = run(func, *args, **kwargs)
        made = out if (several := isinstance(out, tuple)) else (out,)
        if all(self._is_new(x, args) for x in made if isinstance(x, Tensor)):
            self._known[key] = several, tuple(_form(x) if isinstance(x, Tensor) else x for x in made)
        return out

    def _is_new(self, x: Tensor, args: Sequence[Any]) -> bool:
        """Tell whether a tensor is on the device and shares nothing, as an unsafe view does."""
        here = {given.untyped_storage()._cdata for given in tensors_in(args)}
        return x.device.type == self._device and x.untyped_storage()._cdata not in here


def empty_on_meta(form: Form) -> Tensor:
    """Return a tensor of a form on torch's "meta" device."""
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value).__name__ not in _PLAIN:
            raise TypeError(f"what {type(value).__name__} does is its own")
        return Form(value.shape, value.stride(), value.dtype, value.device)
    return tuple(map(_form, value)) if isinstance(value, list) else (type(value), value)


@lru_cache(maxsize=4096)
def _kind(func: Any) -> str:
    """Return whether an operator only makes new tensors, only writes into its first argument, or neither."""
    schema = func._schema
    if schema.is_mutable:
        name = func.name().split(".")[0]
        alone = len(schema.returns) == 1 and torch.Tag.pointwise in func.tags
        return "writes" if name.endswith("_") and alone else ""
    new = all(given.alias_info is None and "[]" not in str(given.type) for given in schema.returns)
    return "makes" if new else ""
