"""Join attention and feed-forward to the residual stream in a block. B batch S sequence D hidden"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ...layers import (
    Attention,
    AttentionInputs,
    Dropout,
    GatedDeltaNet,
    Mamba2,
)
from ...parallel_state import ParallelState


class PreNormBlock(nn.Module):
    """Put a norm before each branch (GPT-2, Llama).

    ``dropout`` is that of what each branch adds, and ``scale`` multiplies it (Granite; Yang et al. 2022).
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        scale: float = 1.0,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = norm(), attention, norm(), mlp
        self.dropout = Dropout(dropout, state=state) if dropout else nn.Identity()
        self.scale = scale

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self._scaled(self.dropout(self.attention(self.attention_norm(x_BSD), inputs)))
        x_BSD = x_BSD + self._scaled(self.dropout(self.mlp(self.mlp_norm(x_BSD))))
        return x_BSD

    def _scaled(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.scale == 1 else x_BSD * self.scale


class AddNormBlock(PreNormBlock):
    """Put a norm on the residual stream after each branch (Vaswani et al. 2017; OPT 350M)."""

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = self.attention_norm(x_BSD + self.dropout(self.attention(x_BSD, inputs)))
        x_BSD = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))
        return x_BSD


class RecurrentBlock(nn.Module):
    """Put a norm before each branch, of which the first is recurrent (Qwen3-Next).

    ``scale`` multiplies what each branch adds (Granite 4). Its names are not those of a block with attention,
    since in a hybrid files tell the two apart.
    """

    def __init__(
        self,
        mixer: GatedDeltaNet | Mamba2,
        mlp: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.mixer_norm, self.mixer, self.mlp_norm, self.mlp = norm(), mixer, norm(), mlp
        self.scale = scale

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self._scaled(self.mixer(self.mixer_norm(x_BSD), inputs))
        x_BSD = x_BSD + self._scaled(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD

    def _scaled(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.scale == 1 else x_BSD * self.scale


class PostNormBlock(nn.Module):
    """Put a norm after each branch and none before it (OLMo 2)."""

    def __init__(self, attention: Attention, mlp: nn.Module, *, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.after_attention, self.mlp, self.after_mlp = attention, norm(), mlp, norm()

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(x_BSD, inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(x_BSD))
        return x_BSD


class ParallelBlock(nn.Module):
    """Add both branches to the residual stream at once, each from the same hidden states.

    Both branches are given what one norm makes (GPT-J, Cohere) or, with ``two_norms``, each has its own norm
    (GPT-NeoX, Falcon 40B). ``dropout`` is that of what each branch adds.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        two_norms: bool = False,
        dropout: float = 0.0,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        if two_norms:
            self.mlp_norm = norm()
        self.mlp, self.two_norms = mlp, two_norms
        self.dropout = Dropout(dropout, state=state) if dropout else nn.Identity()

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        z_BSD = self.mlp_norm(x_BSD) if self.two_norms else y_BSD
        x_BSD = x_BSD + self.dropout(self.attention(y_BSD, inputs)) + self.dropout(self.mlp(z_BSD))
        return x_BSD


class SandwichBlock(nn.Module):
    """Put a norm before and after each branch (Gemma 2)."""

    def __init__(self, attention: Attention, mlp: nn.Module, *, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.after_attention = norm(), attention, norm()
        self.mlp_norm, self.mlp, self.after_mlp = norm(), mlp, norm()

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


Block = PreNormBlock | RecurrentBlock | PostNormBlock | SandwichBlock | ParallelBlock
