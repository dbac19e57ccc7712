"""Compare a traced block with what the same block keeps and needs on a CPU, in every family and cut."""

import json
import random
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.configs import FOLDER, MODELS
from torch import nn
from trilith.layers import AttentionInputs, checkpoint_blocks
from trilith.models import FAMILIES, LoraConfig, adapted, family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.parallel_state.engine.weight_gradients import compute_input_gradients
from trilith.planner.stage_costs import StageBytes, StageCost
from trilith.planner.step_shape import Work
from trilith.simulation.kinds_of_blocks import signature
from trilith.simulation.micro_batch import MicroBatch
from trilith.simulation.pieces import ModelPieces, shapes_only
from trilith.simulation.traced import trace
from trilith.testing import LiveBytes, run_parallel

#: Models of one block by name: some fields of one that they are ``like``, ``without`` others.
_BLOCKS = json.loads((FOLDER / "blocks" / "one_block.json").read_text(encoding="utf-8"))
#: Of the families, whose blocks are all compared without checkpointing, those that are also in a drawn mode.
DRAWN = random.Random(0).sample(sorted(name for name in MODELS if "-" not in name), 8)
HYBRIDS = ("qwen3_next", "qwen3_5_text", "granitemoehybrid")
STACKS = {"target_parameters": ("experts.gate_up_proj", "experts.down_proj")}


def one_block(name):
    own = dict(_BLOCKS[name])
    like, without = own.pop("like", None), own.pop("without", ())
    raw = {} if like is None else one_block(like)
    return {key: value for key, value in raw.items() if key not in without} | own


ALONE = Layout()


@dataclass(frozen=True)
class Row:
    """Describe a block: its model, fields of it that are ``changed``, what is adapted, and its micro-batch.

    ``staying``: whether the gradients of its weights stay, as before a sum over data ranks. ``in_two``:
    whether its backward has two parts.
    """

    model: str
    changed: tuple[tuple[str, Any], ...] = ()
    lora: tuple[tuple[str, Any], ...] | None = None
    layout: Layout = ALONE
    mode: str = "none"
    dtype: torch.dtype = torch.float32
    rows: int = 2
    length: int = 64
    staying: bool = False
    in_two: bool = False

    def __str__(self) -> str:
        words = [self.model, *(f"{key}={value}" for key, value in self.changed), self.mode]
        words += [] if self.lora is None else [f"lora {dict(self.lora)}"]
        words += [str(self.layout)] * (self.layout.world > 1)
        words += [str(self.dtype).removeprefix("torch."), f"{self.rows}x{self.length}"]
        return " ".join(words + ["staying"] * self.staying + ["in two"] * self.in_two)

    @property
    def raw(self):
        """Return the config, whose rows may be long enough."""
        raw = MODELS[self.model] if self.model in MODELS else one_block(self.model)
        long = {key: 512 for key in raw if key in ("max_position_embeddings", "n_positions")}
        return raw | long | dict(self.changed)

    def built(self, state, device):
        """Return the model, and one of its blocks of each kind."""
        family = family_of(self.raw)
        if self.lora is not None:
            family = adapted(family, LoraConfig(r=4, **dict(self.lora)))
        model = family.build(family.from_hf(self.raw), state=state, device=device)
        return model.to(self.dtype), [*{signature(block): block for block in model.layers.values()}.values()]


