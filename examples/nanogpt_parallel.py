"""Make nanoGPT's model parallel, prove it and train it; docs/nanogpt.md goes through this file."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import trilith as tl
from torch import nn
from torch.nn import functional as F
from trilith import ColumnParallelLinear, ParallelState, RowParallelLinear
from trilith.layers import LayerNorm, PositionEmbedding, VocabParallelEmbedding
from trilith.parallel_state import local


@dataclass
class GPTConfig:
    """Hold the hyper-parameters, at a size for tests."""

    block_size: int = 64
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    bias: bool = False
    state: ParallelState | None = None


class CausalSelfAttention(nn.Module):
    """Mix the tokens before each one."""

    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        heads = {"unit": self.head_size, "bias": config.bias, "state": config.state}
        qkv = dict.fromkeys(("q", "k", "v"), config.n_embd)
        self.c_attn = ColumnParallelLinear(config.n_embd, qkv, **heads)
        self.c_proj = RowParallelLinear(config.n_embd, config.n_embd, **heads)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (-1, self.head_size)).transpose(1, 2) for y in self.c_attn(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Compute the feed-forward of a block."""

    def __init__(self, config):
        super().__init__()
        C, shared = config.n_embd, {"bias": config.bias, "state": config.state}
        self.c_fc = ColumnParallelLinear(C, 4 * C, **shared)
        self.c_proj = RowParallelLinear(4 * C, C, **shared)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    """Compute one block."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias, state=config.state)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias, state=config.state)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Compute logits from token ids."""

    def __init__(self, config):
        super().__init__()
        self.wte = VocabParallelEmbedding(config.vocab_size, config.n_embd, state=config.state)
        self.wpe = PositionEmbedding(config.block_size, config.n_embd, state=config.state)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=config.bias, state=config.state)

    def forward(self, idx):
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.wpe(self.wte(idx), pos)
        for block in self.h:
            x = block(x)
        return self.wte.project(self.ln_f(x))  # tied


# Above is the model, which `diff nanogpt.py nanogpt_parallel.py` compares. Below is what one does with it.


def build(*, state=None):
    return GPT(GPTConfig(state=state))


def loss(logits, samples, *, state=None):
    """Return the sum over the tokens, and how many they are."""
    from trilith.layers import valid_tokens, vocab_parallel_cross_entropy

    labels = samples["labels"]
    losses = vocab_parallel_cross_entropy(logits, labels, GPTConfig.vocab_size, state=state)
    return losses.sum(), valid_tokens(labels)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    first, stride = (torch.randint(1, GPTConfig.vocab_size, (4, 1), generator=generator) for _ in range(2))
    tokens = (first + stride * torch.arange(17)) % GPTConfig.vocab_size
    return {"idx": tokens[:, :-1], "labels": tokens[:, 1:]}


class ForgottenSum(MLP):
    """Make a mistake on purpose: each rank multiplies its part, and nothing adds the parts up."""

    def forward(self, x):
        return F.linear(F.gelu(self.c_fc(x)), local(self.c_proj.weight))


def build_with_bug(*, state=None):
    model = build(state=state)
    for block in model.h:
        block.mlp.__class__ = ForgottenSum
    return model


def prove(model=build):
    """Compare the model in three layouts with itself on one process, in fp64."""
    layouts = [tl.Layout(tensor=2), tl.Layout(tensor=2, sequence=True), tl.Layout.of(data=2, zero=3)]
    for layout, figures in tl.assert_layout_invariant(model, batch(0), layouts=layouts, loss=loss).items():
        print(f"{layout}: gradients differ by {figures.gradients:.1e} at most")


def train(steps, **axes):
    """Train under torchrun in any layout, from the newest checkpoint of any other."""
    state = tl.ParallelState.start(tl.Layout.of(**axes))
    model = build(state=state)
    tl.shard_over_data(model, state, tl.Precision())
    tl.initialize(model, 0, state=state)
    optimizer = tl.make_adamw(model, lr=1e-2)
    step = tl.Step(model, loss, micro_batch=1, state=state)
    update = tl.Update(model, optimizer, clip=1.0, state=state)
    first, run = 0, Path("nanogpt-run")
    if run.exists():
        first = tl.load(run, model, optimizer, state=state).step
    for number in range(first, steps):
        mean = update(step.launch(tl.shard_batch(batch(number), state))).loss
        if state.rank == 0:
            print(f"step {number + 1}: loss {float(mean):.4f}")
    tl.save(run, model, optimizer, step=steps, state=state)


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "train":
        axes = dict(word.split("=") for word in words[1:])
        train(int(words[0]), **{axis: int(size) for axis, size in axes.items()})
    else:
        prove({"prove": build, "bug": build_with_bug}[command])
