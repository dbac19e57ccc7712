"""Call operators without numbers, and remember the forms of what they give."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parallel_state import engine
from ..parallel_state.engine.autograd_and_compiler import fake_mode, other_modes
from .live_bytes import device_of
from .operators import facts_of

#: The forms of what an operator gives, by the operator and the forms of its arguments: of torch's tensors on
#: the "meta" device, and of its fake ones.
_FORMS: dict[object, Any] = {}


class _Form(NamedTuple):
    """Hold what a tensor is but its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def remembered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: Any = None) -> Any:
    """Return what an operator gives. Torch finds forms in Python, which takes long, so that they are
    remembered; of an operator that changes its first argument, that it may. Views take torch no time.

    ``fakes``: torch's mode of fake tensors to compute in, instead of the one that is entered. Of fake tensors
    nothing is remembered where another mode is to see the operator, such as a second recorder.
    """
    mode: Any = fakes or fake_mode()
    kind = facts_of(func).gives
    if kind is None or (kind == "view" if mode is None else other_modes()):
        return _call(func, args, kwargs, fakes)
    if mode is not None and not all(
        _is_own(tensor, mode) for tensor in engine.tensors_in((*args, *kwargs.values()))
    ):
        return _call(func, args, kwargs, fakes)
    if kind == "view":
        from ..parallel_state.engine.fake_tensors import view_of_fake

        return view_of_fake(mode, func, args, kwargs)
    try:
        named = [(name, _form(value)) for name, value in kwargs.items()]
        key = mode is None, torch.get_default_dtype(), func, *map(_form, args), *named
        form_of_output = _FORMS.get(key)
    except TypeError:  # an argument that has no hash
        return _call(func, args, kwargs, fakes)
    if form_of_output is None:
        out = _call(func, args, kwargs, fakes)
        if (form_of_output := _known(kind, args, out, mode)) is not None:
            _FORMS[key] = form_of_output
        return out
    if kind == "changes":
        return args[0]
    several, parts = form_of_output
    outputs = tuple(_make(part, mode) for part in parts)
    return several(outputs) if several else outputs[0]


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: Any) -> Any:
    with nullcontext() if fakes is None else fakes:
        if facts_of(func).name == "aten::_grouped_mm" and (dtype := args[0].dtype) != torch.bfloat16:
            # Its form without numbers knows no other dtype. In fp64 a run takes another operator.
            halves = (matrices.to(torch.bfloat16) for matrices in args[:2])
            return func(*halves, *args[2:], **kwargs).to(dtype)
        return func(*args, **kwargs)


def _make(part: _Form | float | None, mode: Any) -> Any:
    if not isinstance(part, _Form):
        return part
    shape, stride, dtype, device = part
    if mode is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    from ..parallel_state.engine.fake_tensors import make_fake

    return make_fake(mode, shape, stride, dtype, device)


def _known(kind: str, args: Sequence[Any], out: Any, mode: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return what is remembered of an operator that has given ``out``, forms and numbers, if it may be."""
    if kind == "changes":
        return (None, ()) if _is_own(args[0], mode) else None
    several = type(out) if isinstance(out, tuple | list) else None
    storages = {tensor.untyped_storage()._cdata for tensor in engine.tensors_in(args)}
    parts = list[_Form | float | None]()
    for x in out if several else (out,):
        if x is None or isinstance(x, int | float):
            parts.append(x)
            continue
        if not (isinstance(x, Tensor) and _is_own(x, mode)):
            return None
        storage, form = x.untyped_storage(), _Form(x.shape, x.stride(), x.dtype, device_of(x))
        if storage._cdata in storages or storage.nbytes() != _bytes(form):
            return None
        storages.add(storage._cdata)
        parts.append(form)
    return several, parts


def _is_own(x: Any, mode: Any) -> bool:
    """Return whether a tensor is one of the kind that is made here, without a number that torch knows."""
    return (type(x) is Tensor and x.is_meta) if mode is None else getattr(x, "constant", x) is None


def _bytes(form: _Form) -> int:
    """Return the bytes of the storage that a new tensor of this form has."""
    last = sum((size - 1) * step for size, step in zip(form.shape, form.stride, strict=True))
    return (0 not in form.shape) * (last + 1) * form.dtype.itemsize


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Form(value.shape, value.stride(), value.dtype, device_of(value))
    return tuple(map(_form, value)) if isinstance(value, list) else (type(value), value)
