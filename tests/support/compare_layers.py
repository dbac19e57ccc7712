"""Compare a parallel layer with itself on one device: outputs, input gradients, parameter gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from trilith.layers.collectives import own_piece
from trilith.parallel_state import ParallelState, declarations, finalize_gradients
from trilith.parallel_state.engine import local_data
from trilith.testing.layouts import as_pieces, differences

Make = Callable[[ParallelState | None], nn.Module]


def made_alike(make: Make, state: ParallelState, *, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Make the layer on one device and this rank's part of it with the same weights; ``make`` makes each."""
    torch.manual_seed(seed)
    whole = make(None)
    torch.manual_seed(seed)
    return whole, make(state)


def compare_with_one_device(
    make: Make,
    x: Tensor,
    state: ParallelState,
    *,
    input_dim: int | None = None,
    output_dim: int | None = None,
    tolerance: float = 1e-12,
) -> float:
    """Run the layer whole and in parts, forward and backward; the largest relative difference.

    ``x`` is the whole input, alike on all ranks; a rank's layer is given its piece of ``input_dim``, or
    all of it. Its output is compared with the whole output's piece of ``output_dim``. Gradients start from
    random numbers of the output's shape. Asserts that nothing differs by more than ``tolerance``, relative to
    the largest element of what is compared.
    """
    whole, mine = made_alike(make, state)
    x_whole, x_mine = x.clone(), _piece(x, input_dim, state).clone()
    if x.is_floating_point():
        x_whole.requires_grad_()
        x_mine.requires_grad_()
    y_whole, y_mine = _outputs(whole(x_whole)), _outputs(mine(x_mine))
    seeds = [torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)) for y in y_whole]
    worst = 0.0
    for number, (a, b) in enumerate(zip(y_whole, y_mine, strict=True)):
        worst = max(worst, _check(f"output {number}", _piece(a, output_dim, state), b, tolerance))
    torch.autograd.backward(y_whole, seeds)
    torch.autograd.backward(y_mine, [_piece(g, output_dim, state) for g in seeds])
    finalize_gradients(mine, state=state)
    if x.is_floating_point():
        assert x_whole.grad is not None and x_mine.grad is not None
        worst = max(
            worst, _check("input's gradient", _piece(x_whole.grad, input_dim, state), x_mine.grad, tolerance)
        )
    stated, parameters = declarations(mine), dict(mine.named_parameters())
    assert stated.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        held = stated[name].box(state.layout, state.at)
        box = stated[name].true_part(held)  # how much padding there is depends on the layout
        mine_only = box.within(held).slices
        grad = parameters[name].grad
        assert torch.equal(parameter.detach()[box.slices], local_data(parameters[name])[mine_only]), (
            f"{name} starts otherwise"
        )
        if stated[name].buffer:
            assert parameter.grad is None and grad is None, f"{name} has a gradient"
            continue
        assert parameter.grad is not None and grad is not None, f"{name} has no gradient"
        worst = max(
            worst,
            _check(f"{name}'s gradient", parameter.grad[box.slices], local_data(grad)[mine_only], tolerance),
        )
    return worst


def _piece(x: Tensor, dim: int | None, state: ParallelState) -> Tensor:
    return x if dim is None else own_piece(x, dim % x.ndim, state)


def _outputs(y: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (y,) if isinstance(y, Tensor) else tuple(y)


def _check(what: str, wanted: Tensor, part: Tensor, tolerance: float) -> float:
    """Compare one tensor by itself: then nothing counts as larger than it is."""
    ((_, worst),) = differences({what: wanted.detach()}, [as_pieces({what: part.detach()})])
    assert worst <= tolerance, f"{what} differs by {worst:.2e}"
    return worst
