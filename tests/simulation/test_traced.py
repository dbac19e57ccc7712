"""Traces of more rows and rounds follow from those of few; a seeded fault changes what is traced."""

import random

import pytest
import torch
from support.configs import MODELS
from trilith.layers import RowParallelLinear, leave_tensor
from trilith.layers.attention import blockwise
from trilith.layers.rounds import rounds
from trilith.models import family_of, published_size
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.planner import sampled
from trilith.simulation import operators, pieces
from trilith.simulation.micro_batch import MicroBatch
from trilith.simulation.operators import facts_of
from trilith.simulation.pieces import ModelPieces
from trilith.simulation.recorder import Operator, Recorder
from trilith.simulation.traced import trace
from trilith.simulation.without_numbers import shapes_only

FAMILIES = sorted(name for name in MODELS if "-" not in name)
ROWS, LENGTH = 2, 64
QUICK = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "bloom")
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in QUICK]


def model_of(name, state, device="cpu"):
    config = family_of(MODELS[name]).from_hf(MODELS[name])
    return family_of(MODELS[name]).build(config, state=state, device=device)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_block_with_shared_experts_sends_what_one_with_a_feed_forward_does(name, sequence):
    state = ParallelState.stand_in(Layout.of(tensor=2, sequence=sequence), 0)
    model = model_of(name, state, "meta")
    first, *_, last = model.layers.values()
    assert last.mlp.shared is not None and not hasattr(first.mlp, "shared")
    batch = MicroBatch(ROWS, LENGTH, 4, gpu=False)
    sent = [ModelPieces(model, state).block(block, batch, reached=True) for block in (first, last)]
    assert sorted(map(str, sent[0].plain.collectives)) == sorted(map(str, sent[1].plain.collectives))
    if name == "glm4_moe":  # latents are gathered, too
        assert len(sent[0].plain.collectives) == (8 if sequence else 4)


@pytest.mark.parametrize(("name", "mode"), [("mixtral", "none"), ("qwen3_next", "full")])
def test_what_is_remembered_of_fake_tensors_is_what_torch_gives(name, mode, monkeypatch):
    state = ParallelState.stand_in(Layout.of(tensor=2, context=2))
    block = next(iter((model := model_of(name, state, "meta")).layers.values()))
    batch = MicroBatch(ROWS, LENGTH, 4, gpu=False)

    def traced():
        return ModelPieces(model, state).block(block, batch, reached=True).under(mode)

    traced()
    remembered = traced()
    monkeypatch.setattr(operators, "facts_of", lambda func: facts_of(func)._replace(gives=None))
    assert traced() == remembered


def test_a_recorder_around_another_sees_what_is_remembered():
    with shapes_only([], MicroBatch(1, 1, gpu=False)), Recorder() as outer, Recorder() as inner:
        made = [(torch.empty(3, 4) + 1).mT.exp() for _ in range(2)]
        assert outer.now == inner.now == 2 * 12 * 4
        del made


def sums_twice(self, x):
    return leave_tensor(leave_tensor(x @ self.weight.to(x.dtype).mT, self.state), self.state)


def keeps_longer(self, x):
    return leave_tensor((x * 1.0 * x.sigmoid()) @ self.weight.mT, self.state)


@pytest.mark.parametrize("fault", [sums_twice, keeps_longer])
def test_a_fault_changes_what_is_traced(fault, monkeypatch):
    state = ParallelState.stand_in(Layout.of(tensor=2))
    batch, found = MicroBatch(ROWS, LENGTH), []
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(RowParallelLinear, "forward", fault)
        model = model_of("llama", state, device="meta")
        block = next(iter(model.layers.values()))
        found.append(ModelPieces(model, state).block(block, batch, reached=True).plain)
    right, changed = found
    if fault is sums_twice:
        assert len(changed.collectives) > len(right.collectives)
    else:
        assert changed.kept > right.kept


