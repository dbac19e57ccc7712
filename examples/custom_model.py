"""Make the model of ``plain_model.py`` tensor-, sequence- and pipeline-parallel; prove, train and save it.

    python examples/custom_model.py prove
    python examples/custom_model.py dry-run --tensor 2 --data 4 --zero 3
    torchrun --nproc-per-node 4 examples/custom_model.py train --tensor 2 --pipeline 2 --out run
    torchrun --nproc-per-node 2 examples/custom_model.py train --data 2 --zero 3 --out run --steps 60
    trilith convert run cut --tensor 2
    trilith convert run exported --to hf

docs/your_model.md goes through it.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trilith.checkpoints import describe_module, load, newest_of_run, save
from trilith.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    merge_heads,
    split_heads,
    split_to_tensor,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from trilith.models import Rule
from trilith.parallel_state import Layout, ParallelState, clip_gradients, initialize
from trilith.planner import MemoryPlan, Work, plan_memory, step_traffic
from trilith.training import Precision, Step, make_adamw, shard_batch, shard_over_data

VOCAB, FEATURES, AXES = 61, 6, ("tensor", "pipeline", "data")


class Recurrence(nn.Module):
    """Compute ``h_t = a_t h_{t-1} + (1 - a_t) v_t`` for each channel by itself: a rank has some of them."""

    def __init__(self, dim: int, inner: int, *, state: ParallelState | None = None) -> None:
        super().__init__()
        products = {"value": inner, "forget": inner, "gate": inner}
        self.enter = ColumnParallelLinear(dim, products, state=state)  # one collective for the three
        self.out = RowParallelLinear(inner, dim, state=state)

    def forward(self, x: Tensor) -> Tensor:
        value, forget, gate = self.enter(x)
        forget = forget.sigmoid()
        h, states = torch.zeros_like(value[:, 0]), []
        for t in range(value.shape[1]):  # all of the sequence is here, whatever lies between the blocks
            h = forget[:, t] * h + (1 - forget[:, t]) * value[:, t]
            states.append(h)
        out: Tensor = self.out(torch.stack(states, 1) * F.silu(gate))
        return out


class CrossAttention(nn.Module):
    """Let each token attend to the whole memory. ``unit``: each rank holds whole heads."""

    def __init__(self, dim: int, heads: int, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q = ColumnParallelLinear(dim, dim, unit=self.head_dim, state=state)
        self.kv = ColumnParallelLinear(dim, {"k": dim, "v": dim}, unit=self.head_dim, state=state)
        self.out = RowParallelLinear(dim, dim, unit=self.head_dim, state=state)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.head_dim) for t in (self.q(x), *self.kv(memory)))
        out: Tensor = self.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        return out


class Block(nn.Module):
    """Recurrence, and in a decoder attention to the memory, and a feed-forward net."""

    def __init__(self, dim: int, heads: int, *, decoder: bool, state: ParallelState | None = None) -> None:
        super().__init__()
        self.mix_norm, self.mix = LayerNorm(dim, state=state), Recurrence(dim, 2 * dim, state=state)
        if decoder:
            self.cross_norm = LayerNorm(dim, state=state)
            self.cross = CrossAttention(dim, heads, state=state)
        self.up_norm = LayerNorm(dim, state=state)
        self.up = ColumnParallelLinear(dim, 4 * dim, state=state)
        self.down = RowParallelLinear(4 * dim, dim, state=state)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        x = x + self.down(F.gelu(self.up(self.up_norm(x))))
        return x


class Transcriber(nn.Module):
    """Chain encoder blocks and then decoder blocks, or hold this pipeline rank's stage of them."""

    def __init__(
        self,
        dim: int = 32,
        heads: int = 4,
        encoder: int = 2,
        decoder: int = 2,
        *,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        describe_module(self, config=CONFIG, names=NAMES)  # for exports
        self.state = state or ParallelState.alone()
        self.stage, self.encoder_blocks = Stage.of(encoder + decoder, state=state), encoder
        here = self.stage.blocks
        if self.stage.first:
            self.frames = nn.Linear(FEATURES, dim)  # torch's own: whole on every rank
        self.encoder = nn.ModuleDict(
            {str(i): Block(dim, heads, decoder=False, state=state) for i in range(encoder) if i in here}
        )
        if encoder - 1 in here:
            self.memory_norm = LayerNorm(dim, state=state)
        if encoder in here:
            self.embed = VocabParallelEmbedding(VOCAB, dim, state=state)
        self.decoder = nn.ModuleDict(
            {
                str(i): Block(dim, heads, decoder=True, state=state)
                for i in range(decoder)
                if encoder + i in here
            }
        )
        if self.stage.last:
            self.norm = LayerNorm(dim, state=state)
            self.head = VocabParallelHead(dim, VOCAB, state=state)

    def forward(
        self,
        memory: Tensor | None = None,
        x: Tensor | None = None,
        *,
        source: Tensor,
        tokens: Tensor,
        stage: Stage | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits, or the inputs of the next stage.

        ``memory`` and ``x`` come from the previous stage. ``stage``: one of ``self.stage.parts``, if a rank
        holds several.
        """
        stage, first = stage or self.stage, self.encoder_blocks
        if stage.first:
            memory = self.frames(source)
            if self.state.sequence:  # from here on each rank has its own frames
                memory = split_to_tensor(memory, self.state, dim=1)
        for i in stage.blocks:
            if i < first:
                memory = self.encoder[str(i)](memory)
            else:
                x = self.decoder[str(i - first)](self.embed(tokens) if i == first else x, memory)
            if i == first - 1:
                memory = self.memory_norm(memory)
        if stage.last:
            logits: Tensor = self.head(self.norm(x))
            return logits
        assert memory is not None
        return memory if x is None else (memory, x)


def loss(
    logits: Tensor, samples: Mapping[str, Tensor], *, state: ParallelState | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum over the tokens, and their number: the step divides by the number of all ranks."""
    labels = samples["labels"]
    return vocab_parallel_cross_entropy(logits, labels, VOCAB, state=state).sum(), valid_tokens(labels)


#: Modules by our names and the plain model's, so that ``plain_model.Transcriber`` can load an export.
MODULES: list[tuple[str, str]] = []
for block in ("encoder.{i}", "decoder.{i}"):
    MODULES += [(f"{block}.mix.enter.{gate}", f"{block}.mix.{gate}") for gate in ("value", "forget", "gate")]
    MODULES += [(f"{block}.{name}",) * 2 for name in ("mix_norm", "mix.out", "up_norm", "up", "down")]
MODULES += [(f"decoder.{{i}}.cross.kv.{name}", f"decoder.{{i}}.cross.{name}") for name in ("k", "v")]
MODULES += [(f"decoder.{{i}}.{name}",) * 2 for name in ("cross_norm", "cross.q", "cross.out")]
MODULES += [(name, name) for name in ("frames", "memory_norm", "embed", "norm", "head")]
NAMES = [
    Rule(f"{ours}.{kind}", f"{plain}.{kind}")
    for ours, plain in MODULES
    for kind in ("weight", "bias")
    if kind == "weight" or ours not in ("embed", "head")
]
CONFIG = {"model_type": "transcriber", "architectures": ["Transcriber"]}


def batch(step: int, samples: int = 8, frames: int = 8, length: int = 8) -> dict[str, Tensor]:
    """Draw tokens that go up by a stride, and frames that tell the stride amid noise."""
    generator = torch.Generator().manual_seed(step)
    stride = torch.randint(1, FEATURES + 1, (samples, 1), generator=generator)
    start = torch.randint(VOCAB, (samples, 1), generator=generator)
    tokens = (start + stride * torch.arange(length + 1)) % VOCAB
    source = F.one_hot(stride - 1, FEATURES) + 0.3 * torch.randn(
        samples, frames, FEATURES, generator=generator
    )
    return {"source": source, "tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def train(layout: Layout, out: Path | None, steps: int, *, seed: int = 0) -> list[float]:
    """Train from the newest checkpoint in ``out`` on, in any layout; return the losses of the steps."""
    state = ParallelState.start(layout)
    model = shard_over_data(Transcriber(state=state), state, Precision())
    initialize(model, seed, state=state)
    optimizer = make_adamw(model, lr=1e-2)
    step, losses, first = Step(model, loss, micro_batch=1, state=state), [], 0
    if out is not None and newest_of_run(out, state):
        first = load(out, model, optimizer, state=state).step
    for number in range(first, steps):
        mean = step(shard_batch(batch(number), state))
        clip_gradients(model, 1.0, state=state)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean))
    if out is not None and first < steps:
        save(out, model, optimizer, step=steps, state=state)
    return losses


def dry_run(layout: Layout, rank: int = 0) -> MemoryPlan:
    """Plan the bytes that a rank will need, with a model that takes no memory and without starting ranks."""
    state = ParallelState.stand_in(layout, rank)
    with torch.device("meta"):
        model = Transcriber(state=state)
    work = Work(
        state, hidden=32, sequence_length=8, micro_batch=1, micro_batches=8 // layout.data, fused=False
    )
    samples = batch(0)
    plan = plan_memory(work, model, samples=samples, loss=loss)
    sent = sum(collective.wire for collective in step_traffic(work, model, samples=samples, loss=loss))
    print(f"{layout}: rank {rank} needs {plan.total:,} bytes and puts {sent:,} on the wire in a step")
    return plan


def prove() -> None:
    """Check that the model is the same in these layouts; an error names the first module that differs."""
    from trilith.testing import assert_layout_invariant

    layouts = [Layout(tensor=2), Layout(tensor=2, sequence=True), Layout(pipeline=2),
               Layout(tensor=2, pipeline=2, sequence=True), Layout.of(tensor=2, data=2, zero=3)]  # fmt: skip
    figures_of = assert_layout_invariant(Transcriber, batch(0, samples=4), layouts=layouts, loss=loss)
    for layout, figures in figures_of.items():
        print(f"{layout}: {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["prove", "train", "dry-run"])
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0, help="0 to 3")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="sequence parallelism along the tensor axis"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="the folder of the checkpoints")
    options = parser.parse_args()
    if options.what == "prove":
        return prove()
    sizes = {axis: getattr(options, axis) for axis in (*AXES, "zero")}
    layout = Layout.of(sequence=options.sequence_parallel, **sizes)
    if options.what == "dry-run":
        dry_run(layout)
        return None
    losses = train(layout, options.out, options.steps)
    if losses and torch.distributed.get_rank() == 0:
        print(f"{layout}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
