"""Let operators of the simulated device be those that a CPU runs; for a GPU's see ``kernels.py``.

Torch composes some operators of others on a device that registers no kernel of its own, and asks in some for
a CPU by name. Here a kernel is registered for these, which C++ and the threads of autograd call too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")

#: What replaces a composite operator while it is entered; ``NotImplemented`` for what torch composes.
Replacements = Mapping[str, Callable[..., Any]]

#: One kernel on CPUs and GPUs, and several operators where a device registers none.
_WITH_KERNEL = ("silu_backward",)
#: Composite operators that may be replaced.
_REPLACEABLE = ("dropout", "scaled_dot_product_attention")
_ENTERED: list[Replacements] = []


def register() -> None:
    """Make the operators of the device replaceable; for good, as the device is."""
    for name in _WITH_KERNEL:
        _LIBRARY.impl(name, _unreached, "PrivateUse1")
    for name in _REPLACEABLE:
        _LIBRARY.impl(name, _choice(name), "AutogradPrivateUse1")


@contextmanager
def replaced(replacements: Replacements) -> Iterator[None]:
    """Let the device run these operators instead of its own meanwhile, in all threads."""
    _ENTERED.append(replacements)
    try:
        yield
    finally:
        _ENTERED.pop()


def _choice(name: str) -> Callable[..., Any]:
    composed = getattr(_aten, name).default

    def run(*args: Any, **kwargs: Any) -> Any:
        if _ENTERED and (instead := _ENTERED[-1].get(name)) is not None:
            made = instead(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return composed.decompose(*args, **kwargs)

    return run


def _unreached(*args: Any) -> Tensor:
    # The device answers before torch looks for this kernel, which stands for there being one.
    raise RuntimeError("a tensor of the simulated device outside SimulatedDevice")


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """Multiply by a mask in the dtype of ``x``: only GPUs have a fused kernel, whose mask are bytes."""
    if p in (0, 1) or not train or not x.numel():
        return NotImplemented
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def _attention_of_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """See ``use_flash_attention_cpp`` in ATen/native/transformers/sdp_utils_cpp.cpp."""
    if dropout_p or q.shape[-1] != v.shape[-1] or q.ndim != 4:
        return NotImplemented
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


CPU: Replacements = {"dropout": _dropout, "scaled_dot_product_attention": _attention_of_cpu}
