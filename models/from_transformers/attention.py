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
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...layers import AttentionInputs, causal_attention
from ...parallel_state import BadInput
from ..base.keys import names

#: Under this name transformers' code finds our attention.
ATTENTION = "trilith"


def carrier(content: Any, rows: int) -> Tensor:
    """Return the mask to give to transformers' code: four dims, so that it is passed on as it is."""
    mask = torch.empty((rows, 1, 1, 1), dtype=torch.bool, device="meta")
    vars(mask)["trilith"] = content
    return mask


@contextmanager
def of_whole_rows() -> Iterator[None]:
    """Let transformers make its own masks by shapes alone: a row is one document, and none is padded.

    Else it reads numbers to find that out, for which a step waits, and which a plan has not.
    """
    from transformers import PreTrainedModel, masking_utils

    skipped = masking_utils._ignore_causal_mask_sdpa
    with (
        patch.multiple(
            masking_utils,
            find_packed_sequence_indices=lambda position_ids: None,
            _ignore_causal_mask_sdpa=lambda padding_mask, *sizes: skipped(None, *sizes),
        ),
        patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
    ):
        yield


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
    if strange := unknown(rest):
        expected = "no keyword that trilith's attention does not know"
        raise BadInput(type(module).__name__, strange, expected=expected, found="one")
    inputs: AttentionInputs | None = getattr(attention_mask, "trilith", None)
    if inputs is None:
        expected, mask = "the mask that this forward carries", type(attention_mask).__name__
        raise BadInput(type(module).__name__, "attention_mask", expected=expected, found=mask)
    scope = inputs.scope(sliding_window)
    k_BKSE, v_BKSE = scope.extend(module, k_BKSE, v_BKSE)
    out_BHSE = causal_attention(
        q_BHSE, k_BKSE, v_BKSE, scope,
        dropout=dropout, scale=scaling, soft_cap=softcap, sinks=s_aux,
        backend=vars(module).get("trilith_backend", "auto"),
    )  # fmt: skip
    return out_BHSE.transpose(1, 2).contiguous(), None


#: Keywords of attention calls that ours takes, or that say nothing that it must know.
_KNOWN = signature(attention).parameters.keys() | names("""
    is_causal position_ids use_cache output_attentions past_key_values cache_position output_router_logits
    logits_to_keep return_dict
""")


def unknown(named: dict[str, Any]) -> str:
    """Return the first keyword with a value that our attention does not compute with."""
    return next((name for name in named if name not in _KNOWN and named[name] is not None), "")


@contextmanager
def watched(problems: list[str]) -> Iterator[None]:
    """Let attention calls note why ours would compute otherwise, or an empty text, instead of computing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    callers = set[nn.Module]()

    def note(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **named: Any) -> Any:
        shows = getattr(attention_mask, "trilith", None)
        if why := unknown(named) or ("a second set of keys" if module in callers else ""):
            why = f" gives attention {why}"
        elif shows is None:
            why = " calls attention without a mask"
        elif named.get("is_causal", getattr(module, "is_causal", True)) is False:
            why = " says is_causal=False"
        elif differs := _why_not_causal(shows, named.get("sliding_window")):
            why = f": {differs}"
        problems.append(why and type(module).__name__ + why)
        callers.add(module)  # of which a cache has one set of keys
        tensors = [x for x in (q, k, v, attention_mask, *named.values()) if isinstance(x, Tensor)]
        read = [x.sum().to(q.dtype) for x in tensors if x.is_floating_point()]
        batch, heads, length, _ = q.shape  # all that is read has a gradient
        return torch.stack(read).sum().expand(batch, length, heads, v.shape[-1]), None

    def mask(batch_size: int, *args: Any, mask_function: Any = None, **rest: Any) -> Tensor:
        return carrier(mask_function, batch_size)

    AttentionMaskInterface.register(ATTENTION, mask)
    with patch.dict(AttentionInterface._global_mapping, {ATTENTION: note}):
        yield


@lru_cache(maxsize=8)
def _why_not_causal(mask: Callable[..., Any], window: int | None) -> str:
    """Return in which way a mask of transformers is not causal with this window, or nothing."""
    edges = [0, *(2**power for power in range(4, 18)), *([] if window is None else [window, 2 * window])]
    around = {max(edge + step, 0) for edge in edges for step in (-1, 0, 1)}  # of windows and usual chunks
    with torch.device("cpu"):
        places = torch.tensor(sorted(around | {*range(16)}))
        query, key = places[:, None], places[None, :]
        visible = (key <= query) & (query - key < (window or math.inf))
        try:  # over all pairs of places at once, as transformers makes masks
            differs = (mask(places.new_zeros(()), places.new_zeros(()), query, key) != visible).nonzero()
        except Exception as error:  # a mask of values that only a forward has
            return f"its mask depends on more than places ({type(error).__name__})"
    if not len(differs):
        return ""
    rule = "causal" if window is None else f"a window of {window}"
    return f"its mask is not {rule}: query {places[differs[0, 0]]}, key {places[differs[0, 1]]}"