def traced(row):
    """Return of each block the bytes kept, and the most of its backward, or what its first part leaves."""
    state = ParallelState.alone() if row.layout.world == 1 else ParallelState.stand_in(row.layout)
    model, blocks = row.built(state, "meta")
    batch = MicroBatch(row.rows, row.length // row.layout.context, row.dtype.itemsize, gpu=False)
    pieces = ModelPieces(model, state)
    for block in blocks:
        piece = pieces.block(block, batch, reached=True)
        trace = piece.under(row.mode, in_two=row.in_two)
        most = trace.with_gradients if row.staying else trace.with_gradient
        yield trace.kept, trace.kept + (trace.between if row.in_two else most)


def measured(row, planned):
    """Return the same of each block of a real model. ``planned``: the bytes kept, for which ranks wait."""
    state = ParallelState.alone() if row.layout.world == 1 else ParallelState.start(row.layout)
    model, blocks = row.built(state, "cpu")
    initialize(model, 0, state=state)
    checkpoint_blocks(enumerate(blocks), row.mode, keep_attention=row.layout.context == 1)
    cut = row.layout.context * (row.layout.tensor if row.layout.sequence else 1)
    shape = (row.rows, row.length // cut, model.config.hidden_size)
    source = torch.randn(shape, dtype=row.dtype)
    inputs = AttentionInputs(
        None, None, like=source, layers=model.attentions, rotary=model.rotary, state=state
    )
    # Threads of gloo may hold what was sent a little longer, at one time and not at another.
    times = 3 if row.layout.world > 1 else 1
    return [
        tuple(map(min, zip(*(held(row, block, inputs, source, kept) for _ in range(times)), strict=True)))
        for block, (kept, _) in zip(blocks, planned, strict=True)
    ]


def settled(memory, layout, expected):
    """Return the bytes that stay: a thread of gloo may hold the last message a little longer."""
    sizes = [memory.now]
    while layout.world > 1 and min(sizes) > expected and len(sizes) < 20:
        time.sleep(0.01)
        sizes.append(memory.now)
    return min(sizes)


def held(row, block, inputs, source, planned):
    factor, trained = (
        torch.randn_like(source),
        [weight for weight in block.parameters() if weight.requires_grad],
    )
    source.grad = None
    for weight in block.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad and not row.staying else None
    with LiveBytes() as memory:
        before = memory.now
        if row.in_two:
            x = (source * 1.0).requires_grad_()
            outputs = [block(x, inputs)]
            kept, grads = memory.now - before - outputs[0].nbytes, [torch.ones_like(outputs[0])]
            left = compute_input_gradients(outputs, grads, [x], iter(trained))
            outputs.clear(), grads.clear()
            x.grad = None
            return kept, memory.now - before + 0 * len(left)
        # As between blocks: only the block needs its input, and the gradient is a tensor of its own.
        total = (block(source.requires_grad_() * 1.0, inputs) * factor).sum()
        others = before + total.nbytes
        kept = settled(memory, row.layout, planned + others) - others
        memory.peak = 0
        total.backward()
    return kept, memory.peak - before


def adapters(name, **fields):
    return Row(name, lora=tuple(fields.items()))


def few(name, length, **fields):
    """Return a row of few tokens, beside which weights are many."""
    return Row(name, tuple(fields.items()), rows=1, length=length)


def many(name, **fields):
    return Row(name, tuple(fields.items()), rows=4, length=256)


def cut(name, **fields):
    return Row(name, layout=Layout.of(**fields), length=256 if "context" in fields else 64)


def drawn(name, number):
    """Return a row of this model in a drawn mode and dtype, with gradients that stay or are added."""
    draw = random.Random(f"{name} {number}")
    return Row(
        name,
        mode=draw.choice(["none", "selective", "full"]),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        rows=draw.choice([1, 2]),
        length=128 if name in HYBRIDS else 64,  # two chunks of a recurrence
        staying=draw.random() < 0.5,
    )


def rows():
    """Yield every row, and whether the default suite has it."""
    for name in _BLOCKS:
        yield Row(name), True
    for name in MODELS:
        yield drawn(name, 0), name in DRAWN
        yield drawn(name, 1), False
        yield Row(name, in_two=True), name in ("qwen3_next", "llama", "mixtral", "deepseek_v3")
    for adapted_row in (
        adapters("gpt_oss-window", **STACKS),
        adapters("deepseek_v2"),
        adapters("granitemoehybrid-mamba", **STACKS),
        adapters("qwen3_next-delta-net"),
        adapters("granite"),  # a product before a factor
        adapters("mixtral", **STACKS),
        adapters("mixtral", **STACKS, target_modules=()),
        adapters("gpt2", lora_dropout=0.05),
        adapters("llama", lora_dropout=0.05, target_modules=("q_proj", "v_proj")),
    ):
        yield adapted_row, adapted_row.model in ("deepseek_v2", "granitemoehybrid-mamba", "mixtral", "gpt2")
        yield replace(adapted_row, mode="full", dtype=torch.bfloat16), False
    # Of few tokens, beside which weights are many, and of many, whose activations are.
    for few_tokens in (
        few("mixtral", 64, intermediate_size=256),
        few("deepseek_v3", 16, q_lora_rank=256, qk_nope_head_dim=64, v_head_dim=4, first_k_dense_replace=3),
        few("gemma", 16, head_dim=64, intermediate_size=16),
    ):
        yield few_tokens, few_tokens.model == "mixtral"
        yield replace(few_tokens, staying=True), few_tokens.model != "mixtral"
    yield many("mixtral", intermediate_size=256), True
    yield many("cohere", intermediate_size=4, head_dim=4), True
    yield many("gpt2", n_inner=400, resid_pdrop=0.1), True
    # With few tokens the gradients of a product's weights, which wait together for a sum, are the worst.
    for name in ("llama", "phi3"):
        yield replace(cut(name, tensor=2), rows=1, length=16), True
        yield replace(cut(name, tensor=2, sequence=True), rows=1, length=16), False
    for name in ("gpt2", "gemma2", "cohere", "deepseek_v2", "qwen3_next", "falcon"):
        yield cut(name, context=2), name in ("deepseek_v2", "qwen3_next", "gemma2")
        yield cut(name, context=2, ring=True), name == "gemma2"
    for name in ("mixtral", "deepseek_v3", "qwen3_next"):
        yield replace(cut(name, tensor=2, sequence=True), mode="selective"), name == "mixtral"
        yield replace(cut(name, tensor=2, sequence=True), mode="full"), False


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=[] if first else pytest.mark.slow) for row, first in rows()]
)
def test_a_traced_block_keeps_and_needs_what_a_block_does(row):
    """It keeps the same to the byte; what its backward needs lies within half a percent. Ranks are alike."""
    several, expected = row.layout.world > 1, [*traced(row)]
    if several:
        ranks = run_parallel(measured, row.layout.world, row, expected, timeout=120)
    else:
        ranks = [measured(row, expected)]
    for blocks in ranks:
        for (kept, most), (planned, needed) in zip(blocks, expected, strict=True):
            assert kept == planned and 0.995 < most / needed < 1.005


