"""Activation checkpointing: what a block forgets after its forward, and computes again in its backward.

=========  ==========================================================================================
mode       kept for backward
=========  ==========================================================================================
none       every intermediate result
selective  a block's input, its matrix products and attention, and sums over the tensor axis; norms,
           rotation, activation functions, gathers and routed experts are computed again (over several
           context ranks attention, too: it is in many pieces there), and products of modules that say so
every      the input alone of every n-th block; the others keep everything
full       the input alone of every block
=========  ==========================================================================================

Loss and gradients are bit for bit the same as without checkpointing: dropout draws the same masks again, even
if the selective mode keeps an attention that has drawn masks of its own. Recomputed collectives come in the
same order on all ranks of a group, because these ranks hold parts of the same block. Sources: Chen et al.
2016; Korthikanti et al. 2022, section 5.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..parallel_state import BadInput
from ..parallel_state.engine import TorchDispatchMode, accelerator

#: Values of ``memory.checkpointing``.
Checkpointing = Literal["none", "selective", "every", "full"]

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]

_PRODUCTS = ("aten::mm", "aten::_scaled_mm", "aten::addmm")
#: Attention without a dropout of its own.
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
    if mode not in ("none", "selective", "every", "full"):
        expected = "none, selective, every or full"
        raise BadInput("memory", "checkpointing", expected=expected, found=repr(mode))
    if interval < 1:
        raise BadInput("memory", "checkpoint_every", expected="at least 1", found=interval)
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
        if policy is not None:
            named["context_fn"] = partial(_contexts, policy, x.device)
        return checkpoint(forward, x, *args, use_reentrant=False, **named)

    vars(again)["recomputes_operators"] = policy is not None
    return again


def recomputes_operators(block: nn.Module) -> bool:
    """Tell whether selective checkpointing chooses what of this block is computed again."""
    return getattr(block.forward, "recomputes_operators", False)


def _contexts(policy: Callable[..., CheckpointPolicy], device: torch.device) -> _Contexts:
    """Return the contexts of a forward and of its recomputation.

    On a GPU, attention with dropout is one operator, which draws random numbers. Recomputation uses its kept
    output and does not run it, so the random generators would stay behind, and every later mask of the block
    would differ. The forward therefore notes where each attention leaves the generators, and the
    recomputation moves them there.
    """
    forward, again = create_selective_checkpoint_contexts(policy)
    generators, left = accelerator.generators(device), list[list[Tensor]]()
    noted = iter(left)

    def note() -> None:
        left.append([generator.get_state() for generator in generators])

    def move() -> None:
        for generator, state in zip(generators, next(noted), strict=True):
            generator.set_state(state)

    return _Counted(forward, note), _Counted(again, move)


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


def _count(of: ContextVar[int], step: int, *args: Any) -> None:
    of.set(of.get() + step)


class _Counted(TorchDispatchMode):
    """Apply torch's mode of selective checkpointing to all operators except those of excluded hooks.

    ``after_attention`` is called after each attention that has drawn random numbers. One mode does both,
    because every operator of a block passes through each mode in Python.
    """

    def __init__(self, mode: Any, after_attention: Callable[[], None]) -> None:
        super().__init__()
        self._mode, self._after_attention = mode, after_attention

    def __enter__(self) -> Any:
        # A repetition ends as soon as all is there, perhaps amid such a hook, or a module that is recomputed.
        _ASIDE.set(False)
        _RECOMPUTED.set(0)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _ASIDE.get():
            return func(*args, **(kwargs or {}))
        out = self._mode.__torch_dispatch__(func, types, args, kwargs or {})
        if _kind(func) == "attention" and _drops(func, args, kwargs or {}):
            self._after_attention()
        return out


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
    the residual stream, where nothing needs it again; and what is wide but cheap.
    """
    kind = _kind(op)
    if kind == "product":
        return _AGAIN if _RECOMPUTED.get() else _KEEP
    return _KEEP if kind == "sum of ranks" or (keep_attention and kind == "attention") else _AGAIN


def _drops(op: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Tell whether this call of attention may draw a mask of dropout: reading generators takes time."""
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
