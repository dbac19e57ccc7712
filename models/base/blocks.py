"""Join attention and feed-forward to the residual stream in a block. B batch S sequence D hidden"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ...layers import (
    Attention,
    AttentionInputs,
    ColumnParallelLinear,
    Cost,
    Dropout,
    GatedDeltaNet,
    LayerNorm,
    Mamba2,
    RMSNorm,
    RowParallelLinear,
    Tokens,
    cost_of,
    linears,
    sum_costs,
)
from ...parallel_state import ParallelState, alone_or


def branch(block: nn.Module, modules: Sequence[nn.Module], tokens: Tokens, *, scaled: bool = False) -> Cost:
    """Return the cost of modules whose output is added to the residual stream, ``scaled`` before that.

    Their backward holds the gradient of the residual stream until the gradient of their input is added to
    it. It is the gradient of their output, too, unless a factor, dropout or a norm comes after them.
    """
    layer = block.mixer if isinstance(block, RecurrentBlock) else block.attention
    waits = tokens.between_blocks(alone_or(getattr(layer, "state", None))).bytes(tokens.hidden)
    inner = [one for one in modules if not isinstance(one, nn.Identity)]
    after = [inner.pop()] if isinstance(inner[-1], Dropout | RMSNorm | LayerNorm) else []
    found = cost_of(inner[0], tokens)
    if isinstance(inner[0], RMSNorm) and found.kept_input and not tokens.fused:
        # The parts of its input's gradient are added to the residual stream's one by one.
        found = found.beside(-waits)
    found += sum_costs(inner[1:], tokens.after(inner[0]))
    made = tokens.after(*inner)
    if isinstance(inner[0], RMSNorm | LayerNorm) and found.kept_input == 0:
        # While the branch runs the residual stream is there, of which the norm has kept a copy.
        found += Cost(making=found.making + waits)
    if after or scaled:  # the output has a gradient of its own
        product = getattr(inner[-1], "out", None) or getattr(inner[-1], "down", None)
        if product is None:  # experts need it more than once, but not if they cast it first
            found = found.beside(waits * (tokens.compute == tokens.inner))
        else:
            last = cost_of(product, tokens).beside(waits)
            found += Cost(working=last.working, with_gradient=last.with_gradient)
        found += Cost(making=found.making + waits)
    return (found + sum_costs(after, made)).beside(waits)


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

    def cost(self, tokens: Tokens) -> Cost:
        scaled = self.scale != 1
        first = branch(self, [self.attention_norm, self.attention, self.dropout], tokens, scaled=scaled)
        tokens = tokens.after(self.attention_norm, self.attention)
        return first + branch(self, [self.mlp_norm, self.mlp, self.dropout], tokens, scaled=scaled)

    def _scaled(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.scale == 1 else x_BSD * self.scale


class AddNormBlock(PreNormBlock):
    """Put a norm on the residual stream after each branch (Vaswani et al. 2017; OPT 350M)."""

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = self.attention_norm(x_BSD + self.dropout(self.attention(x_BSD, inputs)))
        x_BSD = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))
        return x_BSD

    def cost(self, tokens: Tokens) -> Cost:
        first = branch(self, [self.attention, self.dropout], tokens)
        tokens = tokens.after(self.attention)
        first += cost_of(self.attention_norm, tokens)
        tokens = tokens.after(self.attention_norm)
        second = branch(self, [self.mlp, self.dropout], tokens)
        down = getattr(self.mlp, "down", None)
        if isinstance(down, RowParallelLinear):  # the norm keeps the sum with the product
            second += Cost(making=second.making + down.adding(tokens))
        return first + second + cost_of(self.mlp_norm, tokens.after(self.mlp))


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

    def cost(self, tokens: Tokens) -> Cost:
        scaled = self.scale != 1
        found = branch(self, [self.mixer_norm, self.mixer], tokens, scaled=scaled)
        tokens = tokens.after(self.mixer_norm, self.mixer)
        return found + branch(self, [self.mlp_norm, self.mlp], tokens, scaled=scaled)


class PostNormBlock(nn.Module):
    """Put a norm after each branch and none before it (OLMo 2)."""

    def __init__(self, attention: Attention, mlp: nn.Module, *, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.after_attention, self.mlp, self.after_mlp = attention, norm(), mlp, norm()

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(x_BSD, inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(x_BSD))
        return x_BSD

    def cost(self, tokens: Tokens) -> Cost:
        first = branch(self, [self.attention, self.after_attention], tokens)
        tokens = tokens.after(self.attention, self.after_attention)
        return first + branch(self, [self.mlp, self.after_mlp], tokens)


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

    def cost(self, tokens: Tokens) -> Cost:
        size = tokens.between_blocks(self.attention.state).bytes(tokens.hidden)
        norms, normed = [cost_of(self.attention_norm, tokens)], tokens.after(self.attention_norm)
        if self.two_norms:  # both of which keep the same input
            norms += [Cost(kept=-size), cost_of(self.mlp_norm, tokens)]
        first = next((one for _, one in linears(self.mlp)), None)
        # Both branches keep the same input, unless sequence parallelism gathers it for each.
        same = self.attention.qkv.keeps_input and first is not None and first.keeps_input
        shared = same and not self.two_norms and not self.attention.state.sequence
        # The gradient of what the feed-forward was given waits, too.
        found = (sum(norms, Cost()) + branch(self, [self.attention, self.dropout], normed)).beside(size)
        normed = tokens.after(self.mlp_norm) if self.two_norms else normed
        last = branch(self, [self.mlp, self.dropout], normed)
        # While the feed-forward runs, the sum so far is there, and what attention was given.
        given = self.two_norms and not self.attention.qkv.keeps_input
        if shared and isinstance(first, ColumnParallelLinear):  # attention still needs the same input then
            found += Cost(working=first.last_sum(tokens) + size)
        found += Cost(kept=-tokens.bytes(tokens.hidden) * shared) + last
        return found + Cost(making=last.making + size * (1 + given))


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

    def cost(self, tokens: Tokens) -> Cost:
        before = [self.attention_norm, self.attention, self.after_attention]
        after = [self.mlp_norm, self.mlp, self.after_mlp]
        return branch(self, before, tokens) + branch(self, after, tokens.after(*before))


Block = PreNormBlock | RecurrentBlock | PostNormBlock | SandwichBlock | ParallelBlock
