"""Compute the gradients of weights in the second of a stage's two backward passes, each exactly once.

Torch's first pass leaves groups: weights, the nodes of the graph where their gradients branch off from those
of activations, and the gradients that came to these nodes. Torch leaves apart what a later weight connects
(``_backward.get_param_groups``), and would compute twice what such groups have in common.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .autograd_and_compiler import call_gradient_hooks

#: One of torch's groups: ``params``, the graph nodes that add to weights' gradients; ``intermediates``, nodes
#: too; and ``grads``, in their order: for each the gradients of its outputs.
Group = dict[str, Any]


def join_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with those joined that share an intermediate node."""
    whole: dict[int, Group] = {}
    group_of: dict[Any, Group] = {}
    for group in groups:
        touched = {id(group_of[node]): group_of[node] for node in group["intermediates"] if node in group_of}
        if touched:
            parts = [*touched.values(), group]
            grads = {
                node: grad
                for part in parts
                for node, grad in zip(part["intermediates"], part["grads"], strict=True)
            }
            params = set().union(*(part["params"] for part in parts))
            group = {"params": params, "intermediates": [*grads], "grads": [*grads.values()]}
        for key in touched:
            del whole[key]
        whole[id(group)] = group
        group_of |= dict.fromkeys(group["intermediates"], group)
    return list(whole.values())


def passes_through_others(group: Group) -> bool:
    """Return whether one intermediate of the group lies behind another: the way between them belongs to other
    groups too, and must not be freed before these have been computed.
    """
    nodes = set(group["intermediates"])
    return len(nodes) > 1 and any(below in nodes for node in nodes for below in _below(node))


def _below(node: Any) -> Iterator[Any]:
    visited, queue = {node}, [node]
    while queue:
        for after, _ in queue.pop().next_functions:
            if after is not None and after not in visited:
                visited.add(after)
                queue.append(after)
                yield after


def compute_weight_gradients(weights: Iterable[nn.Parameter], groups: Sequence[Group]) -> None:
    """Add the gradients of these groups to their weights, and free the groups' graphs and gradients."""
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    rest = []
    for group in join_groups(groups):
        if passes_through_others(group):
            _compute_group(group, weight_of, retain_graph=True)
        else:
            rest.append(group)
    for group in rest:
        _compute_group(group, weight_of, retain_graph=False)


def _compute_group(group: Group, weight_of: Mapping[Any, nn.Parameter], *, retain_graph: bool) -> None:
    """Add one group's gradients to its weights, as torch 2.13's ``stage_backward_weight`` does.

    ``weight_of``: the weight of each node in ``params``. The group's intermediates and ``grads`` are let go.
    Torch's function before 2.13 adds up the gradients of a node with several outputs, and counts twice what
    reaches a node by way of another.
    """
    nodes, grads, params = [*group.pop("intermediates")], group.pop("grads"), [*group["params"]]
    edges = [
        (GradientEdge(node, number), grad)
        for node, node_grads in zip(nodes, grads, strict=True)
        for number, grad in enumerate(node_grads)
        if grad is not None
    ]
    if not edges:
        return
    # Gradients that the first pass left at a node are whole: nothing is added to them on a way through it.
    whole = zip(nodes, grads, strict=True) if len(nodes) > 1 else ()
    hooks = [node.register_prehook(lambda _, grads=node_grads: grads) for node, node_grads in whole]
    try:
        gradients = torch.autograd.grad(
            [edge for edge, _ in edges],
            [GradientEdge(param, 0) for param in params],
            [grad for _, grad in edges],
            retain_graph=retain_graph,
        )
    finally:
        for hook in hooks:
            hook.remove()
    for param, gradient in zip(params, gradients, strict=True):
        weight = weight_of[param]
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient
        call_gradient_hooks(weight)


def compute_input_gradients(
    outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor], weights: Iterator[nn.Parameter]
) -> Sequence[Group]:
    """Compute the gradients of a stage's inputs, the first part of its backward; return what is left."""
    _, groups = _module_of_parts().stage_backward_input(outputs, grads, inputs, weights)
    return cast(Sequence[Group], groups)


@cache
def _module_of_parts() -> ModuleType:
    """Import torch's module of a backward in two without its package, which imports torch's compiler and so
    takes longer than tracing a model; a process that runs pipelines has imported the package.
    """
    name = "torch.distributed.pipelining"
    if name in sys.modules:
        return import_module(f"{name}._backward")
    package = ModuleType("parts_of_torch_pipelining")
    package.__path__ = [str(Path(torch.distributed.__path__[0], "pipelining"))]
    sys.modules[package.__name__] = package
    try:
        return import_module(f"{package.__name__}._backward")
    finally:  # who imports all of a process's modules elsewhere finds no such package
        for inner in [name for name in sys.modules if name.startswith(package.__name__)]:
            del sys.modules[inner]
