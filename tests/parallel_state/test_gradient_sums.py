"""Partial gradients are summed also where a rank has none of its own."""

import torch
from torch import nn
from trilith.layers import RMSNorm
from trilith.parallel_state import Layout, ParallelState, finalize_gradients
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel


def gradients_where_one_rank_has_none():
    """Use a norm on tensor rank 1 alone, and another one nowhere; return both gradients."""
    state = ParallelState.start(Layout.of(tensor=2, sequence=True))
    model = nn.ModuleDict({"some": RMSNorm(4, state=state), "unused": RMSNorm(4, state=state)})
    if state.at.tensor == 1:
        model["some"](torch.arange(8.0).view(1, 2, 4)).square().sum().backward()
    finalize_gradients(model, state=state)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if gradient is None else local_data(gradient) for gradient in gradients]


def test_a_rank_without_a_partial_gradient_gets_the_sum_of_the_others():
    (first, unused), (second, _) = run_parallel(gradients_where_one_rank_has_none, 2)
    assert first is not None and torch.equal(first, second) and bool(first.any())
    assert unused is None
