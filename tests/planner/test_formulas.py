"""Formulas, FLOPs and the plan of a real model are one arithmetic; torch counts as many; as the pages say."""

import re
from pathlib import Path

import pytest
import torch
from support.configs import MODELS, TINY_GLM, TINY_GPT2, TINY_LLAMA, TINY_MIXTRAL, config
from support.families import family_and_config
from support.plans import added
from support.short_runs import run_recipe, tiny_recipe
from support.topics import values
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from trilith.machine.random_files import write_tokens
from trilith.models import FAMILIES, LoraConfig, adapted, family_of, published_size
from trilith.parallel_state import Layout, ParallelState
from trilith.planner import Traffic, Work, plan_memory, rank_parameters, step_traffic
from trilith.planner.communication import group_of, ring_wire_bytes
from trilith.planner.time.stage_timer import exchanged
from trilith.runs.metrics import read_metrics
from trilith.simulation import operators
from trilith.simulation.model_flops import Mfu, flops_per_token, peak_flops, peak_named
from trilith.simulation.pieces import ModelPieces
from trilith.testing import run_parallel

LLAMA = config("held/llama", intermediate_size=128, num_key_value_heads=4)
LENGTH, ROWS, ROUNDS = 32, 2, 4


def planned(layout):
    state = ParallelState.stand_in(layout)
    family = family_of(LLAMA)
    return Work(state, 64, LENGTH, ROWS, ROUNDS, compute=2), family.build(family.from_hf(LLAMA), state=state)


def sent_by(block, work, model):
    """Return what a block sends for a micro-batch."""
    sends = ModelPieces(model, work.state).block(block, work.batch, reached=True).sends()
    ranks = {axis: group_of(work.layout, axis)[0] for axis in ("tensor", "context")}
    return [Traffic(one.axis, one.kind, one.phase, 1, one.bytes, ranks[one.axis]) for one in sends]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_bytes_of_a_block_are_the_plan_s(tensor, sequence):
    work, model = planned(Layout.of(tensor=tensor, sequence=sequence))
    sent = sent_by(model.layers["0"], work, model)
    stated = values("tensor-parallel", tokens=ROWS * LENGTH, hidden=64, tensor=tensor)
    assert sum(one.wire for one in sent) == stated["block"]


@pytest.mark.parametrize("ring", [False, True])
def test_context_bytes_of_a_block_are_the_plan_s(ring):
    work, model = planned(Layout.of(context=4, ring=ring))
    sent = sent_by(model.layers["0"], work, model)
    row = {"sequence_length": LENGTH, "micro_batch": ROWS, "key_value_heads": 4, "head_width": 8, "tensor": 1}
    assert sum(one.wire for one in sent) == values("context", context=4, **row)["ring" if ring else "gather"]


def test_bytes_of_a_block_with_experts_are_those_that_a_plan_times():
    """The tokens' choices decide the real bytes; a plan takes them as even, like the formula."""
    raw = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    raw |= {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "head_dim": 8}
    state, family = ParallelState.stand_in(Layout.of(data=4, expert=4)), family_of(raw)
    model = family.build(family.from_hf(raw), state=state)
    work = Work(state, 64, LENGTH, ROWS, ROUNDS, compute=2)
    given = exchanged(ModelPieces(model, state).block(model.layers["0"], work.batch, reached=True))
    stated = values("experts", tokens=ROWS * LENGTH, hidden=64, experts_of_token=2, expert=4)
    assert 4 * ring_wire_bytes("all_to_all", given, 4) == stated["block"] > 0


def test_bytes_between_two_stages_are_the_plan_s():
    work, model = planned(Layout.of(pipeline=2))
    (sent,) = (one for one in step_traffic(work, model) if one.axis == "pipeline")
    border = values("pipeline", tokens=ROWS * LENGTH, hidden=64)["border"]
    assert sent.wire * 2 == ROUNDS * border  # each side sends one half


def data_step_bytes(parameters, ends, zero):
    """Return the bytes of a step over 4 data ranks (Rajbhandari et al. 2020, section 7).

    ZeRO 0 all-reduces the gradients, in fp32; 1 reduce-scatters them and gathers the weights, as many
    numbers. 2 reduce-scatters for each micro-batch; 3 also gathers the weights twice for each, but for
    ``ends``, the parameters that end the forward and begin the backward.
    """
    if zero == 0:
        return ring_wire_bytes("all_reduce", 4 * parameters, 4)
    summed = ring_wire_bytes("reduce_scatter", 4 * parameters, 4) * (ROUNDS if zero >= 2 else 1)
    gathered = ROUNDS * (2 * parameters - ends) if zero == 3 else parameters
    return summed + ring_wire_bytes("all_gather", gathered * 2 / 4, 4)


