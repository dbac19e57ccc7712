"""Compute the attention of transformers' code by ours: kernels, packed documents, context ranks, caches.

The mask that its code carries to every attention call is a tensor without memory, which has the inputs of
this forward as an attribute. So recomputation finds its own inputs, and whatever else would read the mask
fails. B batch  S sequence  H heads here  K key/value heads here  E head dim
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import AttentionInputs, causal_attention, own_random
from ...parallel_state import BadInput
from ..base.keys import names
from .layers import has_part_of_outputs

#: Under this name transformers' code finds our attention.
ATTENTION = "trilith"

#: Keywords of attention calls that say nothing that ours must know.
_SILENT = names("""
    is_causal position_ids use_cache output_attentions past_key_values cache_position output_router_logits
    logits_to_keep return_dict
""")
#: What notes the calls of a probe, while one runs.
_WATCHERS: list[Callable[..., tuple[Tensor, None]]] = []


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
    if _WATCHERS:
        everything = (q_BHSE, k_BKSE, v_BKSE, s_aux, attention_mask, *rest.values())
        read = [x for x in everything if isinstance(x, Tensor) and x.is_floating_point()]
        return _WATCHERS[-1](module, read, attention_mask, sliding_window, rest)
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
    # Ranks with heads of their own drop their own scores; where each has all heads, they drop the same ones.
    with own_random(inputs.state, split=dropout > 0 and has_part_of_outputs(module)):
        out_BHSE = causal_attention(
            q_BHSE, k_BKSE, v_BKSE, scope,
            dropout=dropout, scale=scaling, soft_cap=softcap, sinks=s_aux,
            backend=vars(module).get("trilith_backend", "auto"),
        )  # fmt: skip
    return out_BHSE.transpose(1, 2).contiguous(), None


def unknown(rest: dict[str, Any]) -> str:
    """Return the first keyword with a value that our attention does not compute with."""
    return next(
        (name for name, value in sorted(rest.items()) if value is not None and name not in _SILENT), ""
    )


@dataclass(frozen=True)
class Seen:
    """Hold what one attention call of a probe was given."""

    module: str
    mask: Callable[..., Any] | None
    window: int | None
    strange: str
    causal: object

    def problem(self) -> str:
        """Return in which way the mask is not the one that ours would be, or nothing."""
        if self.strange:
            return f"{self.module} gives attention {self.strange}"
        if self.mask is None:
            return f"{self.module} calls attention without a mask"
        if self.causal is False:
            return f"{self.module} says is_causal=False"
        places = torch.tensor(_places(self.window), device="cpu")
        query, key = places[:, None], places[None, :]
        shown = (key <= query) & (query - key < (self.window or math.inf))
        rows = torch.vmap(self.mask, (None, None, None, 0))
        try:  # mapped over places, as transformers makes masks
            sees = torch.vmap(rows, (None, None, 0, None))(0, 0, places, places)
        except Exception as error:  # a mask of values that only a forward has
            return f"{self.module}: its mask depends on more than places ({type(error).__name__})"
        for row, column in (sees != shown).nonzero().tolist():
            rule = "causal" if self.window is None else f"a window of {self.window}"
            return f"{self.module}: its mask is not {rule}: query {places[row]}, key {places[column]}"
        return ""


def _places(window: int | None) -> list[int]:
    """Return places of tokens to compare masks at: small ones, edges of windows and of usual chunks."""
    edges = [0, *(2**power for power in range(4, 18)), *([] if window is None else [window, 2 * window])]
    return sorted({max(edge + step, 0) for edge in edges for step in (-1, 0, 1)} | {*range(16)})


@contextmanager
def watched(seen: list[Seen]) -> Iterator[None]:
    """Let attention calls note what they are given instead of computing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    callers = set[nn.Module]()

    def note(
        module: nn.Module, read: list[Tensor], mask: Any, window: int | None, rest: dict[str, Any]
    ) -> tuple[Tensor, None]:
        # A cache has one set of keys for a module.
        strange = unknown(rest) or ("a second set of keys" if module in callers else "")
        callers.add(module)
        causal = rest.get("is_causal", getattr(module, "is_causal", True))
        seen.append(Seen(type(module).__name__, getattr(mask, "trilith", None), window, strange, causal))
        batch, heads, length, _ = read[0].shape
        total = torch.stack([x.sum().to(read[0].dtype) for x in read]).sum()  # all of them have a gradient
        return total.expand(batch, length, heads, read[2].shape[-1]), None

    def mask(
        batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: Any = None, **rest: Any
    ) -> Tensor:
        made = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        vars(made)["trilith"] = mask_function
        return made

    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask)
    _WATCHERS.append(note)
    try:
        yield
    finally:
        _WATCHERS.pop()


@lru_cache
def registered() -> None:
    """Make our attention known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
