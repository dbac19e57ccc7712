"""Make the encoder-decoder of ``t5_plain.py`` parallel: tensor, sequence and pipeline ranks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trilith import layers as tl
from trilith.parallel_state import Cut, ParallelState, alone_or, declare, local


class Attention(nn.Module):
    """Attend to ``memory``, or to the input itself, with biases (heads, S, T)."""

    def __init__(self, dim: int, width: int, state: ParallelState | None) -> None:
        super().__init__()
        self.width = width
        self.q = tl.ColumnParallelLinear(dim, dim, False, unit=width, state=state)
        self.kv = tl.ColumnParallelLinear(dim, {"k": dim, "v": dim}, False, unit=width, state=state)
        self.out = tl.RowParallelLinear(dim, dim, False, unit=width, state=state)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = self.q(x), *self.kv(memory)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Distances(nn.Module):
    """Hold a number of each head for each distance between two places; far ones are alike."""

    def __init__(self, heads: int, state: ParallelState | None, farthest: int = 4) -> None:
        super().__init__()
        self.farthest = farthest
        self.table = nn.Embedding(2 * farthest + 1, heads // alone_or(state).tensor.size)
        declare(self.table, "weight", cut=Cut(1), state=state)

    def forward(self, tokens: Tensor, causal: bool) -> Tensor:
        """Return (B, heads, S, S), the same for all samples."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        apart = (at - at[:, None]).clamp(-self.farthest, self.farthest) + self.farthest
        bias = local(self.table.weight)[apart].permute(2, 0, 1)
        later = torch.full_like(bias[0], -torch.inf).triu(1) if causal else torch.zeros_like(bias[0])
        return (bias + later).repeat(len(tokens), 1, 1, 1)


class Block(nn.Module):
    """Attention, in the decoder also attention to the memory, and a feed-forward net."""

    def __init__(self, dim: int, width: int, decoder: bool, state: ParallelState | None) -> None:
        super().__init__()
        self.norm, self.mix = tl.RMSNorm(dim, state=state), Attention(dim, width, state)
        if decoder:
            self.cross_norm, self.cross = tl.RMSNorm(dim, state=state), Attention(dim, width, state)
        self.net_norm = tl.RMSNorm(dim, state=state)
        self.net = tl.MLP(dim, 4 * dim, act="relu", state=state)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        x = x + self.mix(normed, normed, bias)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.net(self.net_norm(x))


class T5(nn.Module):
    """Encode ``source`` (B, S), and predict the next of ``tokens`` (B, T)."""

    def __init__(self, vocab=31, dim=16, width=4, half=2, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.half, self.stage = half, tl.Stage.of(2 * half, state=state)
        own_blocks = self.stage.blocks
        if self.stage.first:
            self.embed = tl.VocabParallelEmbedding(vocab, dim, state=state)
        self.distances = nn.ModuleDict(
            {str(i): Distances(dim // width, state) for i in (0, half) if i in own_blocks}
        )
        self.blocks = nn.ModuleDict({str(i): Block(dim, width, i >= half, state) for i in own_blocks})
        if half in own_blocks:
            self.memory_norm = tl.RMSNorm(dim, state=state)
        if self.stage.last:
            self.norm, self.head = tl.RMSNorm(dim, state=state), tl.VocabParallelHead(dim, vocab, state=state)

    def forward(self, x=None, y=None, bias=None, *, source: Tensor, tokens: Tensor, stage=None) -> Tensor:
        stage = stage or self.stage
        if stage.first:
            x, y = self.embed(source), self.embed(tokens)
        for i in stage.blocks:
            decodes = i >= self.half
            if i in (0, self.half):
                bias = self.distances[str(i)](tokens if decodes else source, decodes)
            if i == self.half:
                x = self.memory_norm(x)
            block = self.blocks[str(i)]
            x, y = (x, block(y, bias, x)) if decodes else (block(x, bias), y)
        return self.head(self.norm(y)) if stage.last else (x, y, bias)


def loss(logits: Tensor, samples: dict[str, Tensor], *, state: ParallelState) -> tuple[Tensor, Tensor]:
    """Return the sum over the tokens that have a label, and how many they are."""
    labels = samples["labels"]
    losses = tl.vocab_parallel_cross_entropy(logits, labels, 31, state=state)
    return losses.sum(), (labels != -100).sum()
