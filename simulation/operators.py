"""Know operators: the FLOPs of a call, the bytes that it moves, and what a compiler makes one kernel of.

FLOPs are counted by torch's formulas, and some that torch lacks.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from torch import Tag
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .live_bytes import Part


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
