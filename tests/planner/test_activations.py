"""Compare the planned bytes of activations with what autograd saves in a block and what lives in a model."""

import json
import time
from contextlib import nullcontext

import pytest
import torch
from support.configs import FOLDER, MODELS
from support.families import family_and_config, model_of
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.layers import Attention, Cost, attention_kinds, checkpoint_blocks, cost_of, masks_cost
from trilith.models import FAMILIES, LoraConfig, adapted, family_of, published_size
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.planner import Work, stage_costs
from trilith.planner.activations import saved_under
from trilith.planner.memory import needs_of_rank
from trilith.testing import LiveBytes, run_parallel

LENGTH = 32
#: Models of one block by name: some fields of one that they are ``like``, ``without`` others.
_BLOCKS = json.loads((FOLDER / "blocks" / "one_block.json").read_text(encoding="utf-8"))


def one_block(name):
    own = dict(_BLOCKS[name])
    like, without = own.pop("like", None), own.pop("without", ())
    raw = {} if like is None else one_block(like)
    return {key: value for key, value in raw.items() if key not in without} | own


def saved(config, lora):
    """Return the bytes that one block saves, without parameters, rotations and masks, and the plan's."""
    family = family_of(config)
    if lora is not None:
        family = adapted(family, lora)
    made = family.from_hf(config)
    model = family.build(made, device="cpu")
    initialize(model, 0)
    tokens = Work(ParallelState.alone(), made.hidden_size, LENGTH, 2, 1, fused=False).tokens
    found = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    (block,) = model.layers.values()
    forward = block.forward

    def watched(x_BSD, *more):
        x_BSD = x_BSD.detach().requires_grad_()  # as after another block
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(x_BSD, *more)

    block.forward = watched
    out = model(torch.zeros(2, LENGTH, dtype=torch.long))
    assert out.requires_grad
    shared = sum(cost_of(one, tokens).kept for one in model.rotary.values())
    for layer in attention_kinds(block):
        # Blocks of scores keep their mask where autograd does not see it.
        if isinstance(layer, Attention) and layer.planned_backend(tokens) == "sdpa":
            shared += masks_cost(layer, tokens).kept
    return sum(found.values()) - shared, cost_of(block, tokens).kept


STACKS = {"target_parameters": ("experts.gate_up_proj", "experts.down_proj")}
#: By id: the name of the model, and what is adapted.
ADAPTED = {
    "gpt_oss-lora-of-experts": ("gpt_oss-window", STACKS),
    "deepseek_v2-lora": ("deepseek_v2", {}),
    "granitemoehybrid-lora-of-experts": ("granitemoehybrid-mamba", STACKS),
    "qwen3_next-lora": ("qwen3_next-delta-net", {}),
    "lora": ("llama", {}),
    "lora-of-experts": ("mixtral", STACKS),
    "lora-of-experts-alone": ("mixtral", STACKS | {"target_modules": ()}),
    "lora-dropout": ("llama", {"lora_dropout": 0.05}),
    "gpt2-lora-dropout": ("gpt2", {"lora_dropout": 0.05}),
    "lora-of-q-and-v": ("llama", {"lora_dropout": 0.05, "target_modules": ("q_proj", "v_proj")}),
}


@pytest.mark.parametrize("name", [*_BLOCKS, *ADAPTED])
def test_what_a_block_keeps_is_what_autograd_saves(name):
    model, lora = ADAPTED.get(name, (name, None))
    found, planned = saved(one_block(model), None if lora is None else LoraConfig(r=4, **lora))
    assert 0.99 < found / planned <= 1


def test_every_family_has_a_case():
    assert {one_block(name)["model_type"] for name in _BLOCKS} == FAMILIES.keys()


def alive_by_plan(raw, mode, *, rows, length, fake):
    """Return the bytes that a forward leaves alive, logits among them, over the plan's.

    ``fake``: with tensors that have a size and no memory, so that a model may be of any size.
    """
    family, config = family_and_config(raw)
    model = family.build(config, device="meta" if fake else "cpu")
    if not fake:
        initialize(model, 0)
    checkpoint_blocks([(int(number), block) for number, block in model.layers.items()], mode)
    work = Work(ParallelState.alone(), config.hidden_size, length, rows, 1, checkpointing=mode, fused=False)
    (cost,) = stage_costs(work, model)
    assert cost.loss is not None
    planned = max(need.held for need in needs_of_rank(work, [cost])) + cost.loss.kept
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        if fake:
            model.to_empty(device="cpu")
        ids = torch.zeros(rows, length, dtype=torch.long)
        with LiveBytes(model.parameters(), ids) as memory:
            before = memory.now
            logits = model(ids)
            assert logits.requires_grad
            return (memory.now - before) / planned


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_model_of_a_billion_parameters_keeps_what_its_plan_says(mode):
    raw = dict(published_size("llama-3.2-1b").with_fields({}))
    assert alive_by_plan(raw, mode, rows=2, length=1024, fake=True) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_computes_some_again_keeps_what_its_plan_says(name):
    assert 0.99 < alive_by_plan(MODELS[name], "selective", rows=4, length=64, fake=False) <= 1


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_as_wide_as_the_block_keep_what_the_plan_says(name):
    """Their second product reads as many numbers as the first one, and is kept, too."""
    raw = MODELS[name] | {"intermediate_size": MODELS[name]["hidden_size"]}
    assert 0.99 < alive_by_plan(raw, "selective", rows=4, length=64, fake=False) <= 1


def _now_and_soon(memory):
    for _ in range(20):
        yield memory.now
        time.sleep(0.01)


def kept_by_a_block(layout, mode):
    """Return the bytes that each further block leaves alive on a rank after the forward."""
    alive = []
    for blocks in (1, 4):
        state = ParallelState.start(layout)
        raw = {**MODELS["llama"], "num_hidden_layers": blocks}
        model = model_of(raw, state=state, device="cpu")
        initialize(model, 0, state=state)
        checkpoint_blocks([(int(number), block) for number, block in model.layers.items()], mode)
        ids = torch.zeros(3, 16, dtype=torch.long)
        with LiveBytes(model.parameters(), ids) as memory:
            before = memory.now
            logits = model(ids)
            assert logits.requires_grad
            # A thread of gloo may hold the last messages a little longer.
            alive.append(min(_now_and_soon(memory)) - before)
    return (alive[1] - alive[0]) / 3


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "cut"])
def test_what_a_checkpointed_block_keeps_is_cut_over_the_tensor_ranks_under_sequence_parallelism(sequence):
    """A block keeps its input and nothing else: whole on each rank, or one piece of it on each."""
    raw = MODELS["llama"]
    whole = 3 * 16 * raw["hidden_size"] * 4
    layout = Layout.of(tensor=2, sequence=sequence)
    assert set(run_parallel(kept_by_a_block, 2, layout, "full")) == {whole / 2 if sequence else whole}
    work = Work(ParallelState.stand_in(layout), raw["hidden_size"], 16, 3, 1, checkpointing="full")
    assert saved_under("full", Cost(), work).kept == (whole / 2 if sequence else whole)