@pytest.mark.parametrize("zero", range(4))
def test_bytes_of_a_step_over_the_data_ranks_are_the_plan_s(zero):
    work, model = planned(Layout.of(data=4, zero=zero))
    sent = [one for one in step_traffic(work, model) if one.axis in ("data", "replicas")]
    held = rank_parameters(model, work.state)
    assert sum(one.wire for one in sent) == data_step_bytes(held.every.unsharded, held.root.unsharded, zero)


@pytest.mark.parametrize("zero", range(4))
def test_bytes_of_weights_gradients_and_optimizer_are_the_plan_s(zero):
    """Our own sizes: weights in bf16 beside fp32 ones, which the optimizer keeps; gradients in fp32.

    At ZeRO 3 nothing in bf16 is kept; at ZeRO 2 and 3 FSDP keeps the last group's gradients whole too.
    """
    work, model = planned(Layout.of(data=4, zero=zero))
    plan, held = plan_memory(work, model), rank_parameters(model, work.state)
    sizes = {"parameters": held.every.unsharded, "gradient_bytes": 4, "optimizer_bytes": 12}
    stated = values("memory", zero=zero, data=4, **sizes)
    total = values("zero", ranks=4, **sizes)[f"zero_{zero}"]
    assert stated["weights"] + stated["gradients"] + stated["optimizer"] == total
    last = held.root.trained * 4 if zero >= 2 else 0
    gathered = held.root.unsharded * 2 - stated["weights"] if zero == 3 else 0
    assert plan.weights + plan.gathered + plan.gradients + plan.moments == total + last + gathered


def test_flops_of_a_token_are_the_plan_s():
    size = published_size("llama-3.1-405b")
    flops = flops_per_token(size.family.on_meta(size.family.from_hf(size.fields)), 8192)
    matrices = size.parameters - 128256 * 16384 - (2 * 126 + 1) * 16384  # no embedding table, no norms
    row = {"parameters": matrices, "layers": 126, "width": 16384, "sequence_length": 8192}
    stated = values("mfu", rate="2.65M", gpus=16384, peak="989e12", **row)
    assert (stated["causal"], stated["full"]) == (flops.causal, flops.full)
    mfu = Mfu(flops, 16384, 989e12)(2.65e6)
    assert (stated["mfu_causal"], stated["mfu_full"]) == pytest.approx((mfu.causal, mfu.full), rel=1e-12)
    assert stated["hfu"] == pytest.approx(mfu.causal * 8 / 6, rel=1e-12)  # a second forward


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    parts = ring_wire_bytes("reduce_scatter", 4096, 8) + ring_wire_bytes("all_gather", 4096 / 8, 8)
    assert ring_wire_bytes("all_reduce", 4096, 8) == parts == 7168
    stated = values("allreduce", parameters=2048, ranks=8, bandwidth=7168, latency=1)
    assert stated["ring_time"] == 1 + 14  # messages
    assert stated["tree_time"] == pytest.approx(8192 / 7168 + 6)
    with pytest.raises(ValueError, match="gossip"):
        ring_wire_bytes("gossip", 1, 2)


