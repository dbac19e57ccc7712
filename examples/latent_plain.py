"""Define a decoder with latent attention in plain torch: keys and values are made from a narrow latent.

``latent_parallel.py`` is the same model made parallel, which ``latent.toml`` trains; ``diff`` the two.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LatentAttention(nn.Module):
    """Let each token attend to the tokens before it (DeepSeek-V2, section 2.1, without rotation)."""

    def __init__(self, dim: int, heads: int, latent: int) -> None:
        super().__init__()
        self.heads, width = heads, dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, latent, bias=False)
        self.norm = nn.RMSNorm(latent, eps=1e-6)
        self.up = nn.Linear(latent, 2 * heads * width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.norm(self.down(x))
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.up(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self, dim: int, heads: int, latent: int) -> None:
        super().__init__()
        self.mix_norm = nn.RMSNorm(dim, eps=1e-6)
        self.mix = LatentAttention(dim, heads, latent)
        self.net_norm = nn.RMSNorm(dim, eps=1e-6)
        self.net = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        x = x + self.net(self.net_norm(x))
        return x


class Decoder(nn.Module):
    """Predict the next token of each token; places are told by a second table."""

    def __init__(
        self, vocab: int = 97, dim: int = 16, heads: int = 4, latent: int = 6, blocks: int = 4, most: int = 64
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab, dim), nn.Embedding(most, dim)
        self.blocks = nn.ModuleDict({str(i): Block(dim, heads, latent) for i in range(blocks)})
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, vocab, bias=False)

    def forward(self, *, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.places(places)
        for block in self.blocks.values():
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(logits: Tensor, samples: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum over the tokens that have a label, and how many they are."""
    labels = samples["labels"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum(), (labels != -100).sum()
