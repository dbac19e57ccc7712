"""The bytes that the backward of one real block holds at its worst moment, against what its layers state."""

from itertools import product

import pytest
import torch
from support.configs import MODELS
from trilith.layers import AttentionInputs, checkpoint_blocks, cost_of
from trilith.models import LoraConfig, adapted, family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.planner import Work, saved_under
from trilith.planner.kinds_of_blocks import block_kinds
from trilith.testing import LiveBytes, run_parallel

ROWS, LENGTH = 4, 256
ALONE = Layout()
LORA = LoraConfig(r=4, lora_dropout=0.05)

HYBRIDS = ("qwen3_next", "qwen3_5_text", "granitemoehybrid")


def peaks(
    raw, mode="none", dtype=torch.float32, lora=None, layout=ALONE, *, rows=ROWS, length=LENGTH, staying=False
):
    """Return the peak over the plan for a block of each kind of a model, whose weights have gradients already
    unless those that are made are ``staying``.

    By default there are many tokens, beside which weights are few.
    """
    family = family_of(raw) if lora is None else adapted(family_of(raw), lora)
    config = family.from_hf(raw)
    state = ParallelState.alone() if layout == ALONE else ParallelState.start(layout)
    model = family.build(config, state=state, device="cpu")
    initialize(model, 0, state=state)
    model = model.to(dtype)
    checkpoint_blocks([(int(number), block) for number, block in model.layers.items()], mode)
    whole = length * layout.context
    work = Work(state, config.hidden_size, whole, rows, 1, compute=dtype.itemsize, fused=False)
    kinds = dict(zip(block_kinds(family, config), model.layers.values(), strict=True))
    return [peak_of(model, block, work, mode, dtype, staying) for block in kinds.values()]


def peak_of(model, block, work, mode, dtype, staying):
    tokens = work.tokens
    shape = (int(tokens.rows), int(tokens.length), work.hidden)
    used = [one for one in block.parameters() if one.requires_grad]
    factor, source = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    inputs = AttentionInputs(
        None, None, like=factor, layers=model.attentions, rotary=model.rotary, state=work.state
    )
    found = list[int]()
    # Threads of gloo may hold what was sent a little longer, at one time and not at another.
    for _ in range(3 if work.layout.world > 1 else 1):
        source.grad = None
        for one in used:
            one.grad = None if staying else torch.zeros_like(one)
        with LiveBytes() as memory:
            before = memory.now
            # As between blocks: only the block needs its input, and the gradient is a tensor of its own.
            made = (block(source.requires_grad_() * 1.0, inputs) * factor).sum()
            memory.peak = 0
            made.backward()
        found.append(memory.peak - before)
    cost = cost_of(block, tokens)
    saved = saved_under(mode, cost, work)
    return min(found) / (saved.kept + (saved.with_all_gradients if staying else saved.with_gradient))


def raw_of(name):
    """Return a small model whose rows may be long enough."""
    raw = dict(MODELS[name])
    return raw | {key: 2 * LENGTH for key in raw if key in ("max_position_embeddings", "n_positions")}


#: Of each way to write a block one; experts; and OPT, whose activation keeps what it makes.
WAYS = {"llama", "granite", "mixtral", "gpt_oss", "deepseek_v3", "gpt_neox", "qwen2_moe", "opt", "opt-350m"}
FAMILIES = {name for name in MODELS if "-" not in name}


def cases(always, *more):
    """Return each model with each of ``more``; those that ``always`` does not choose are slow."""
    every = [(name, *some) for name in MODELS for some in product(*more)]
    return [one if always(*one) else pytest.param(*one, marks=pytest.mark.slow) for one in every]


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        lambda name, dtype: name in (FAMILIES if dtype == torch.float32 else {*HYBRIDS, "gemma2", "mixtral"}),
        (torch.float32, torch.bfloat16),
    ),
)
def test_a_block_holds_what_its_layers_state(name, dtype):
    """Without checkpointing, and with it: then a forward comes before the backward.

    In 16 bits norms, recurrences, written-out scores and weighted sums of experts are in fp32.
    """
    modes = ("none", "selective")
    for mode in modes:
        assert all(0.98 < ratio < 1.02 for ratio in peaks(raw_of(name), mode, dtype))


@pytest.mark.parametrize(
    ("name", "mode"),
    cases(lambda name, mode: name in (FAMILIES if mode == "full" else WAYS), ("none", "full")),
)
def test_a_block_of_few_tokens_holds_the_gradient_of_a_weight(name, mode):
    """Until it is added to that of earlier micro-batches; then the worst moment may be a product."""
    length = 128 if name in HYBRIDS else 64  # two chunks of a recurrence
    assert all(0.97 < ratio < 1.02 for ratio in peaks(raw_of(name), mode, rows=1, length=length))


