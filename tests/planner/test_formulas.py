"""Formulas and the plan of a real model are one arithmetic; collectives by hand, and as the page says."""

import re
from pathlib import Path

import pytest
from support.configs import config
from trilith.models import family_of, published_size
from trilith.parallel_state import Layout, ParallelState
from trilith.pipeline import bubble_share, micro_batches_for
from trilith.planner import Traffic, Work, plan_memory, rank_parameters, step_traffic
from trilith.planner.communication import traffic_of_piece
from trilith.planner.formulas.axis_bytes import (
    context_block_bytes,
    data_step_bytes,
    expert_block_bytes,
    pipeline_border_bytes,
    tensor_block_bytes,
)
from trilith.planner.formulas.bytes_per_parameter import state_bytes
from trilith.planner.formulas.ring_and_tree import ring_messages, ring_seconds, ring_wire_bytes
from trilith.planner.formulas.training_time import flops_of_token
from trilith.planner.time.kernels import exchanged
from trilith.simulation.model_flops import flops_per_token
from trilith.simulation.pieces import ModelPieces

LLAMA = config("held/llama", intermediate_size=128, num_key_value_heads=4)
LENGTH, ROWS, ROUNDS = 32, 2, 4


def planned(layout):
    state = ParallelState.stand_in(layout)
    family = family_of(LLAMA)
    return Work(state, 64, LENGTH, ROWS, ROUNDS, compute=2), family.build(family.from_hf(LLAMA), state=state)


def sent_by(block, work, model):
    """Return what a block sends for a micro-batch."""
    return traffic_of_piece(work, ModelPieces(model, work.state).block(block, work.batch, reached=True))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_bytes_of_a_block_are_the_plan_s(tensor, sequence):
    work, model = planned(Layout.of(tensor=tensor, sequence=sequence))
    sent = sent_by(model.layers["0"], work, model)
    assert sum(one.wire for one in sent) == tensor_block_bytes(ROWS * LENGTH, 64, tensor)


