"""Count the FLOPs of an operator's call: torch's formulas, and some that torch lacks."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def flops_of_call(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of a call, 0 for an operator that multiplies no matrices."""
    formula = _MORE.get(name) or flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def multiplies(name: str, func: Any) -> bool:
    """Return whether an operator multiplies matrices."""
    return name in _MORE or func.overloadpacket in flop_registry


def is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is that of an attention that skips the scores that a causal mask hides."""
    place = _place_of_causal(func)
    return place is not None and bool(args[place] if place < len(args) else kwargs.get("is_causal"))


@lru_cache(maxsize=4096)
def _place_of_causal(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


def _attention(q: Any, k: Any, v: Any, *others: Any, **named: Any) -> int:
    return int(sdpa_flop_count(q.shape, _repeated(k, q), _repeated(v, q)))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *others: Any, **named: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, q.shape, _repeated(k, q), _repeated(v, q)))


def _repeated(x: Any, q: Any) -> tuple[int, ...]:
    """Return the shape of keys or values with a head for each query's; torch 2.11 counts no groups."""
    return (*q.shape[:2], *x.shape[2:])


def _grouped(a: Any, b: Any, *others: Any, out_val: Any, **named: Any) -> int:
    """Count each row once, whatever group it is in; where groups cut the inner dim, each column once."""
    return int(2 * prod(a.shape) * b.shape[-1])


def _product(total: Any, a: Any, b: Any, *others: Any, **named: Any) -> int:
    return int(2 * prod(a.shape) * b.shape[-1])


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_MORE: dict[str, Callable[..., int]] = {
    **{f"aten::_scaled_dot_product_{kernel}": _attention for kernel in _ATTENTION},
    **{f"aten::_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _ATTENTION},
    "aten::_grouped_mm": _grouped,
    "aten::addmm_": _product,
}
