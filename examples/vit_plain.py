"""Define a vision transformer in plain torch: patches of an image, looked at by a class token.

``vit_parallel.py`` is the same model made parallel, which ``vit.toml`` trains; ``diff`` the two.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Let each patch attend to all patches."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), Attention(dim, width)
        self.net_norm = nn.LayerNorm(dim)
        self.net = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.net(self.net_norm(x))


class ViT(nn.Module):
    """Say which class each of ``images`` (B, 3, size, size) is of."""

    def __init__(
        self, classes: int = 5, size: int = 6, patch: int = 2, dim: int = 16, width: int = 4, blocks: int = 4
    ) -> None:
        super().__init__()
        self.patch, count = patch, (size // patch) ** 2
        self.patches = nn.Linear(3 * patch**2, dim)
        self.kind, self.places = nn.Embedding(1, dim), nn.Embedding(count + 1, dim)
        self.blocks = nn.ModuleDict({str(i): Block(dim, width) for i in range(blocks)})
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, *, images: Tensor) -> Tensor:
        pieces = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        pieces = self.patches(pieces.to(self.patches.weight.dtype))
        kind = self.kind.weight.expand(len(images), -1, -1)
        x = torch.cat([kind, pieces], 1) + self.places.weight
        for block in self.blocks.values():
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0])


def loss(logits: Tensor, samples: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum over the images, and how many they are."""
    return F.cross_entropy(logits, samples["kind"], reduction="sum"), len(logits)
