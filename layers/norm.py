"""Normalisation over the hidden dim. Under sequence parallelism each rank normalises its own tokens."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import Constant, DeclaredModule, ParallelState, declare_parameter, local, shared_units
from .collectives import copy_to_tensor, reduce_from_tensor
from .head_groups import HeadGroups
from .host_numbers import constants
from .parallel_linear import cut_units, refuse_state


class _Norm(DeclaredModule):
    """Declare the weights ``starts``, each with the number that fills it (``None``: there is none)."""

    weight: nn.Parameter

    def __init__(
        self, dim: int, eps: float, state: ParallelState | None, *, heads: bool, **starts: float | None
    ) -> None:
        super().__init__(state)
        refuse_state(eps, type(self).__name__, "eps")
        self.dim, self.eps = dim, eps
        partial = ("tensor",) if self.state.sequence or heads else ()
        for name, start in starts.items():
            if start is None:
                self.register_parameter(name, None)
            else:
                self.declare(name, (dim,), partial=partial, initial=Constant(start))

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class RMSNorm(_Norm):
    """Compute ``x / rms(x) * (offset + weight)`` over the last dim, in at least fp32.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. With ``offset`` 1 (Gemma)
    the weight starts at 0, so that the factor starts at 1 in both forms. The weight is whole on every rank.
    Its gradient is partial if the tokens are split over the tensor axis, and always if each rank normalises
    its own ``heads`` (B, H, S, E). Source: Zhang and Sennrich 2019.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        heads: bool = False,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(dim, eps, state, heads=heads, weight=1.0 - offset)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, of the same shape."""
        weight = local(self.weight)
        if not self.offset:
            return F.rms_norm(x, (self.dim,), weight, self.eps)
        # The sum is taken in fp32: near 1 bf16 has too few digits for a small weight.
        inner = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(inner), (self.dim,), self.offset + weight.to(inner), self.eps).to(x.dtype)


class LayerNorm(_Norm):
    """Apply ``nn.LayerNorm`` over the last dim; weight and bias are whole on every rank.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. Some families have no
    ``bias`` (Cohere). ``heads``: each rank normalises its own heads (B, H, S, E), as with ``RMSNorm`` (Phi).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        heads: bool = False,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(dim, eps, state, heads=heads, weight=1.0, bias=0.0 if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, of the same shape."""
        bias = None if self.bias is None else local(self.bias)
        return F.layer_norm(x, (self.dim,), local(self.weight), bias, self.eps)


class _HeadsNorm(DeclaredModule):
    """Hold the weight of a norm of heads (B, H, S, E): a factor for each number of each head.

    Where the tensor axis does not divide them, ranks share heads (see ``ColumnParallelLinear``): the weight
    is whole on each rank, and each uses its rows.
    """

    #: Whether the weight is one vector over all heads.
    flat: ClassVar[bool] = False
    weight: nn.Parameter

    def __init__(
        self, heads: int, head_dim: int, eps: float = 1e-5, *, state: ParallelState | None = None
    ) -> None:
        super().__init__(state)
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        shape = (heads * head_dim,) if self.flat else (heads, head_dim)
        declaration, self.rows_here = cut_units(shape, shape[0] // heads, True, self.state)
        declare_parameter(self, "weight", replace(declaration, initial=Constant(1.0)), self.state)
        size, index = self.state.tensor.size, self.state.tensor.index
        everywhere = [head for rank in range(size) for head in shared_units(heads, size, rank)]
        #: On how many ranks each head here is.
        self.copies = tuple(everywhere.count(head) for head in shared_units(heads, size, index))

    def weight_here(self) -> Tensor:
        """Return the weights of this rank's heads, (H, 1, E)."""
        return self.here().view(-1, 1, self.head_dim)

    def extra_repr(self) -> str:
        return f"{self.heads} x {self.head_dim}, eps={self.eps}"


class HeadsRMSNorm(_HeadsNorm):
    """Compute ``x / rms(x) * weight`` over all heads together, those of all tensor ranks (OLMo 2), or over
    each of several ``groups`` of neighbouring heads (Mamba-2).

    Input and output: (B, H, S, E); the weight is one vector over all heads. Tensor ranks that share a group
    sum one number for each token and group.
    """

    flat = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        eps: float = 1e-6,
        *,
        groups: int = 1,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(heads, head_dim, eps, state=state)
        self.groups = HeadGroups(heads, groups, self.state)

    def forward(self, x_BHSE: Tensor) -> Tensor:
        """Return the normalised heads, of the same shape."""
        inner = torch.promote_types(x_BHSE.dtype, torch.float32)
        x = x_BHSE.to(inner)
        squares_BHS1 = x.square().sum(-1, keepdim=True)
        if self.rows_here is not None:  # a head on two ranks counts half on each
            squares_BHS1 = squares_BHS1 / constants(self.copies, x.device, inner).view(-1, 1, 1)
        sums_BGS1 = self.groups.sums(squares_BHS1)
        if self.groups.shared:  # groups that have no heads here add nothing to the sum over the ranks
            own = self.groups.held
            sums_BGS1 = F.pad(sums_BGS1, (0, 0, 0, 0, own.start, self.groups.groups - own.stop))
            sums_BGS1 = copy_to_tensor(reduce_from_tensor(sums_BGS1, self.state), self.state)
            sums_BGS1 = sums_BGS1[:, own.start : own.stop]
        width = self.heads // self.groups.groups * self.head_dim
        scale_BGS1 = (sums_BGS1 / width + self.eps).rsqrt()
        y_BHSE: Tensor = x * self.groups.spread(scale_BGS1) * self.weight_here()
        return y_BHSE.to(x_BHSE.dtype)


class HeadsLayerNorm(_HeadsNorm):
    """Apply ``nn.LayerNorm`` to each head, without bias and with its own weight (Cohere, StableLM).

    (B, H, S, E) in and out; the weight is (heads, E).
    """

    def forward(self, x_BHSE: Tensor) -> Tensor:
        """Return the normalised heads, of the same shape."""
        return F.layer_norm(x_BHSE, (self.head_dim,), eps=self.eps) * self.weight_here()
