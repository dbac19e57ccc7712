"""Multiply in float8, with scales that follow from the numbers of each product (dynamic scaling).

==========  =======================================  =======================  ==========================
scaling     one scale for                            forward                  gradients of the outputs
==========  =======================================  =======================  ==========================
tensorwise  a tensor                                 e4m3                     e5m2
rowwise     a row of a product's left matrix, and a  e4m3                     e4m3
            column of its right one
==========  =======================================  =======================  ==========================

A scale brings the largest magnitude near the largest float8 number. It is a power of two and changes no
digit: a number rounds to the same float8 number under every scale, unless it is about 2^14 times smaller than
the largest one. If several tensor ranks hold pieces of a tensor or row with one scale, they agree on the
largest magnitude. Micro-batches, data ranks and context ranks have scales of their own. Sources: Micikevicius
et al. 2022; torchao's float8 training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import ParallelState, engine
from ..parallel_state.engine.autograd_and_compiler import differentiable_once
from ..parallel_state.engine.kernels import scaled_mm
from .parallel_linear import ParallelLinear

#: Values of ``float8_scaling``.
Scaling = Literal["tensorwise", "rowwise"]

#: The GPU's kernels take matrices whose sides are multiples of this.
MULTIPLE = 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_SMALLEST = 2.0**-100  # stands for the largest magnitude of zeros, whose scale would be infinite
_EXPONENT = 0x7F800000  # the bits of a float32 that are left in a power of two


def use_float8(model: nn.Module, scaling: Scaling) -> list[str]:
    """Let the column- and row-parallel linears of a model multiply in float8, in place.

    Weights, gradients and activations between the products keep their dtype. Output layers, embeddings,
    routers, stacks of experts, replicated linears and LoRA's matrices multiply as before. Call it before the
    model is compiled. Returns the names of the linear weights that do not use float8, because on this rank
    one of their sides is not a multiple of 16.
    """
    unfit = []
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear) and module.cut_dim is not None:
            module.float8 = Float8(scaling, "columns" if module.cut_dim else "rows", module.state)
            unfit += [
                f"{name}.{output}".rstrip(".")
                for output, part in module.parts.items()
                if not fits(*part.here().shape)
            ]
    return unfit


@dataclass(frozen=True)
class Float8:
    """Compute a parallel linear's products in float8. ``cut``: the dim in which ranks cut its weights."""

    scaling: Scaling
    cut: Literal["rows", "columns"]
    state: ParallelState

    def __call__(self, x: Tensor, weights_and_biases: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Return ``x W^T + b`` for each weight and bias, in the dtype of ``x`` (..., in).

        A weight with a side that is no multiple of 16 is multiplied as it is.
        """
        fitting = [weight for weight, _ in weights_and_biases if fits(*weight.shape)]
        in_float8 = iter(_Products.apply(x, self, *fitting) if fitting else ())
        outputs = []
        for weight, bias in weights_and_biases:
            y = next(in_float8) if fits(*weight.shape) else F.linear(x, weight)
            outputs.append(y if bias is None else y + bias)
        return outputs

    def tops(self, *matrices: tuple[Tensor, int], cut: bool) -> list[Tensor]:
        """Return each matrix's largest magnitudes: (1, 1) of the whole, or rowwise along a dim of size 1.

        ``matrices``: each matrix with the dim that rowwise scaling reduces. ``cut``: whether several ranks
        hold pieces of a tensor or row with one scale; one all-reduce for all matrices then finds the maximum.
        """
        rowwise = self.scaling == "rowwise"
        tops = [x.abs().amax(dim if rowwise else (0, 1), keepdim=True).float() for x, dim in matrices]
        if not cut or self.state.tensor.size == 1:
            return tops
        rank_tops = torch.cat([top.flatten() for top in tops])
        of_all = engine.all_reduce(rank_tops, self.state.tensor.group, "max")
        parts = of_all.split([top.numel() for top in tops])
        return [part.view(top.shape) for part, top in zip(parts, tops, strict=True)]


def fits(rows: int, columns: int) -> bool:
    """Tell whether a weight of this shape, as one rank computes with it, can be multiplied in float8."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


class _Products(torch.autograd.Function):
    """Multiply one input by the transposes of several weights; backward's products are in float8, too.

    The ranks share the rows of the weights (and the columns of the gradients), or the columns of the weights
    (and of the input). Rowwise, only a product that sums over what they share has scales to agree on.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Float8, *weights: Tensor) -> tuple[Tensor, ...]:
        rows, tensorwise = x.reshape(-1, x.shape[-1]), how.scaling == "tensorwise"
        cut = tensorwise or how.cut == "columns"
        tops = how.tops((rows, 1), *((weight, 1) for weight in weights), cut=cut)
        outputs = []
        for weight, top in zip(weights, tops[1:], strict=True):
            y = _multiply(rows, weight.t(), tops[0], top.t(), E4M3, fast=True)
            outputs.append(y.view(*x.shape[:-1], -1))
        saved_rows = [rows] if any(ctx.needs_input_grad[2:]) else []
        ctx.save_for_backward(*weights, *(tops if tensorwise else ()), *saved_rows)
        ctx.how, ctx.shape = how, x.shape
        return tuple(outputs)

    @staticmethod
    @differentiable_once("a product in float8")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        how, count, saved = ctx.how, len(gradients), ctx.saved_tensors
        tensorwise, cut = how.scaling == "tensorwise", how.cut == "rows"
        weights, saved_rows = saved[:count], saved[2 * count + 1 if tensorwise else count :]
        gs = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        pairs = [(g, 1) for g in gs]
        if tensorwise:
            dtype, (x_top, *weight_tops) = E5M2, saved[count : 2 * count + 1]
            turned_tops = g_tops = how.tops(*pairs, cut=cut)
        else:
            dtype, tops = E4M3, how.tops(*pairs, *((weight, 0) for weight in weights), cut=cut)
            g_tops, weight_tops = tops[:count], tops[count:]
            *turned_tops, x_top = how.tops(
                *((matrix, 0) for matrix in (*gs, *(saved_rows or gs[:1]))), cut=False
            )
        of_x: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * count
        for n, (g, weight) in enumerate(zip(gs, weights, strict=True)):
            if ctx.needs_input_grad[0]:
                product = _multiply(g, weight, g_tops[n], weight_tops[n], dtype, fast=not tensorwise)
                of_x = product if of_x is None else of_x + product
            if ctx.needs_input_grad[2 + n]:
                turned, top = g.t(), turned_tops[n].t()
                of_weights[n] = _multiply(turned, saved_rows[0], top, x_top, dtype, fast=not tensorwise)
        return None if of_x is None else of_x.view(ctx.shape), None, *of_weights


def _multiply(
    left: Tensor, right: Tensor, left_top: Tensor, right_top: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return the product of (M, K), cast to ``dtype``, and (K, N), cast to e4m3, in the dtype of ``right``.

    ``fast``: sums may be less exact, where that makes the GPU faster.
    """
    short = -left.shape[1] % MULTIPLE
    if short:  # zeros change no sum
        left, right = F.pad(left, (0, short)), F.pad(right, (0, 0, 0, short))
    left_scale, right_scale = _scale(left_top, dtype), _scale(right_top, E4M3)
    wide = torch.promote_types(right.dtype, torch.bfloat16)  # under a scale float16 would overflow
    scaled = left * left_scale.to(wide), (right * right_scale.to(wide)).t()
    product = scaled_mm(
        scaled[0].to(dtype, memory_format=torch.contiguous_format),
        scaled[1].to(E4M3, memory_format=torch.contiguous_format).t(),
        left_scale.reciprocal(),
        right_scale.reciprocal(),
        wide,
        fast=fast,
    )
    return product.to(right.dtype)


def _scale(top: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two, at most, that brings the largest magnitude to the dtype's."""
    scale = torch.finfo(dtype).max / top.clamp(min=_SMALLEST)
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
