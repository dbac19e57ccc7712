"""Reach into FSDP: its whole parameters, and the moments at which it gathers weights and sums gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return every module in ``module``, itself included, that FSDP shards by itself."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def computed_with(modules: Iterable[FSDPModule]) -> Iterator[nn.Parameter]:
    """Yield the whole parameters that these modules compute with, gathered at the moment or not.

    Autograd's graph is made of these; ``module.parameters()`` gives the shards when they are not gathered.
    """
    for group in _groups(modules):
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            if whole is not None:
                yield whole


def gather_weights(modules: Iterable[FSDPModule]) -> None:
    """Gather the whole parameters of these modules; they stay until the next ``sum_gradients``."""
    for group in _groups(modules):
        group.unshard()
        group.wait_for_unshard()


def sum_gradients(modules: Iterable[FSDPModule]) -> None:
    """Sum the gradients that these modules have so far over the data ranks, now, and keep shards of the sums.

    FSDP does this in hooks of a backward pass that reaches a module's input. A pass that computes only the
    gradients of weights, later, runs no such hook. Afterwards the modules sum nothing until they are told to.
    """
    for module in modules:
        # Torch's own switch turns on both sums: over the ranks that hold shards, and over their replicas.
        module.set_requires_gradient_sync(True, recurse=False)
        for group in _groups([module]):
            group.post_backward()
        module.set_requires_gradient_sync(False, recurse=False)


def end_backward(root: FSDPModule) -> None:
    """Finish a step after its last backward: sum the remaining gradients, wait, free gathered weights."""
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    for group in _groups(fsdp_modules(cast(nn.Module, root))):
        group.post_backward()
    cast(Any, root)._get_fsdp_state()._root_post_backward_final_callback()


def _groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield what FSDP gathers and sums at once: one group for a module, or none if other modules hold all
    parameters.
    """
    for module in modules:
        state = cast(Any, module)._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # one alone before torch 2.12
        one = getattr(state, "_fsdp_param_group", None) if several is None else None
        yield from several if several is not None else ([] if one is None else [one])
