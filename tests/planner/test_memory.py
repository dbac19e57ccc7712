"""The planner's bytes by hand; ``tests/layouts/test_held.py`` compares them with what ranks hold."""

import pytest
from support.configs import config
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState
from trilith.planner import Work, plan_memory


def planned(**changes):
    """Plan the memory of a larger model on one of many ranks, without any process."""
    raw = config("held/llama", hidden_size=512, layers=8, intermediate_size=1536)
    layout = changes.pop("layout", Layout())
    stage_of = changes.pop("rank", 0)
    frozen, length = changes.pop("frozen", ()), changes.pop("length", 256)
    family = family_of(raw)
    state = ParallelState.stand_in(layout, stage_of)
    model = family.build(family.from_hf(raw), state=state)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or ("-",)))
    work = Work(state, model.config.hidden_size, length, 2, 8, **({"compute": 2} | changes))
    return plan_memory(work, model)


def test_the_bytes_a_parameter_of_each_zero_stage():
    """FSDP2's, between micro-batches, at 2 data ranks, bf16 in fp32: measured in ``test_zero_bytes.py``."""
    plans = [planned(layout=Layout.of(data=2, zero=zero)) for zero in range(4)]
    parameters = plans[0].weights // 4
    per = [(p.weights + p.gathered + p.gradients + p.moments) / parameters for p in plans]
    root = (
        512 * 512 * 2 + 512
    )  # embedding, output layer, norm: whole at stage 3, and in the last sum's buffer
    assert per[:2] == [18, 12]
    assert per[2] == pytest.approx(10 + 4 * root / parameters)
    assert per[3] == pytest.approx(8 + 6 * root / parameters)


def test_offload_moves_to_the_host_what_rests():
    on, off = planned(offload=True), planned()
    assert (on.weights, on.moments) == (0, 0)
    assert on.host == off.weights + off.moments + off.weights  # the sums, too
    assert on.gathered == off.gathered and on.total < off.total


def test_frozen_parameters_have_no_gradient_and_no_moments():
    frozen = planned(frozen=("layers.", "embed.", "norm."))
    still, whole = planned(loss_chunk=64, frozen=("head.",)), planned(loss_chunk=64)
    assert whole.logits + whole.activations - still.logits - still.activations >= 512 * 512 * 4
    head = 512 * 512
    assert frozen.moments == 2 * head * 4
    assert frozen.gradients == head * 4
    assert frozen.weights == planned().weights


def test_a_stage_holds_as_many_micro_batches_as_follow_it():
    layout = Layout.of(pipeline=4)
    # A micro-batch has more bytes than the gradients, which GPipe's first backward does not have yet.
    first, last = (planned(layout=layout, rank=rank, length=2048) for rank in (0, 3))
    gpipe = planned(layout=layout, schedule="gpipe", length=2048)
    assert gpipe.activations == pytest.approx(2 * first.activations, rel=1e-6)  # 8 of 8 against 4
    assert 3.5 < first.activations / last.activations < 4


def test_context_ranks_share_activations_and_a_ring_holds_few_keys_at_once():
    alone, *cut = (planned(layout=Layout.of(context=context)) for context in (1, 2, 4, 8))
    assert [alone.activations / one.activations for one in cut] == pytest.approx([2, 4, 8], rel=1e-6)
    assert [alone.logits / one.logits for one in cut] == [2, 4, 8]
    more = []
    for ranks in (16, 32):
        gathered, ring = (
            planned(layout=Layout.of(context=ranks, ring=ring), length=2**16, compute=4).block
            for ring in (False, True)
        )
        more.append((gathered - ring) / (2 * 2**16 // ranks))
    # A token's keys and values of two heads, and their gradients, for each rank more.
    assert more[1] - more[0] == 16 * 2 * 2 * (512 // 8) * (4 + 4)
