"""Make the decoder of ``latent_plain.py`` parallel: tensor, sequence, context and pipeline ranks."""

from torch import Tensor, nn
from trilith import layers as tl
from trilith.parallel_state import ParallelState, alone_or
from trilith.training import FunctionLoss


class LatentAttention(nn.Module):
    """Let each token attend to the tokens before it (DeepSeek-V2, section 2.1, without rotation)."""

    def __init__(self, dim: int, heads: int, latent: int, state: ParallelState | None) -> None:
        super().__init__()
        self.state, self.width = alone_or(state), dim // heads
        self.query = tl.ColumnParallelLinear(dim, dim, False, unit=self.width, state=state)
        self.down = tl.ReplicatedLinear(dim, latent, False, state=state)
        self.norm = tl.RMSNorm(latent, state=state)
        self.up = tl.ColumnParallelLinear(latent, 2 * dim, False, unit=2 * self.width, state=state)
        self.out = tl.RowParallelLinear(dim, dim, False, unit=self.width, state=state)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.norm(self.down(x))
        q = tl.split_heads(self.query(x), self.width)
        k, v = tl.split_heads(self.up(latent), 2 * self.width).chunk(2, -1)
        mixed = tl.causal_attention(q, k, v, tl.AttentionInputs(None, like=x, state=self.state).scope(None))
        out: Tensor = self.out(tl.merge_heads(mixed))
        return out


class Block(nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self, dim: int, heads: int, latent: int, state: ParallelState | None) -> None:
        super().__init__()
        self.mix_norm = tl.RMSNorm(dim, state=state)
        self.mix = LatentAttention(dim, heads, latent, state)
        self.net_norm = tl.RMSNorm(dim, state=state)
        self.net = tl.MLP(dim, 4 * dim, state=state)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        x = x + self.net(self.net_norm(x))
        return x


class Decoder(nn.Module):
    """Predict the next token of each token; places are told by a second table."""

    def __init__(
        self, vocab=97, dim=16, heads=4, latent=6, blocks=4, most=64, *, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        self.state, self.stage = alone_or(state), tl.Stage.of(blocks, state=state)
        if self.stage.first:
            self.embed = tl.VocabParallelEmbedding(vocab, dim, state=state)
            self.places = tl.PositionEmbedding(most, dim, state=state)
        self.blocks = nn.ModuleDict({str(i): Block(dim, heads, latent, state) for i in self.stage.blocks})
        if self.stage.last:
            self.norm, self.head = tl.RMSNorm(dim, state=state), tl.VocabParallelHead(dim, vocab, state=state)

    def forward(self, x: Tensor | None = None, *, input_ids: Tensor, stage: tl.Stage | None = None) -> Tensor:
        stage = stage or self.stage
        if stage.first:
            x = self.embed(input_ids)
            x = self.places(x, tl.default_positions(x, self.state, embedded=True))
        for i in stage.blocks:
            x = self.blocks[str(i)](x)
        return self.head(self.norm(x)) if stage.last else x


def loss(logits: Tensor, samples: dict[str, Tensor], *, state: ParallelState) -> tuple[Tensor, Tensor]:
    """Return the sum over the tokens that have a label, and how many they are."""
    labels = samples["labels"]
    losses = tl.vocab_parallel_cross_entropy(logits, labels, 97, state=state)
    return losses.sum(), (labels != -100).sum()


cut_loss = FunctionLoss(loss, sequence={"input_ids": 1, "labels": 1})
