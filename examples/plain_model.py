"""Define a model outside the zoo in plain torch: gated recurrences encode, a decoder attends to them.

It reads frames (B, S, features) and predicts the next of the tokens (B, T). ``custom_model.py`` is the same
model made parallel; ``diff`` the two.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Recurrence(nn.Module):
    """Compute ``h_t = a_t h_{t-1} + (1 - a_t) v_t`` for each channel by itself, and gate the output."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.value, self.forget, self.gate = (nn.Linear(dim, inner) for _ in range(3))
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        value, forget, gate = self.value(x), self.forget(x).sigmoid(), self.gate(x)
        h, states = torch.zeros_like(value[:, 0]), []
        for t in range(value.shape[1]):
            h = forget[:, t] * h + (1 - forget[:, t]) * value[:, t]
            states.append(h)
        out: Tensor = self.out(torch.stack(states, 1) * F.silu(gate))
        return out


class CrossAttention(nn.Module):
    """Let each token attend to the whole memory."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in (self.q(x), self.k(memory), self.v(memory))
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Recurrence, and in a decoder attention to the memory, and a feed-forward net."""

    def __init__(self, dim: int, heads: int, *, decoder: bool) -> None:
        super().__init__()
        self.mix_norm, self.mix = nn.LayerNorm(dim), Recurrence(dim, 2 * dim)
        if decoder:
            self.cross_norm, self.cross = nn.LayerNorm(dim), CrossAttention(dim, heads)
        self.up_norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        x = x + self.down(F.gelu(self.up(self.up_norm(x))))
        return x


class Transcriber(nn.Module):
    """Map frames (B, S, features) and tokens (B, T) to logits (B, T, vocab)."""

    def __init__(
        self,
        features: int = 6,
        vocab: int = 61,
        dim: int = 32,
        heads: int = 4,
        encoder: int = 2,
        decoder: int = 2,
    ) -> None:
        super().__init__()
        self.frames = nn.Linear(features, dim)
        self.encoder = nn.ModuleList([Block(dim, heads, decoder=False) for _ in range(encoder)])
        self.memory_norm = nn.LayerNorm(dim)
        self.embed = nn.Embedding(vocab, dim)
        self.decoder = nn.ModuleList([Block(dim, heads, decoder=True) for _ in range(decoder)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        memory = self.frames(source)
        for block in self.encoder:
            memory = block(memory)
        memory = self.memory_norm(memory)
        x = self.embed(tokens)
        for block in self.decoder:
            x = block(x, memory)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
