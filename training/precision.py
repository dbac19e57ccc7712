"""Define the data types in which a step computes, sums gradients and keeps its weights, and cast the weights.

FSDP2 can cast too, but on a single rank it also copies each weight and each gradient through a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..layers import Scaling, use_float8
from ..parallel_state import ParallelState, engine, require
from ..parallel_state.engine import accelerator, is_dtensor, local_data
from ..parallel_state.engine.autograd_and_compiler import after_backward
from ..parallel_state.engine.local_tensors import foreach_copy_, like

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class Precision:
    """State three dtypes: ``master`` of weights and moments, ``compute`` of forward and backward, and
    ``reduce`` of the sums of gradients over micro-batches and ranks.
    """

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def casts(self) -> bool:
        """Tell whether the three differ."""
        return not self.master == self.compute == self.reduce

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Return FSDP2's policy, which casts weights on all-gather and gradients before they are summed."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second

        return MixedPrecisionPolicy(
            param_dtype=self.compute if self.compute != self.master else None,
            reduce_dtype=self.reduce,
            cast_forward_inputs=False,
        )


def dtypes_of(model: nn.Module) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtypes of a model's activations, and of the sums of its partial gradients, ``None`` for that
    of the gradients: as ``shard_over_data`` was told, or as its parameters are.
    """
    precision = vars(model).get("precision")
    if isinstance(precision, Precision):
        return precision.compute, torch.promote_types(precision.master, precision.reduce)
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floating, torch.float32), None


def multiply_in_float8(model: nn.Module, scaling: Scaling | None, state: ParallelState) -> list[str]:
    """Let the blocks' linears multiply in float8, in place, if a recipe's ``scaling`` says how; return the
    names of the weights that do not fit. Raises ``BadInput`` for a GPU that has no float8.
    """
    if scaling is None:
        return []
    if accelerator.is_accelerator(state.device):
        needed, capability = (9, 0) if scaling == "rowwise" else (8, 9), accelerator.capability(state.device)
        expected = "a GPU of compute capability {}.{} or later with float8".format(*needed)
        require(capability >= needed, "recipe", "compute", expected, "{}.{}".format(*capability))
    return use_float8(model, scaling)


@dataclass(slots=True)
class ComputeWeight:
    """Hold a parameter (the master), its copy, and the modules that hold it by which name."""

    master: nn.Parameter
    copy: nn.Parameter
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)


def add_gradient(copy: Tensor, dtype: torch.dtype) -> None:
    """Add the gradient of a copy to its ``total``, which is held in ``dtype``."""
    grad, copy.grad = copy.grad, None
    if grad is not None:
        total = vars(copy).get("total")
        vars(copy)["total"] = grad.to(dtype) if total is None else total.add_(grad)


class ComputeWeights(AbstractContextManager["ComputeWeights"]):
    """Hold the weights that forward and backward compute with, in ``precision.compute``.

    At the beginning of a ``with`` block, the model's modules get copies of the parameters in this data type.
    At the end of the block they get the parameters back, and the gradients of the copies are added to the
    parameters' ``.grad``. Within a block, gradients of several backward passes are summed in
    ``precision.reduce``. A forward outside a ``with`` block starts a block of its own, which ends with its
    backward. ``fixed``: names of parameters that are not copied.

    If all data types are the same, nothing is copied. Only parameters that are DTensors are then replaced, by
    plain tensors in the same memory: DTensor's work for each use of a weight takes 2 % of a step on a CPU. A
    forward outside a ``with`` block uses the parameters themselves.
    """

    def __init__(self, model: nn.Module, precision: Precision, *, fixed: Iterable[str] = ()) -> None:
        self.model, self.precision, self.fixed = model, precision, frozenset(fixed)
        self._weights: list[ComputeWeight] = []
        self._depth, self._of_forward = 0, False
        if precision.casts:
            model.register_forward_pre_hook(self._before_forward, prepend=True)
            model.register_forward_hook(self._after_forward, always_call=True)

    def __enter__(self) -> ComputeWeights:
        self._depth += 1
        if self._depth == 1:
            self._weights = self._weights or self._made()
            cast = [weight for weight in self._weights if weight.copy.dtype != weight.master.dtype]
            with torch.no_grad():
                foreach_copy_(
                    [weight.copy for weight in cast], [local_data(weight.master) for weight in cast]
                )
            for weight in self._weights:
                if weight.copy.dtype == weight.master.dtype:  # the same memory, wherever it is by now
                    weight.copy.data = local_data(weight.master)
                weight.copy.requires_grad_(weight.master.requires_grad)
                for module, leaf in weight.holders:
                    setattr(module, leaf, weight.copy)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for weight in self._weights:
            for module, leaf in weight.holders:
                setattr(module, leaf, weight.master)
            add_gradient(weight.copy, self.precision.reduce)
            total = vars(weight.copy).pop("total", None)
            if kind is None and total is not None:
                master, grad = weight.master, total.to(weight.master.dtype)
                if master.grad is None:
                    master.grad = like(master, grad)
                else:
                    local_data(master.grad).add_(grad)

    def _made(self) -> list[ComputeWeight]:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        weights: dict[nn.Parameter, ComputeWeight] = {}
        for name, master in self.model.named_parameters(remove_duplicate=False):
            if name in self.fixed or not (self.precision.casts or is_dtensor(master)):
                continue
            if master not in weights:
                copy = nn.Parameter(local_data(master).to(self.precision.compute), master.requires_grad)
                weights[master] = ComputeWeight(master, copy)
                if self.precision.reduce != self.precision.compute:
                    if not copy.requires_grad:
                        copy.requires_grad_(True)  # torch takes hooks of no other
                    # A hook that held the model would never be freed: the garbage collection of Python
                    # does not see what it holds (torch 2.13).
                    copy.register_post_accumulate_grad_hook(
                        partial(add_gradient, dtype=self.precision.reduce)
                    )
            path, _, leaf = name.rpartition(".")
            weights[master].holders.append((modules[path], leaf))
        return [*weights.values()]

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self._depth:
            self._of_forward = True
            self.__enter__()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._of_forward:
            return
        waits = [tensor for tensor in engine.tensors_in(output, records=True) if tensor.requires_grad]
        if waits:
            waits[0].register_hook(lambda grad: after_backward(self._leave))
        else:
            self._leave()

    def _leave(self) -> None:
        if self._of_forward:
            self._of_forward = False
            self.__exit__(None)


def computing(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which several forwards and backwards of ``model`` share one copy of its weights."""
    weights = model.__dict__.get("compute_weights")
    return weights if isinstance(weights, ComputeWeights) else nullcontext()
