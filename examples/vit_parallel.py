"""Make the vision transformer of ``vit_plain.py`` parallel: tensor, sequence and pipeline ranks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trilith import layers as tl
from trilith.parallel_state import ParallelState, alone_or, local


class Attention(nn.Module):
    """Let each patch attend to all patches."""

    def __init__(self, dim: int, width: int, state: ParallelState | None) -> None:
        super().__init__()
        self.width = width
        self.qkv = tl.ColumnParallelLinear(dim, {"q": dim, "k": dim, "v": dim}, unit=width, state=state)
        self.out = tl.RowParallelLinear(dim, dim, unit=width, state=state)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self, dim: int, width: int, state: ParallelState | None) -> None:
        super().__init__()
        self.norm, self.mix = tl.LayerNorm(dim, state=state), Attention(dim, width, state)
        self.net_norm = tl.LayerNorm(dim, state=state)
        self.net = tl.MLP(dim, 4 * dim, state=state)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.net(self.net_norm(x))


class ViT(nn.Module):
    """Say which class each of ``images`` (B, 3, size, size) is of."""

    def __init__(
        self, classes=5, size=6, patch=2, dim=16, width=4, blocks=4, *, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        self.state, self.stage = alone_or(state), tl.Stage.of(blocks, state=state)
        self.patch, count = patch, (size // patch) ** 2
        if self.stage.first:
            self.patches = nn.Linear(3 * patch**2, dim)
            self.kind, self.places = nn.Embedding(1, dim), nn.Embedding(count + 1, dim)
        self.blocks = nn.ModuleDict({str(i): Block(dim, width, state) for i in self.stage.blocks})
        if self.stage.last:
            self.norm, self.head = tl.LayerNorm(dim, state=state), nn.Linear(dim, classes)

    def forward(self, x=None, *, images: Tensor, stage=None) -> Tensor:
        stage = stage or self.stage
        if stage.first:
            pieces = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
            pieces = self.patches(pieces.to(local(self.patches.weight).dtype))
            kind = local(self.kind.weight).expand(len(images), -1, -1)
            x = torch.cat([kind, pieces], 1) + local(self.places.weight)
            x = tl.split_to_tensor(x, self.state, dim=1) if self.state.sequence else x
        for i in stage.blocks:
            x = self.blocks[str(i)](x)
        if not stage.last:
            return x
        x = self.norm(x)
        x = tl.gather_from_tensor(x, self.state, dim=1) if self.state.sequence else x
        return self.head(x[:, 0])


def loss(logits: Tensor, samples: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum over the images, and how many they are."""
    return F.cross_entropy(logits, samples["kind"], reduction="sum"), len(logits)