def test_every_family_has_a_block():
    assert {one_block(name)["model_type"] for name in _BLOCKS} == FAMILIES.keys()


def test_blocks_before_the_last_one_keep_all_until_the_second_part_of_a_backward():
    """A stage of two blocks, traced as one, leaves what the plan of the stage adds up from its blocks."""
    row, state = Row("qwen3_next", length=64), ParallelState.stand_in(Layout.of(pipeline=2), 1)
    model, _ = row.built(ParallelState.alone(), "meta")
    batch = MicroBatch(row.rows, row.length, row.dtype.itemsize, gpu=False)
    pieces, pair = ModelPieces(model, ParallelState.alone()), nn.ModuleList([*model.layers.values()][:2])
    with shapes_only([pair], batch):
        inputs = pieces._inputs(batch, pair)
        together = trace(
            lambda x: pair[1](pair[0](x, inputs), inputs),
            pieces._hidden(batch),
            [*pair.parameters()],
            in_two=True,
        )
    parts = {number: pieces.block(block, batch, reached=True) for number, block in enumerate(pair)}
    stage = StageCost(False, parts, (), frozenset(parts))
    work = Work(state, model.config.hidden_size, row.length, row.rows, 4, fused=False, schedule="zbv")
    stage_bytes = StageBytes(stage, work, gathers=False, own_input=False, largest=0)
    assert stage_bytes.halfway == pytest.approx(together.between, rel=1e-4)  # but for a number or two
    assert sum(piece.in_two.between for piece in parts.values()) < 0.99 * together.between


def test_it_counts_what_lives_and_the_worst_moment():
    kept, outside = torch.zeros(10, dtype=torch.float64), torch.zeros(10)
    with LiveBytes([kept]) as live:
        part = outside[:5]  # of what is not counted
        assert (len(part), live.now) == (5, 80)
        first = torch.ones(100, dtype=torch.float32)
        view = first[:50]  # of what is counted already
        del first
        second = view * 2
        assert len(torch.empty(100, device="meta")) == 100  # which has no memory
        assert live.now == 80 + 400 + 200
        del view
        assert live.now == 80 + 200
        del second
    assert (live.now, live.peak) == (80, 680)


def test_storages_may_die_in_another_thread_while_they_are_counted():
    switch = sys.getswitchinterval()
    with LiveBytes() as live:
        tensors = [torch.ones(8) for _ in range(4000)]
        dropping = threading.Thread(target=tensors.clear)
        sys.setswitchinterval(1e-6)
        try:
            dropping.start()
            while dropping.is_alive():
                assert live.now >= 0
        finally:
            sys.setswitchinterval(switch)
            dropping.join()
    assert live.now == 0
