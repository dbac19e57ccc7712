"""Define an encoder-decoder like T5 in plain torch: blocks share a table of biases by distance.

``t5_parallel.py`` is the same model made parallel, which ``t5.toml`` trains; ``diff`` the two.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Attend to ``memory``, or to the input itself, with biases (heads, S, T)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.q = nn.Linear(dim, dim, bias=False)
        self.k, self.v = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Distances(nn.Module):
    """Hold a number of each head for each distance between two places; far ones are alike."""

    def __init__(self, heads: int, farthest: int = 4) -> None:
        super().__init__()
        self.farthest = farthest
        self.table = nn.Embedding(2 * farthest + 1, heads)

    def forward(self, tokens: Tensor, causal: bool) -> Tensor:
        """Return (B, heads, S, S), the same for all samples."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        apart = (at - at[:, None]).clamp(-self.farthest, self.farthest) + self.farthest
        bias = self.table(apart).permute(2, 0, 1)
        later = torch.full_like(bias[0], -torch.inf).triu(1) if causal else torch.zeros_like(bias[0])
        return (bias + later).repeat(len(tokens), 1, 1, 1)


class Block(nn.Module):
    """Attention, in the decoder also attention to the memory, and a feed-forward net."""

    def __init__(self, dim: int, width: int, decoder: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(dim, eps=1e-6), Attention(dim, width)
        if decoder:
            self.cross_norm, self.cross = nn.RMSNorm(dim, eps=1e-6), Attention(dim, width)
        self.net_norm = nn.RMSNorm(dim, eps=1e-6)
        self.net = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        x = x + self.mix(normed, normed, bias)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.net(self.net_norm(x))


class T5(nn.Module):
    """Encode ``source`` (B, S), and predict the next of ``tokens`` (B, T)."""

    def __init__(self, vocab: int = 31, dim: int = 16, width: int = 4, half: int = 2) -> None:
        super().__init__()
        self.half = half
        self.embed = nn.Embedding(vocab, dim)
        self.distances = nn.ModuleDict({str(i): Distances(dim // width) for i in (0, half)})
        self.blocks = nn.ModuleDict({str(i): Block(dim, width, i >= half) for i in range(2 * half)})
        self.memory_norm = nn.RMSNorm(dim, eps=1e-6)
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, vocab, bias=False)

    def forward(self, *, source: Tensor, tokens: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(tokens)
        for i in range(2 * self.half):
            decodes = i >= self.half
            if i in (0, self.half):
                bias = self.distances[str(i)](tokens if decodes else source, decodes)
            if i == self.half:
                x = self.memory_norm(x)
            block = self.blocks[str(i)]
            x, y = (x, block(y, bias, x)) if decodes else (block(x, bias), y)
        return self.head(self.norm(y))


def loss(logits: Tensor, samples: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum over the tokens that have a label, and how many they are."""
    labels = samples["labels"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum(), (labels != -100).sum()
