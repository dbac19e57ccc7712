"""Linears that multiply in float8: against fp64, and what they leave as it is."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from trilith.layers import ColumnParallelLinear, RowParallelLinear, checkpoint_blocks, use_float8
from trilith.layers.float8 import Float8, _Products
from trilith.parallel_state import alone_or
from trilith.testing import Operators

SCALINGS = ("tensorwise", "rowwise")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def in_float8(module, scaling):
    assert use_float8(module, scaling) == []
    return module


def rounded(x, dtype=E4M3, dim=None):
    """Return ``x`` rounded to ``dtype`` under the largest power of two that all of it (of a row) bears."""
    top = x.abs().amax(() if dim is None else dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / top)))
    return (x * scale).to(dtype).to(x.dtype) / scale


def case(features=32, rows=48, tokens=9):
    """Return an input, a weight and a gradient in fp64, each spread over many powers of two."""
    generator = torch.Generator().manual_seed(0)

    def wide(*shape):
        powers = torch.randint(-12, 1, shape, generator=generator)
        return torch.randn(shape, dtype=torch.float64, generator=generator) * torch.exp2(powers.double())

    return wide(tokens, features), wide(rows, features), wide(tokens, rows)


def products(operators):
    return sum("_scaled_mm" in name for name in operators.names)


def run(layer, x, gradient):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(gradient)
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_product_is_that_of_the_rounded_factors(kind, scaling):
    x, w, g = case()
    layer = in_float8(kind(32, 48, bias=False).double(), scaling)
    with torch.no_grad():
        layer.weight.copy_(w)
    y, dx, dw = run(layer, x, g)
    rows, columns, backward = (None, None, E5M2) if scaling == "tensorwise" else (1, 0, E4M3)
    for found, wanted in (
        (y, rounded(x, dim=rows) @ rounded(w, dim=rows).T),
        (dx, rounded(g, backward, rows) @ rounded(w, dim=columns)),
        (dw, rounded(g, backward, columns).T @ rounded(x, dim=columns)),
    ):
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(scaling):
    x, _, g = case()
    layer = in_float8(ColumnParallelLinear(32, 48, bias=False).double(), scaling)
    assert not any(bool(found.any()) for found in run(layer, 0 * x, 0 * g))
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[3, 5] = bad
        assert not layer(broken)[3].isfinite().any()
    assert layer(x * 1e-25).isfinite().all() and bool(layer(x * 1e-25).any())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_float16_does_not_overflow_under_a_scale(scaling):
    x, w, g = (number.half() / 64 for number in case())
    layer = in_float8(ColumnParallelLinear(32, 48, bias=False), scaling)
    with torch.no_grad():
        layer.weight.copy_(w)
    exact = run(layer, x.float(), g.float())
    layer.weight.grad = None
    for found, wanted in zip(run(layer.half(), x, g), exact, strict=True):
        assert torch.allclose(found.float(), wanted, rtol=2e-3, atol=1e-6)


def test_a_weight_with_a_side_that_is_no_multiple_of_16_stays_and_is_named():
    a, b = ColumnParallelLinear(32, {"q": 48, "k": 8}), RowParallelLinear(40, 32)
    model = nn.ModuleDict({"a": a, "b": b, "c": nn.Linear(8, 8)})
    assert use_float8(model, "tensorwise") == ["a.k", "b"]
    x = torch.randn(5, 32)
    q, k = a(x)
    assert torch.equal(k, F.linear(x, a.k.weight, a.k.bias))
    assert not torch.allclose(q, F.linear(x, a.q.weight, a.q.bias), rtol=1e-3)
    y = torch.randn(5, 40)
    assert torch.equal(b(y), F.linear(y, b.weight, b.bias))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_graph_holds_forward_and_backward(scaling):
    x, _, g = case()
    layer = in_float8(ColumnParallelLinear(32, 48, bias=False).double(), scaling)
    plain = run(layer, x, g)
    layer.weight.grad = None
    found = run(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_a_frozen_weight_has_no_gradient_and_no_product_for_it():
    x, _, g = case(tokens=16)
    layer = in_float8(ColumnParallelLinear(32, 48, bias=False), "tensorwise")
    layer.weight.requires_grad_(False)
    held = []
    x = x.float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: held.append(one) or one, lambda one: one):
        y = layer(x)
    assert all(one.shape != x.shape for one in held)
    with Operators() as operators:
        y.backward(g.float())
    assert layer.weight.grad is None and products(operators) == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = ColumnParallelLinear(32, 64), RowParallelLinear(64, 32)

    def forward(self, x):
        return self.down(self.up(x).relu()).sin()


@pytest.mark.parametrize("recomputed", [False, True])
def test_selective_checkpointing_keeps_the_products_of_layers_that_say_nothing_else(recomputed):
    block = in_float8(Block(), "tensorwise")
    block.down.recomputed = recomputed
    checkpoint_blocks([(0, block)], "selective")
    y = block(torch.randn(2, 8, 32, requires_grad=True))
    with Operators() as operators:
        y.sum().backward()
    assert products(operators) == 4 + recomputed  # of backward, and that of ``down``, whose sine needs it


class Context:
    """Stand for autograd's context, whose engine needs a real GPU."""

    needs_input_grad = (True, False, True, True)
    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("scaling", SCALINGS)
def test_torch_s_rules_for_a_gpu_s_kernels_are_kept(scaling):
    """Shapes, strides and scales, as torch checks them for tensors that say that they are on a GPU."""
    with FakeTensorMode(), torch.no_grad():
        x, g = (torch.empty(2, 9, width, dtype=torch.bfloat16, device="cuda") for width in (32, 48))
        weight = torch.empty(48, 32, dtype=torch.bfloat16, device="cuda")
        context, how = Context(), Float8(scaling, "rows", alone_or(None))
        ys = _Products.forward(context, x, how, weight, weight)
        dx, _, *dws = _Products.backward(context, g, g)
        assert [y.shape for y in ys] == [g.shape] * 2 and dx is not None and dx.shape == x.shape
        assert [dw.shape for dw in dws if dw is not None] == [weight.shape] * 2
        with pytest.raises(RuntimeError, match="divisible by 16"):  # the rules are those of a GPU
            _Products.forward(context, x, how, torch.empty(8, 32, dtype=torch.bfloat16, device="cuda"))
