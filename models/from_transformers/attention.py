"""Compute the attention of transformers' code by ours: kernels, packed documents, context ranks, caches.

The mask that its code carries to every attention call is a tensor without memory, which has the inputs of
this forward as an attribute. So recomputation finds its own inputs, and whatever else would read the mask
fails. B batch  S sequence  H heads here  K key/value heads here  E head dim
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import AttentionInputs, causal_attention
from ...parallel_state import BadInput
from ..base.keys import names

#: Under this name transformers' code finds our attention.
ATTENTION = "trilith"

#: Keywords of attention calls that say nothing that ours must know.
_SILENT = names("""
    is_causal position_ids use_cache output_attentions past_key_values cache_position output_router_logits
    logits_to_keep return_dict
""")


def carrier(inputs: AttentionInputs, rows: int) -> Tensor:
    """Return the mask to give to transformers' code: four dims, so that it is passed on as it is."""
    mask = torch.empty((rows, 1, 1, 1), dtype=torch.bool, device="meta")
    vars(mask)["trilith"] = inputs
    return mask


def attention(
    module: nn.Module,
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute one attention call of transformers' code; it wants (B, S, H, E)."""
    inputs = getattr(attention_mask, "trilith", None)
    if inputs is None:
        raise BadInput(
            type(module).__name__, "attention_mask", expected="that of this forward", found="another"
        )
    if strange := unknown(rest):
        expected = "no keyword that trilith's attention does not know"
        raise BadInput(type(module).__name__, strange, expected=expected, found="one")
    scope = inputs.scope(sliding_window)
    k_BKSE, v_BKSE = scope.extend(module, k_BKSE, v_BKSE)
    out_BHSE = causal_attention(
        q_BHSE, k_BKSE, v_BKSE, scope,
        dropout=dropout, scale=scaling, soft_cap=softcap, sinks=s_aux,
        backend=vars(module).get("trilith_backend", "auto"),
    )  # fmt: skip
    return out_BHSE.transpose(1, 2).contiguous(), None


_KNOWN = _SILENT | signature(attention).parameters.keys()


def unknown(named: dict[str, Any]) -> str:
    """Return the first keyword with a value that our attention does not compute with."""
    return next((name for name in sorted(named.keys() - _KNOWN) if named[name] is not None), "")


@contextmanager
def watched(problems: list[str]) -> Iterator[None]:
    """Let attention calls note why ours would compute otherwise, or an empty text, instead of computing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    callers = set[nn.Module]()

    def note(
        module: nn.Module,
        q_BHSE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        attention_mask: Any,
        **named: Any,
    ) -> tuple[Tensor, None]:
        name, shows = type(module).__name__, getattr(attention_mask, "trilith", None)
        if strange := unknown(named) or ("a second set of keys" if module in callers else ""):
            problems.append(f"{name} gives attention {strange}")
        elif shows is None:
            problems.append(f"{name} calls attention without a mask")
        elif named.get("is_causal", getattr(module, "is_causal", True)) is False:
            problems.append(f"{name} says is_causal=False")
        else:
            why = _why_not_causal(shows, named.get("sliding_window"))
            problems.append(f"{name}: {why}" if why else "")
        callers.add(module)  # of which a cache has one set of keys
        everything = (q_BHSE, k_BKSE, v_BKSE, attention_mask, *named.values())
        read = [
            x.sum().to(q_BHSE.dtype) for x in everything if isinstance(x, Tensor) and x.is_floating_point()
        ]
        batch, heads, length, _ = q_BHSE.shape  # all that is read has a gradient
        return torch.stack(read).sum().expand(batch, length, heads, v_BKSE.shape[-1]), None

    def mask(
        batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: Any = None, **rest: Any
    ) -> Tensor:
        made = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        vars(made)["trilith"] = mask_function
        return made

    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask)
    register(note)
    try:
        yield
    finally:
        register(attention)


@lru_cache(maxsize=8)
def _why_not_causal(mask: Callable[..., Any], window: int | None) -> str:
    """Return in which way a mask of transformers is not causal with this window, or nothing."""
    edges = [0, *(2**power for power in range(4, 18)), *([] if window is None else [window, 2 * window])]
    around = {max(edge + step, 0) for edge in edges for step in (-1, 0, 1)}  # of windows and usual chunks
    with torch.device("cpu"):
        places = torch.tensor(sorted(around | {*range(16)}))
        query, key = places[:, None], places[None, :]
        shown = (key <= query) & (query - key < (window or math.inf))
        rows = torch.vmap(mask, (None, None, None, 0))
        try:  # mapped over places, as transformers makes masks
            differs = (torch.vmap(rows, (None, None, 0, None))(0, 0, places, places) != shown).nonzero()
        except Exception as error:  # a mask of values that only a forward has
            return f"its mask depends on more than places ({type(error).__name__})"
    if not len(differs):
        return ""
    rule = "causal" if window is None else f"a window of {window}"
    return f"its mask is not {rule}: query {places[differs[0, 0]]}, key {places[differs[0, 1]]}"


def register(function: Callable[..., Any] = attention) -> None:
    """Make our attention known to transformers, or what stands for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, function)
