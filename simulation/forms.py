"""Call operators without numbers, and remember the forms of what they give."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parallel_state import engine
from .tensors import tensors_of

#: The forms of what an operator gives, by the operator and the forms of its arguments: of torch's tensors on
#: the "meta" device, and of its fake ones.
_FORMS: dict[object, Any] = {}


class _Form(NamedTuple):
    """Hold what a tensor is but its numbers. ``offset``: where it begins in its storage, if that is another
    tensor's.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0


class _Part(NamedTuple):
    """Hold what an operator gives: a form and the place of the argument whose storage it is, or a value."""

    form: _Form | None
    base: int | None = None
    value: Any = None


def remembered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator gives. Torch finds forms in Python, which takes long, so that they are
    remembered; of an operator that changes its first argument, that it may.

    On the "meta" device views are torch's own: they take no time there. Of fake tensors nothing is remembered
    where another mode is to see the operator, such as a second recorder.
    """
    mode = engine.fake_mode()
    kind = _kind(func)
    if kind is None or (kind == "view" if mode is None else engine.other_modes()):
        return func(*args, **kwargs)
    form = _form if mode is None else _fake_form
    try:
        named = [(name, form(value)) for name, value in kwargs.items()]
        key = mode is None, torch.get_default_dtype(), func, *map(form, args), *named
        known = _FORMS.get(key)
    except TypeError:  # an argument that has no hash
        return func(*args, **kwargs)
    if known is None:
        out = func(*args, **kwargs)
        if (known := _known(kind, args, out, mode)) is not None:
            _FORMS[key] = known
        return out
    if kind == "changes":
        return args[0]
    several, parts = known
    made = tuple(_make(part, args, mode) for part in parts)
    return several(made) if several else made[0]


def _make(part: _Part, args: Sequence[Any], mode: Any) -> Any:
    if part.form is None:
        return part.value
    shape, stride, dtype, device, offset = part.form
    if mode is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    from ..parallel_state.engine.fake_tensors import make_fake

    base = None if part.base is None else args[part.base]
    return make_fake(mode, shape, stride, dtype, device, base=base, offset=offset)


def _known(kind: str, args: Sequence[Any], out: Any, mode: Any) -> tuple[Any, Sequence[_Part]] | None:
    """Return what is remembered of an operator that has given ``out``, if it may be."""
    if kind == "changes":
        return (None, ()) if _is_own(args[0], mode) else None
    several = type(out) if isinstance(out, tuple | list) else None
    places = {
        value.untyped_storage()._cdata: place for place, value in enumerate(args) if isinstance(value, Tensor)
    }
    known = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
    parts = []
    for x in out if several else (out,):
        if not isinstance(x, Tensor):
            parts.append(_Part(None, value=x))
            continue
        if not _is_own(x, mode):
            return None
        storage = x.untyped_storage()
        form, base = _Form(x.shape, x.stride(), x.dtype, x.device, int(x.storage_offset())), None
        if storage._cdata in known:
            if mode is None or (base := places.get(storage._cdata)) is None:
                return None
        elif storage.nbytes() != _bytes(form):
            return None
        else:
            known.add(storage._cdata)
        parts.append(_Part(form, base))
    return several, parts


def _is_own(x: Any, mode: Any) -> bool:
    """Return whether a tensor is one of the kind that is made here, without a number that torch knows."""
    return (type(x) is Tensor and x.is_meta) if mode is None else getattr(x, "constant", x) is None


def _bytes(form: _Form) -> int:
    """Return the bytes of the storage that a new tensor of this form has."""
    if form.offset:
        return -1
    last = sum((size - 1) * step for size, step in zip(form.shape, form.stride, strict=True))
    return (0 not in form.shape) * (last + 1) * form.dtype.itemsize


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Form(value.shape, value.stride(), value.dtype, value.device)
    return tuple(map(_form, value)) if isinstance(value, list) else (type(value), value)


def _fake_form(value: Any) -> Any:
    if isinstance(value, Tensor):
        if getattr(value, "constant", value) is not None:
            raise TypeError("a tensor whose number torch knows")
        return value.shape, value.stride(), value.dtype, value.device, value.storage_offset()
    return tuple(map(_fake_form, value)) if isinstance(value, list) else (type(value), value)


@lru_cache(maxsize=4096)
def _kind(func: Any) -> str | None:
    """Return ``changes`` for an operator that writes over its first argument, number by number, and gives it
    back; ``new`` for one that changes none of its arguments, and gives no view of one; ``view`` for one that
    only gives views.
    """
    schema = func._schema
    if torch.Tag.pointwise in func.tags and schema.name.endswith("_"):
        return "changes"
    if func.is_view:
        return "view"
    new = not schema.is_mutable and all(
        result.alias_info is None and "[]" not in str(result.type) for result in schema.returns
    )
    return "new" if new else None
