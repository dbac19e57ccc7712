"""Activation checkpointing: what a block forgets after its forward, and computes again in its backward.

=========  ==========================================================================================
mode       kept for backward
=========  ==========================================================================================
none       every intermediate result
selective  a block's input, its matrix products and attention, and sums over the tensor axis; norms,
           rotation, activation functions and gathers are computed again (over several context ranks
           attention, too: it is in many pieces there)
every      the input alone of every n-th block; the others keep everything
full       the input alone of every block
=========  ==========================================================================================

Loss and gradients are bit for bit the same as without checkpointing: dropout draws the same masks again, even
if the selective mode keeps an attention that has drawn masks of its own. Recomputed collectives come in the
same order on all ranks of a group, because these ranks hold parts of the same block. Sources: Chen et al.
2016; Korthikanti et al. 2022, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..parallel_state import BadInput
from ..parallel_state.engine import TorchDispatchMode

Checkpointing = Literal["none", "selective", "every", "full"]

_Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]

_SUMS = ("_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor")


def checkpointed(number: int, mode: Checkpointing, every: int = 1) -> bool:
    """Tell whether the block with this global number is recomputed; the answer is the same in every
    layout.
    """
    return mode in ("selective", "full") or (mode == "every" and number % every == 0)


def checkpoint_blocks(
    blocks: Iterable[tuple[int, nn.Module]],
    mode: Checkpointing,
    *,
    every: int = 1,
    keep_attention: bool = True,
) -> None:
    """Make these blocks, given with their global numbers, recompute activations in backward; in place.

    No module is added, so no parameter changes its name. FSDP's hooks stay outside, on the block itself: a
    block is gathered once for its recomputation and its backward. Without gradients (evaluation, generation)
    nothing changes. ``keep_attention=False``: the selective mode also computes attention again. Raises
    ``BadInput`` for an unknown mode or ``every`` below 1.
    """
    if mode not in ("none", "selective", "every", "full"):
        expected = "none, selective, every or full"
        raise BadInput("memory", "checkpointing", expected=expected, found=repr(mode))
    if every < 1:
        raise BadInput("memory", "checkpoint_every", expected="at least 1", found=every)
    for number, block in blocks:
        if checkpointed(number, mode, every):
            block.forward = _forgetful(
                block.forward, selective=mode == "selective", keep_attention=keep_attention
            )


def _forgetful(forward: Callable[..., Any], *, selective: bool, keep_attention: bool) -> Callable[..., Any]:
    """Return a forward with the same arguments that recomputes its activations in backward."""

    def again(x: Tensor, *more: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *more, **named)
        if not selective:
            return checkpoint(forward, x, *more, use_reentrant=False, **named)
        policy = partial(_policy, hidden_size=x.shape[-1], keep_attention=keep_attention)
        contexts = partial(_contexts, policy, x.device)
        return checkpoint(forward, x, *more, use_reentrant=False, context_fn=contexts, **named)

    return again


def _contexts(policy: Callable[..., CheckpointPolicy], device: torch.device) -> _Contexts:
    forward, again = create_selective_checkpoint_contexts(policy)
    left: list[list[Tensor]] = []
    generators = _generators(device)
    first = _Both(_Counted(forward), _Note(left, generators))
    return first, _Both(_Counted(again), _Repeat(left, generators))


def keep_aside(module: nn.Module) -> None:
    """Exclude the hooks that ``module`` has now from selective checkpointing.

    Call it for a module inside a checkpointed block that FSDP has wrapped by itself. Its hooks gather weights
    in the forward, and again in the recomputation if the weights are gone by then. torch finds what it kept
    by counting operators, so the recomputation must not have more of them.
    """
    module.register_forward_pre_hook(_aside, prepend=True)
    module.register_forward_pre_hook(_back)
    module.register_forward_hook(_aside, prepend=True)
    module.register_forward_hook(_back)


#: True while excluded hooks run; a block's recomputation runs in the same thread as they do.
_ASIDE = ContextVar("aside", default=False)


def _aside(*given: Any) -> None:
    _ASIDE.set(True)


def _back(*given: Any) -> None:
    _ASIDE.set(False)


class _Counted(TorchDispatchMode):
    """Apply torch's mode of selective checkpointing to all operators except those of excluded hooks."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __enter__(self) -> Any:
        _ASIDE.set(False)  # a repetition ends as soon as all is there, perhaps amid such a hook
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _ASIDE.get():
            return func(*args, **(kwargs or {}))
        return self._mode.__torch_dispatch__(func, types, args, kwargs or {})


class _Both(AbstractContextManager[None]):
    """Enter two context managers, ``inner`` within ``outer``."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._both = (outer, inner)
        self._open = ExitStack()

    def __enter__(self) -> None:
        for one in self._both:
            self._open.enter_context(one)

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)


class _Note(TorchDispatchMode):
    """Note where each attention leaves the random generators.

    On a GPU, attention with dropout is one operator, which draws random numbers. Recomputation uses its kept
    output and does not run it. Without this note the generators would stay behind, and every later mask of
    the block would differ.
    """

    def __init__(self, left: list[list[Tensor]], generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._left, self._generators = left, generators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_attention(_name(func)):
            self._left.append([generator.get_state() for generator in self._generators])
        return out


class _Repeat(TorchDispatchMode):
    """Move the generators, after each attention that is not run again, to where it had left them."""

    def __init__(self, left: list[list[Tensor]], generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._left, self._generators = iter(left), generators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_attention(_name(func)):
            for generator, state in zip(self._generators, next(self._left), strict=True):
                generator.set_state(state)
        return out


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the host's generator, and the device's own if it has one: reading them launches no operator."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _policy(
    ctx: SelectiveCheckpointContext,
    op: Any,
    *arguments: Any,
    hidden_size: int,
    keep_attention: bool,
    **named: Any,
) -> CheckpointPolicy:
    """Decide whether an operator's output is kept or recomputed: what is expensive to compute is kept.

    Of the matrix products, those that read the hidden width are kept; the others end a branch. Over a cut
    tensor axis such a last product is only a partial sum, and the sum is kept (a piece of it under sequence
    parallelism). On one device the feed-forward's last product joins the residual stream, and nothing needs
    it again.
    """
    name = _name(op)
    if name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
        inner: int = arguments[1 if name == "aten::addmm" else 0].shape[-1]
        return _KEEP if inner == hidden_size else _AGAIN
    return _KEEP if name in _SUMS or (keep_attention and _is_attention(name)) else _AGAIN


def _name(op: Any) -> str:
    return str(op.name()) if hasattr(op, "name") and callable(op.name) else str(op)


def _is_attention(name: str) -> bool:
    return "attention" in name or "attn" in name


_KEEP, _AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
