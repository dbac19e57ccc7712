"""Activation checkpointing: what a block forgets after its forward, and computes again in its backward.

=========  ==========================================================================================
mode       kept for backward
=========  ==========================================================================================
none       every intermediate result
selective  a block's input, its matrix products and attention, and sums over the tensor axis; norms,
           rotation, activation functions, gathers and routed experts are computed again, products of
           modules that say so, and attention with dropout or, in many pieces, over context ranks
every      the input alone of every n-th block; the others keep everything
full       the input alone of every block
=========  ==========================================================================================

Loss and gradients are bit for bit the same as without checkpointing: what draws random numbers is computed
again, and draws the same. Recomputed collectives come in the same order on all ranks of a group, because
these ranks hold parts of the same block. Sources: Chen et al. 2016; Korthikanti et al. 2022, section 5.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..parallel_state import require
from ..parallel_state.engine.autograd_and_compiler import TorchDispatchMode

#: Values of ``memory.checkpointing``.
Checkpointing = Literal["none", "selective", "every", "full"]

_PRODUCTS = ("aten::mm", "aten::_scaled_mm", "aten::addmm")
#: Attention that has no dropout, and no argument that says so.
_NEVER_DROP = ("torch_attn::_varlen_attn", "flex_attention")
_SUMS = ("_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor")


def checkpointed(number: int, mode: Checkpointing, interval: int = 1) -> bool:
    """Tell whether the block with this global number is recomputed, alike in every layout."""
    return mode in ("selective", "full") or (mode == "every" and number % interval == 0)


def checkpoint_blocks(
    blocks: Iterable[tuple[int, nn.Module]],
    mode: Checkpointing,
    *,
    interval: int = 1,
    keep_attention: bool = True,
) -> None:
    """Make these blocks, given with their global numbers, recompute activations in backward; in place.

    No module is added, so no parameter changes its name. FSDP's hooks stay outside, on the block itself: a
    block is gathered once for its recomputation and its backward. Without gradients (evaluation, generation)
    nothing changes. ``keep_attention=False``: the selective mode also computes attention again, and so it
    does with the products of a module whose attribute ``recomputed`` is true. Raises ``BadInput`` for an
    unknown mode or ``interval`` below 1.
    """
    modes = get_args(Checkpointing)
    require(mode in modes, "memory", "checkpointing", f"one of {', '.join(modes)}", repr(mode))
    require(interval >= 1, "memory", "checkpoint_every", "at least 1", interval)
    for number, block in blocks:
        if checkpointed(number, mode, interval):
            policy = partial(_policy, keep_attention=keep_attention) if mode == "selective" else None
            for module in block.modules() if policy else ():
                if getattr(module, "recomputed", False) and module not in _MARKED:
                    module.register_forward_pre_hook(partial(_count, _RECOMPUTED, 1))
                    module.register_forward_hook(partial(_count, _RECOMPUTED, -1))
                    _MARKED.add(module)
            block.forward = _forgetful(block.forward, policy)


def _forgetful(
    forward: Callable[..., Any], policy: Callable[..., CheckpointPolicy] | None
) -> Callable[..., Any]:
    """Return the forward that computes again in backward all but what the ``policy`` keeps."""

    def again(x: Tensor, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *args, **named)
        if policy is not None:  # of a forward and of its recomputation
            named["context_fn"] = lambda: map(_Counted, create_selective_checkpoint_contexts(policy))
        return checkpoint(forward, x, *args, use_reentrant=False, **named)

    vars(again)["recomputes_operators"] = policy is not None
    return again


def recomputes_operators(block: nn.Module) -> bool:
    """Tell whether selective checkpointing chooses what of this block is computed again."""
    return getattr(block.forward, "recomputes_operators", False)


def keep_aside(module: nn.Module) -> None:
    """Exclude the hooks that ``module`` has now from selective checkpointing.

    Call it for a module inside a checkpointed block that FSDP has wrapped by itself. Its hooks gather weights
    in the forward, and again in the recomputation if the weights are gone by then. torch finds what it kept
    by counting operators, so the recomputation must not have more of them.
    """
    module.register_forward_pre_hook(partial(_count, _ASIDE, 1), prepend=True)
    module.register_forward_pre_hook(partial(_count, _ASIDE, -1))
    module.register_forward_hook(partial(_count, _ASIDE, 1), prepend=True)
    module.register_forward_hook(partial(_count, _ASIDE, -1))


@contextmanager
def products_recomputed() -> Iterator[None]:
    """Let selective checkpointing compute the products in this context again."""
    _count(_RECOMPUTED, 1)
    try:
        yield
    finally:
        _count(_RECOMPUTED, -1)


#: More than 0 while excluded hooks run; a block's recomputation runs in the same thread as they do.
_ASIDE = ContextVar("aside", default=0)
#: How many modules are computing, one in another, whose products are not kept.
_RECOMPUTED = ContextVar("recomputed", default=0)
#: Modules whose products are computed again, which have hooks that say so.
_MARKED: WeakSet[nn.Module] = WeakSet()


def _count(counter: ContextVar[int], step: int, *args: Any) -> None:
    counter.set(counter.get() + step)


class _Counted(TorchDispatchMode):
    """Apply torch's mode of selective checkpointing to all operators except those of excluded hooks."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __enter__(self) -> Any:
        # A repetition ends as soon as all is there, perhaps amid such a hook, or a module that is recomputed.
        _ASIDE.set(False)
        _RECOMPUTED.set(0)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _ASIDE.get():
            return func(*args, **(kwargs or {}))
        return self._mode.__torch_dispatch__(func, types, args, kwargs or {})


def _policy(
    ctx: SelectiveCheckpointContext,
    op: Any,
    *arguments: Any,
    keep_attention: bool,
    **named: Any,
) -> CheckpointPolicy:
    """Decide whether an operator's output is kept or recomputed: what is expensive to compute is kept.

    Of the matrix products, a layer says which are not (``recomputed``): partial sums over the tensor axis,
    whose sum is kept (a piece of it under sequence parallelism); a feed-forward's last product, which joins
    the residual stream, where nothing needs it again; and what is wide but cheap. Attention that draws a mask
    of dropout is never kept: the random generators would stay behind, and all later masks would differ.
    """
    kind = _kind(op)
    if kind == "product":
        return _AGAIN if _RECOMPUTED.get() else _KEEP
    if kind == "attention":
        return _KEEP if keep_attention and not _drops(op, arguments, named) else _AGAIN
    return _KEEP if kind == "sum of ranks" else _AGAIN


def _drops(op: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Tell whether this call of attention may draw a mask of dropout."""
    place = _place_of_dropout(op)
    if place is None:
        return op.name() not in _NEVER_DROP
    return bool(named.get("dropout_p", arguments[place] if place < len(arguments) else 0.0) > 0)


@lru_cache(maxsize=4096)
def _place_of_dropout(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    return names.index("dropout_p") if "dropout_p" in names else None


@lru_cache(maxsize=4096)  # asked for every operator of every block
def _kind(op: Any) -> str:
    """Name the kind of an operator, as far as its output may be kept; "" if it is always recomputed."""
    name = str(op.name()) if hasattr(op, "name") and callable(op.name) else str(op)
    if name in _SUMS:
        return "sum of ranks"
    if name in _PRODUCTS:
        return "product"
    return "attention" if "attention" in name or "attn" in name else ""


_KEEP, _AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