def test_what_a_checkpointed_block_keeps_is_cut_over_the_tensor_ranks_under_sequence_parallelism():
    family, batch = family_of(MODELS["llama"]), MicroBatch(ROWS, LENGTH)
    config, kept = family.from_hf(MODELS["llama"]), []
    for layout in (Layout(), Layout(tensor=2), Layout(tensor=2, sequence=True)):
        model = sampled(family, config, layout)
        kept.append(model.pieces.block(model.block(0), batch, reached=True).under("full").kept)
    assert kept == [ROWS * LENGTH * config.hidden_size * batch.compute // ranks for ranks in (1, 1, 2)]


@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
def test_more_rows_of_a_micro_batch_follow_from_two_smaller_ones(family, monkeypatch):
    """Bytes, collectives and FLOPs are affine in the rows: equal to a trace of all rows, in a drawn mode.

    Scores that are written out are not: a few rows' fit into one slice.
    """
    monkeypatch.setattr(blockwise, "_AT_ONCE", 2**16)
    raw, draw = MODELS[family], random.Random(family)
    layout = draw.choice([Layout(), Layout(tensor=2, sequence=True), Layout(context=2, ring=True)])
    try:
        model = sampled(family_of(raw), family_of(raw).from_hf(raw), layout)
    except BadInput:  # not every family can be cut so
        model = sampled(family_of(raw), family_of(raw).from_hf(raw), Layout())
    block, mode = model.block(0), draw.choice(["none", "selective", "full"])
    batch = MicroBatch(draw.choice([8, 9]), 64, draw.choice([2, 4]), gpu=draw.random() < 0.5)
    extended = model.pieces.block(block, batch, reached=True, kind="extended").under(mode)
    monkeypatch.setattr(pieces, "_FEW_ROWS", 9)
    whole = model.pieces.block(block, batch, reached=True, kind="whole").under(mode)
    assert extended == whole and extended.instants


@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
def test_more_context_ranks_follow_from_four(family, monkeypatch):
    """A block's trace equals that of all ranks, around a ring and with gathered keys, in a drawn mode."""
    raw, draw = MODELS[family], random.Random(family)
    for ring in (False, True):
        layout = Layout(context=draw.randint(6, 9), ring=ring)
        try:
            model = sampled(family_of(raw), family_of(raw).from_hf(raw), layout)
        except BadInput:  # not every family can be cut so
            return
        mode, in_two = draw.choice([("none", True), ("none", False), ("selective", False), ("full", False)])
        kind, batch = draw.choice(model.kinds), MicroBatch(2, 64, 2, gpu=True)

        def take(block=model.blocks[kind], pieces=model.pieces, mode=mode, in_two=in_two, batch=batch):
            fresh = ModelPieces(pieces.model, pieces.state)
            return fresh.block(block, batch, reached=True).under(mode, in_two=in_two)

        with monkeypatch.context() as patch:
            trace_of_few_rounds(take, patch)


def all_rounds(recorder, rounds, of_ranks):
    recorder.sliced = recorder.sliced or not of_ranks
    for each in rounds:
        if not of_ranks:
            recorder.end_chain()
        yield each
    if not of_ranks:
        recorder.end_chain()


def trace_of_few_rounds(take, monkeypatch):
    """Return what ``take`` traces of a loop of many rounds, of which a recorder runs few: what all give."""
    take()  # the first copies numbers of the host
    few = take()
    monkeypatch.setattr(Recorder, "_few", all_rounds)
    whole = take()
    assert few == whole and few.instants == whole.instants
    return few


CHUNKS = [(0, 2048), (1024, 1024), (100_000, 1024), (1280, 2560), (256, 2000)]
CUTS = [Layout(), Layout(tensor=2, sequence=True), Layout(tensor=2)]
#: In every run: each chunk of one family or the other, in one layout or another.
LOSSES = [
    pytest.param(size, *tokens, cut, marks=[pytest.mark.slow] * ((number + first + place) % 3 > 0))
    for number, tokens in enumerate(CHUNKS)
    for first, size in enumerate(("llama-3.2-1b", "gemma-2-2b"))
    for place, cut in enumerate(CUTS)
]


@pytest.mark.parametrize(("size", "chunk", "tokens", "layout"), LOSSES, ids=str)
def test_a_long_loss_is_traced_from_few_rows_and_chunks(size, chunk, tokens, layout, monkeypatch):
    size, batch = published_size(size), MicroBatch(1, tokens, 2, gpu=True)
    sample = sampled(size.family, size.config, layout).pieces

    def take():
        return ModelPieces(sample.model, sample.state).loss(batch, chunk=chunk, sums=4).plain

    assert trace_of_few_rounds(take, monkeypatch).sliced


SLICED = [("gemma2", {}), ("gemma2", {"context": 2, "ring": True}), ("gpt_oss", {})]
SLICED += [("falcon-rw", {"tensor": 2, "sequence": True})]
MODES = [("none", False), ("none", True), ("selective", False)]
#: Of each model and layout one or two ways are in every run.
ATTENTIONS = [
    pytest.param(*sliced, *mode, gpu, marks=[pytest.mark.slow] * ((2 * number + gpu + place) % 4 > 0))
    for place, sliced in enumerate(SLICED)
    for number, mode in enumerate(MODES)
    for gpu in (False, True)
]


def test_of_many_rounds_three_run_and_all_are_noted():
    with Recorder() as recorder:
        x = torch.zeros(4)
        before, ran = len(recorder.steps), [number for number in rounds(range(10)) if x.neg() is not None]
    assert ran == [0, 1, 9] and len(recorder.steps) - before == 10
    assert [*rounds(range(10))] == [*range(10)]


def test_of_what_a_new_tensor_is_like_nothing_is_read():
    x = torch.zeros(1000)
    with Recorder() as recorder:
        x.new_zeros(2), torch.full_like(x, 2.0)
    sizes = {each.name: each.moved for each in recorder.steps if isinstance(each, Operator)}
    assert sizes["aten::new_zeros"] == 8 and sizes["aten::full_like"] == x.nbytes


@pytest.mark.parametrize(("model", "axes", "mode", "in_two", "gpu"), ATTENTIONS, ids=str)
def test_attention_is_traced_from_few_slices_of_its_scores(model, axes, mode, in_two, gpu, monkeypatch):
    monkeypatch.setattr(blockwise, "_AT_ONCE", 2**14)
    layout = Layout.of(**axes)
    state = ParallelState.stand_in(layout) if axes else ParallelState.alone()
    made = model_of(model, state, "meta")
    block, batch = made.layers["0"], MicroBatch(5, 96 // layout.context, 2, gpu=gpu)

    def take():
        return ModelPieces(made, state).block(block, batch, reached=True).under(mode, in_two=in_two)

    assert trace_of_few_rounds(take, monkeypatch).sliced


def test_a_compiler_reads_once_what_a_chain_is_given_and_writes_what_is_used_after_it():
    """The product before a chain and the one behind it are kernels of their own."""
    weight = torch.nn.Linear(8, 8, bias=False)
    with shapes_only([weight], MicroBatch(4, 1)):

        def run(x):
            y = weight(x) + 1
            return weight(y * x) + x

        operators = trace(run, lambda: torch.empty(4, 8, device="meta"), [*weight.parameters()]).operators
    size = 4 * 8 * 4
    forward = [(each.name[6:], each.moved, each.fused) for each in operators if each.phase == "forward"]
    product = 2 * size + 8 * 8 * 4
    assert forward == [
        ("mm", product, product),
        ("add", 2 * size, 4 * size),  # read: the product and x; written: y, which backward needs, and y x
        ("mul", 3 * size, None),
        ("mm", product, product),
        ("add", 3 * size, 3 * size),
    ]
    products = [each.gradient for each in operators if each.name == "aten::mm" and each.phase == "backward"]
    assert sorted(products) == [False, False, True, True]
    model = sampled(family_of(MODELS["llama"]), family_of(MODELS["llama"]).from_hf(MODELS["llama"]), Layout())
    block = model.pieces.block(model.block(0), MicroBatch(1, LENGTH), reached=True).plain.operators
    assert [operator.causal for operator in block if "attention" in operator.name] == [True, True]