def test_a_block_s_table_is_the_formula():
    """docs/communication.md, evaluated: each cell is what a block says that it sends."""
    text = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    rows = re.findall(r"^\| (tensor(?: and sequence)?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["tensor", "tensor and sequence"]
    for (name, *cells), sequence in zip(rows, (False, True), strict=True):
        work, model = planned(Layout.of(tensor=4, sequence=sequence))
        sent = sent_by(model.layers["0"], work, model)
        numbers = {"N D": ROWS * LENGTH * 64, "N D / t": ROWS * LENGTH * 64 // 4}
        for cell, forward in zip(cells, (True, False), strict=True):
            parts = re.findall(r"(\d) (all-reduce|all-gather|reduce-scatter)s of ([^,]+)", cell)
            stated = {
                ("tensor", kind.replace("-", "_")): (int(count), int(count) * numbers[size] * 2)
                for count, kind, size in parts
            }
            here = [one for one in sent if one.what == ("forward" if forward else "backward")]
            assert stated and added(here) == stated, name


ROW_LENGTH, SAMPLES = 16, 3
CONFIGS = {
    "llama": TINY_LLAMA,
    "llama-untied": TINY_LLAMA | {"tie_word_embeddings": False},
    "gpt2": TINY_GPT2,
    "mixtral": TINY_MIXTRAL,
    "glm4_moe": TINY_GLM,
    # Narrower values are brought to the width of queries with zeros, which torch would count.
    "deepseek_v2": MODELS["deepseek_v2"] | {"v_head_dim": 16},
}
#: Families whose products torch counts otherwise than the formula: bounded scores, sinks and slopes take
#: attention of our own, narrow values are filled with zeros, and recurrent blocks run in chunks.
IN_PARTS = {*("gemma2", "gpt_oss", "bloom", "deepseek_v3", "qwen3_next", "qwen3_5_text", "granitemoehybrid")}
for row, raw in MODELS.items():
    if raw["model_type"] == row and row not in IN_PARTS:
        CONFIGS.setdefault(row, raw)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_torch_counts(name, backward):
    """Without a state nothing is padded; the plain backend multiplies out all of attention."""
    raw = CONFIGS[name]
    family, config = family_and_config(raw)
    model = family.build(config, device="cpu").eval()
    ids = torch.randint(131, (SAMPLES, ROW_LENGTH))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(ids)
        if backward:
            logits.sum().backward()
    flops = flops_per_token(model, ROW_LENGTH)
    expected = flops.full if backward else flops.matrices + flops.attention
    assert counter.get_total_flops() == SAMPLES * ROW_LENGTH * expected


def test_every_family_is_counted_by_torch_or_computes_in_parts():
    assert CONFIGS.keys() - {"llama-untied"} == FAMILIES.keys() - IN_PARTS


def test_zeros_behind_narrow_values_do_not_count():
    found = []
    for width in (16, 8):
        family, raw = family_of(MODELS["deepseek_v2"]), MODELS["deepseek_v2"] | {"v_head_dim": width}
        found.append(flops_per_token(family.on_meta(family.from_hf(raw)), ROW_LENGTH).attention)
    assert found[0] - found[1] == 2 * ROW_LENGTH * 3 * 4 * 8  # of 3 blocks with 4 heads


def test_what_is_frozen_costs_no_gradient_of_its_weights():
    family, config = family_and_config(TINY_LLAMA)
    whole, model = flops_per_token(family.on_meta(config), ROW_LENGTH), family.build(config)
    for i in range(3):
        model.get_parameter(f"layers.{i}.mlp.down.weight").requires_grad_(False)
    assert whole.full - flops_per_token(model, ROW_LENGTH).full == 2 * 3 * 32 * 48
    lora = adapted(family, LoraConfig(r=2, target_modules=("down_proj",)))
    tuned, adapters = flops_per_token(lora.on_meta(config), ROW_LENGTH), 3 * 2 * (32 + 48)
    assert tuned.full == whole.full - whole.trained + 6 * adapters


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_a_device_s_peak_follows_from_its_whole_name(name, peak):
    assert peak_named(name) == peak


def test_a_run_on_a_cpu_has_mfu_only_where_its_peak_is_stated(tmp_path):
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    tokens = write_tokens(tmp_path / "tokens")
    for name, watch in (("silent", {}), ("stated", {"peak_flops": 1e9})):
        raw = tiny_recipe(tmp_path / name, tokens, steps=1, watch=watch)
        (metrics,) = run_parallel(run_recipe, 1, raw)[0]
        (line,) = read_metrics(tmp_path / name / "metrics.jsonl")
        assert line["memory"] > 1e7
        assert ("mfu_full" in line) == (metrics.mfu_full is not None) == bool(watch)
    family = family_of(TINY_LLAMA)
    flops = flops_per_token(family.on_meta(family.from_hf(TINY_LLAMA)), ROW_LENGTH)
    assert line["mfu_causal"] == pytest.approx(line["tokens_per_second"] * flops.causal / 1e9)


def test_attention_of_grouped_queries_is_counted_where_torch_counts_equal_heads_alone(monkeypatch):
    """Torch 2.11's formula refuses fewer heads of keys than of queries."""
    q, k = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")

    def strict(query, key, value):
        assert query[1] == key[1] == value[1]
        return 1

    monkeypatch.setattr(operators, "sdpa_flop_count", strict)
    for kernel in ("flash_attention", "cudnn_attention", "efficient_attention"):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
        assert operators.facts_of(operator).flops((q, k, k), {}, None) == 1