@pytest.mark.parametrize("ring", [False, True])
def test_context_bytes_of_a_block_are_the_plan_s(ring):
    work, model = planned(Layout.of(context=4, ring=ring))
    sent = sent_by(model.layers["0"], work, model)
    assert sum(one.wire for one in sent) == context_block_bytes(ROWS * LENGTH // 4, 2 * 32, 4, ring=ring)


def test_bytes_of_a_block_with_experts_are_those_that_a_plan_times():
    """The tokens' choices decide the real bytes; a plan takes them as even, like the formula."""
    raw = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    raw |= {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "head_dim": 8}
    state, family = ParallelState.stand_in(Layout.of(data=4, expert=4)), family_of(raw)
    model = family.build(family.from_hf(raw), state=state)
    work = Work(state, 64, LENGTH, ROWS, ROUNDS, compute=2)
    given = exchanged(model.layers["0"], work.whole)
    assert 4 * ring_wire_bytes("all_to_all", given, 4) == expert_block_bytes(ROWS * LENGTH, 64, 2, 4) > 0


def test_bytes_between_two_stages_are_the_plan_s():
    work, model = planned(Layout.of(pipeline=2))
    (sent,) = (one for one in step_traffic(work, model) if one.axis == "pipeline")
    assert sent.wire * 2 == ROUNDS * pipeline_border_bytes(ROWS * LENGTH, 64)  # each side sends one half


@pytest.mark.parametrize("zero", range(4))
def test_bytes_of_a_step_over_the_data_ranks_are_the_plan_s(zero):
    work, model = planned(Layout.of(data=4, zero=zero))
    sent = [one for one in step_traffic(work, model) if one.axis in ("data", "replicas")]
    held = rank_parameters(model, work.state)
    # The plan sums gradients in fp32.
    expected = data_step_bytes(
        held.every.here, 4, zero=zero, micro_batches=ROUNDS, gradient_bytes=4, ends=held.root.here
    )
    assert sum(one.wire for one in sent) == expected


@pytest.mark.parametrize("zero", range(4))
def test_bytes_of_weights_gradients_and_optimizer_are_the_plan_s(zero):
    """Our own sizes: weights in bf16 beside fp32 ones, which the optimizer keeps; gradients in fp32.

    At ZeRO 3 nothing in bf16 is kept; at ZeRO 2 and 3 FSDP keeps the last group's gradients whole too.
    """
    work, model = planned(Layout.of(data=4, zero=zero))
    plan, held = plan_memory(work, model), rank_parameters(model, work.state)
    expected = state_bytes(held.every.here, zero=zero, data_ranks=4, gradient_bytes=4, optimizer_bytes=12)
    last = held.root.trained * 4 if zero >= 2 else 0
    gathered = held.root.here * 2 - expected.weights if zero == 3 else 0
    found = plan.weights + plan.gathered + plan.gradients + plan.moments
    assert found == expected.total + last + gathered


def test_flops_of_a_token_are_the_plan_s():
    size = published_size("llama-3.1-405b")
    flops = flops_per_token(size.family.on_meta(size.family.from_hf(size.fields)), 8192)
    matrices = size.parameters - 128256 * 16384 - (2 * 126 + 1) * 16384  # no embedding table, no norms
    assert flops_of_token(matrices, 126, 16384, 8192) == flops.causal
    assert flops_of_token(matrices, 126, 16384, 8192, causal=False) == flops.full


@pytest.mark.parametrize("bubble", [0.05, 0.1, 0.25, 0.5])
@pytest.mark.parametrize(("pipeline", "virtual"), [(4, 1), (8, 2), (32, 1), (16, 3), (1, 1)])
def test_the_number_of_micro_batches_for_a_bubble_is_the_smallest(bubble, pipeline, virtual):
    found = micro_batches_for(bubble, pipeline, virtual)
    assert bubble_share(pipeline, found, virtual) <= bubble + 1e-15
    assert found == 1 or bubble_share(pipeline, found - 1, virtual) > bubble


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    parts = ring_wire_bytes("reduce_scatter", 4096, 8) + ring_wire_bytes("all_gather", 4096 / 8, 8)
    assert ring_wire_bytes("all_reduce", 4096, 8) == parts == 7168
    assert ring_messages("all_reduce", 8) == 14
    assert ring_seconds("all_reduce", 4096, 8, bytes_per_second=7168, latency_seconds=1) == 15
    with pytest.raises(ValueError, match="gossip"):
        ring_wire_bytes("gossip", 1, 2)


NARROW = LLAMA | {"vocab_size": 503, "hidden_size": 24, "intermediate_size": 40}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 1}


def of_kinds(every):
    found = {}
    for one in every:
        count, size = found.get(one.kind, (0, 0))
        found[one.kind] = (count + one.count, size + one.bytes)
    return found


def test_a_block_s_table_is_the_formula():
    """docs/communication.md, evaluated: each cell is what a block says that it sends."""
    text = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    rows = re.findall(r"^\| (tensor(?: and sequence)?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["tensor", "tensor and sequence"]
    for (name, *cells), sequence in zip(rows, (False, True), strict=True):
        state = ParallelState.stand_in(Layout.of(tensor=4, sequence=sequence))
        work = Work(state, 24, 12, 2, 1, compute=2)
        model = family_of(NARROW).build(family_of(NARROW).from_hf(NARROW), state=state)
        sent = sent_by(model.layers["0"], work, model)
        numbers = {"N D": 2 * 12 * 24, "N D / t": 2 * 12 * 24 // 4}
        for cell, forward in zip(cells, (True, False), strict=True):
            parts = re.findall(r"(\d) (all-reduce|all-gather|reduce-scatter)s of ([^,]+)", cell)
            stated = {
                kind.replace("-", "_"): (int(count), int(count) * numbers[size] * 2)
                for count, kind, size in parts
            }
            here = [one for one in sent if one.what == ("forward" if forward else "backward")]
            assert stated and of_kinds(here) == stated, name


def test_a_ring_sends_the_shares_of_the_others():
    wires = {
        kind: Traffic("tensor", kind, "", 1, 1000, 4).wire
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    }
    assert wires == {"all_reduce": 1500, "all_gather": 3000, "reduce_scatter": 750, "send": 1000}