@pytest.mark.parametrize(
    ("name", "mode"), cases(lambda name, mode: name in WAYS, ("none", "selective", "full"))
)
def test_a_block_holds_the_gradients_of_its_weights_until_its_end(name, mode):
    """As before the sum over data ranks, or in the first micro-batch of a step."""
    length = 128 if name in HYBRIDS else 64
    assert all(
        0.97 < ratio < 1.02 for ratio in peaks(raw_of(name), mode, rows=1, length=length, staying=True)
    )


@pytest.mark.parametrize("staying", [False, True])
@pytest.mark.parametrize(
    ("name", "changed", "length"),
    [
        # The gradients of a stack of experts, before they are joined and after that.
        *((name, {"intermediate_size": 256}, 64) for name in ("mixtral", "gpt_oss")),
        *((name, {"moe_intermediate_size": 256}, 64) for name in ("qwen2_moe", "glm4_moe", "deepseek_v3")),
        ("mixtral", {"hidden_size": 128, "intermediate_size": 32}, 64),
        ("mixtral", {"hidden_size": 128, "intermediate_size": 256}, 128),
        ("gpt_oss", {"hidden_size": 128, "intermediate_size": 64}, 64),
        ("gemma", {"head_dim": 64, "intermediate_size": 16}, 16),  # those of key and value beside the query's
        # That of the first or of the second product of a low rank.
        (
            "deepseek_v3",
            {"q_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 4}
            | {"first_k_dense_replace": 3, "intermediate_size": 16},
            16,
        ),
        (
            "deepseek_v3",
            {"q_lora_rank": 16, "kv_lora_rank": 256, "first_k_dense_replace": 3, "intermediate_size": 16},
            32,
        ),
    ],
)
def test_a_block_of_wide_weights_and_few_tokens(name, changed, length, staying):
    found = peaks(raw_of(name) | changed, rows=1, length=length, staying=staying)
    assert all(0.97 < ratio < 1.02 for ratio in found)


@pytest.mark.parametrize(
    ("name", "dtype"), cases(lambda name, dtype: name in WAYS, (torch.float32, torch.bfloat16))
)
def test_a_block_with_adapters_holds_what_its_layers_state(name, dtype):
    """Weights that are frozen keep no input, but a forward still has it."""
    assert all(0.98 < ratio < 1.02 for ratio in peaks(raw_of(name), "full", dtype, LORA))


def test_a_product_before_a_factor_has_a_gradient_of_its_own():
    """With adapters it is the worst moment, because the weights keep nothing for the others."""
    assert all(0.98 < ratio < 1.02 for ratio in peaks(raw_of("granite"), lora=LORA))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mixtral", {"intermediate_size": 256}),  # the experts' activation is the worst moment
        ("gemma", {"head_dim": 64, "intermediate_size": 16}),  # attention
        ("deepseek_v3", {"qk_nope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 16}),
        ("olmo2", {"intermediate_size": 16}),  # a norm
        ("starcoder2", {"intermediate_size": 16, "head_dim": 4}),  # the product before the activation
        # Both products before it, whose gradients of the same input are added.
        ("cohere2", {"intermediate_size": 16, "head_dim": 4, "layer_types": ["sliding_attention"] * 5}),
        # The last sum of the input's gradients, when no product needs the input any more.
        ("stablelm", {"intermediate_size": 16}),
        ("cohere", {"intermediate_size": 4, "head_dim": 4}),  # attention still needs it
        # A norm, whose gradient is added in parts to that of the residual stream.
        *((name, {"intermediate_size": 16}) for name in ("llama", "qwen3", "phi3")),
        ("gpt2", {"n_inner": 400, "resid_pdrop": 0.1}),  # the product before dropout
    ],
)
def test_a_block_of_other_widths_holds_what_its_layers_state(name, changed):
    assert all(0.98 < ratio < 1.02 for ratio in peaks(raw_of(name) | changed))


@pytest.mark.parametrize(
    ("name", "ring"),
    [
        *((name, False) for name in ("gpt2", "gemma2", "cohere", "deepseek_v2", "qwen3_next", "falcon")),
        # Where attention is the worst moment, a ring's peak depends on when a message is taken.
        *((name, True) for name in ("llama", "gemma2")),
    ],
)
def test_a_block_over_context_ranks_holds_what_its_layers_state(name, ring):
    """Pieces of other ranks are held, and half of a rank's tokens see half of another's at a time."""
    layout = Layout.of(context=2, ring=ring)
    for found in run_parallel(peaks, 2, raw_of(name), "none", torch.float32, None, layout):
        assert all(0.97 < ratio < 1.02 for ratio in found)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_tensor_ranks_have_the_gradients_of_several_weights_at_once(name):
    """The sum of the input's gradients runs meanwhile; with few tokens it is the worst moment."""
    layout = Layout.of(tensor=2)
    for found in run_parallel(few, 2, raw_of(name), layout):
        assert all(0.97 < ratio < 1.02 for ratio in found)


def few(raw, layout):
    return peaks(raw, layout=layout, rows=1, length=16)
