"""Know operators: the FLOPs of a call, the bytes that it moves, what a compiler makes one kernel of; and
call them without numbers, remembering the forms of what they give.

FLOPs are counted by torch's formulas, and some that torch lacks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tag, Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..parallel_state import engine
from ..parallel_state.engine.autograd_and_compiler import fake_mode, other_modes
from .live_bytes import Part, device_of


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


_GATHERING = _aten("embedding", "gather", "index", "index_select")
_SCATTERING = _aten(
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_copy_"),
    *("index_put", "index_put_", "_index_put_impl_"),
)
#: Whose first argument is written and not read.
_OVERWRITING = _aten("copy_", "fill_", "zero_", "bernoulli_")
#: Of whose first argument the form alone is read.
_LIKE = _aten(*("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like"))
#: What no compiler fuses with operators around it, beside what multiplies matrices, and scatters.
_ALONE = _aten(
    *("sort", "argsort", "topk", "bincount", "histc", "cumsum", "cumprod", "nonzero", "multinomial"),
    *("embedding_dense_backward", "searchsorted", "repeat_interleave"),
)
_NO_KERNEL = _aten(
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("detach", "lift_fresh", "alias", "_unsafe_view", "promote_types"),
)
_PRODUCTS = _aten("mm", "addmm", "addmm_", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
#: The kinds of collectives, by the operators of torch that start them.
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
    "all_to_all_single": "exchange",
}
#: What keeps a weight's numbers, but for their precision and a scale.
_CASTING = _aten("_to_copy", "mul", "clone")


class Facts(NamedTuple):
    """Hold what is known of an operator before it is called.

    ``gives``: ``changes`` for one that writes over its first argument, number by number, and gives it back;
    ``new`` for one that changes none of its arguments, and gives no view of one; ``view`` for one that only
    gives views. ``sends``: its kind, if it is a collective, and ``sent`` the place of the argument that it
    sends. ``starts``: whether it starts a kernel; ``fuses``: whether a compiler fuses it with others:
    pointwise ones, reductions, gathers. ``formula``: counts the FLOPs of what multiplies matrices.
    ``product``: whether one of its matrices may be weights; ``casts``: whether it may give a weight in
    another precision. ``causal``: the place of the argument that says so of attention.
    """

    name: str
    gives: Literal["changes", "new", "view"] | None
    sends: str | None
    sent: int
    starts: bool
    fuses: bool
    formula: Callable[..., int] | None
    product: bool
    casts: bool
    causal: int | None

    def flops(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Return the FLOPs of a call, 0 for an operator that multiplies no matrices."""
        return 0 if self.formula is None else int(self.formula(*args, **kwargs, out_val=out))

    def is_causal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call is that of attention which skips the scores that a causal mask hides."""
        place = self.causal
        return place is not None and bool(args[place] if place < len(args) else kwargs.get("is_causal"))

    def read(self, inputs: list[Part], made: list[Part]) -> list[Part]:
        """Return parts as large as what a call reads, of those that it is given."""
        if self.name in _GATHERING:  # of the first one as much as it gives
            return [*inputs[1:], *made]
        return inputs[1:] if self.name in _OVERWRITING | _LIKE else inputs

    def moved(self, inputs: list[Part], made: list[Part]) -> int:
        """Return the bytes that a call reads and writes."""
        if self.name in _SCATTERING:  # of the first tensor what the indices name
            return 3 * sum(part.size for part in inputs[1:])
        return sum(part.size for part in (*self.read(inputs, made), *made))


@lru_cache(maxsize=4096)  # asked for every operator that runs
def facts_of(func: Any) -> Facts:
    """Return what is known of an operator."""
    name, schema = func.name().split(".")[0], func._schema
    space, _, short = name.partition("::")
    sends = "c10d" in space and not short.startswith(("wait", "recv", "barrier"))
    gives: Literal["changes", "new", "view"] | None = None
    formula = _FORMULAS.get(name) or flop_registry.get(func.overloadpacket)
    alone = formula is not None or name in _ALONE or name in _SCATTERING
    arguments = [argument.name for argument in schema.arguments]
    if Tag.pointwise in func.tags and name.endswith("_"):
        gives = "changes"
    elif func.is_view or name == "aten::_unsafe_view":
        gives = "view"
    elif not schema.is_mutable and all(
        x.alias_info is None and "[]" not in str(x.type) for x in schema.returns
    ):
        gives = "new"
    return Facts(
        name,
        gives,
        sends=_COLLECTIVES.get(short, short) if sends else None,
        sent=int(short.endswith("base_")),
        starts=not func.is_view and name not in _NO_KERNEL,
        fuses=name.startswith("aten::") and not alone,
        formula=formula,
        product=name in _PRODUCTS,
        casts=name in _CASTING,
        causal=arguments.index("is_causal") if "is_causal" in arguments else None,
    )


def _attention(q: Any, k: Any, v: Any, *others: Any, **named: Any) -> int:
    return int(sdpa_flop_count(q.shape, _repeated(k, q), _repeated(v, q)))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *others: Any, **named: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, q.shape, _repeated(k, q), _repeated(v, q)))


def _repeated(x: Any, q: Any) -> tuple[int, ...]:
    """Return the shape of keys or values with a head for each query's; torch 2.11 counts no groups."""
    return (*q.shape[:2], *x.shape[2:])


def _product(a: Any, b: Any, *others: Any, **named: Any) -> int:
    """Count each row once, whatever group it is in; where groups cut the inner dim, each column once."""
    return int(2 * prod(a.shape) * b.shape[-1])


def _added_product(total: Any, a: Any, b: Any, **named: Any) -> int:
    return _product(a, b)


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_FORMULAS: dict[str, Callable[..., int]] = {
    **{f"aten::_scaled_dot_product_{kernel}": _attention for kernel in _ATTENTION},
    **{f"aten::_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _ATTENTION},
    # Torch's formulas of plain products look for tensors in all arguments, which takes longer.
    **dict.fromkeys(("aten::_grouped_mm", "aten::mm", "aten::bmm"), _product),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::baddbmm"), _added_product),
}


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
