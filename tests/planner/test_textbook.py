"""The figures that textbooks and tutorials print, from the functions that compute a plan; others by hand."""

import pytest
from support.configs import config
from support.topics import values
from trilith.models import family_of, published_size
from trilith.parallel_state import Layout, ParallelState
from trilith.pipeline import bubble
from trilith.planner import Work, plan_memory

GB = 1e9


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        (("--recompute", "none"), 34 + 80),
        (("--recompute", "none", "--tensor", "8"), 10 + 24 / 8 + 80 / 8),
        (("--recompute", "none", "--tensor", "8", "--sequence-parallel"), 34 / 8 + 80 / 8),
        (("--tensor", "8", "--sequence-parallel"), 34 / 8),
        (("--recompute", "full"), 2),
        (("--recompute", "full", "--tensor", "8", "--sequence-parallel"), 2 / 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_block_of_gpt_3_keeps_the_bytes_of_table_2(flags, each):
    """Korthikanti et al. 2022: ``each`` byte for a token and a hidden number, in 16 bits; scores take
    5 heads x row / hidden = 80.
    """
    rank = values("memory", *flags, sequence_length=2048, hidden=12288, heads=96, layers=96)
    assert rank["block"] == pytest.approx(2048 * 12288 * each, rel=1e-12)
    assert rank["activations"] == 96 * rank["block"]


@pytest.mark.parametrize(("micro_batches", "percent"), [(1, 75.0), (16, 15.8), (32, 8.6)])
def test_the_bubble_of_4_stages(micro_batches, percent):
    assert round(100 * bubble("1f1b", Layout(pipeline=4), micro_batches), 1) == percent


@pytest.mark.parametrize(
    ("micro_batches", "percent"), [(8, 20.5), (16, 34.0), (32, 50.8), (64, 67.4), (279, 90)]
)
def test_the_efficiency_of_32_stages(micro_batches, percent):
    assert round(100 * (1 - bubble("1f1b", Layout(pipeline=32), micro_batches)), 1) == percent


def test_tensor_parallelism_sends_four_all_reduces_a_layer():
    """Two forward, two backward, each of tokens x hidden: 8192 tokens of Llama 3 405B over 8 ranks."""
    tensor = 8192 * 16384 * 2
    shards = values("tensor-parallel", tokens=8192, hidden=16384, tensor=8, inputs=16384, outputs=53248)
    assert shards["block"] == 4 * 2 * 7 / 8 * tensor == 1_879_048_192
    assert (shards["column"], shards["row"], shards["shard"]) == (6656, 2048, 6656 * 16384)


def test_405b_on_2048_gpus_takes_tensor_8_pipeline_16_data_16():
    """Tensor ranks fill a node of 8. Then the pipeline is the shortest of which every rank fits into 80 GB
    (77 beside the runtime) with selective recomputation; four stages do not even fit with full.
    """
    size = published_size("llama-3.1-405b")

    def largest(pipeline, checkpointing):
        layout = Layout.of(tensor=8, pipeline=pipeline, data=256 // pipeline, zero=1, sequence=True)
        plans = []
        for rank in (0, layout.world - 1):
            state = ParallelState.stand_in(layout, rank)
            model = size.family.build(size.config, state=state)
            rounds = 2048 // layout.data
            work = Work(state, 16384, 8192, 1, rounds, compute=2, checkpointing=checkpointing)
            plans.append(plan_memory(work, model).total / GB)
        return max(plans)

    assert largest(4, "full") > 77
    assert largest(8, "full") < 77 < largest(8, "selective")
    assert largest(16, "selective") < 77


def test_training_flops_of_llama_3_70b():
    run = values("training-time", parameters="70B", tokens="15T", gpus=2048, peak=989e12, mfu=0.4)
    assert run["C"] == 6.3e24
    assert round(run["days"]) == 90 and round(run["hours"], -3) == 4_424_000
    assert (run["price"], run["energy"]) == (2 * run["hours"], pytest.approx(0.7 * run["hours"]))


def planned(**changes):
    """Plan the memory of a larger model on one of many ranks, without any process."""
    raw = config("held/llama", hidden_size=512, layers=8, intermediate_size=1536)
    layout, length = changes.pop("layout", Layout()), changes.pop("length", 256)
    family = family_of(raw)
    state = ParallelState.stand_in(layout)
    model = family.build(family.from_hf(raw), state=state)
    work = Work(state, model.config.hidden_size, length, 2, 8, **({"compute": 2} | changes))
    return plan_memory(work, model)


def test_offload_moves_to_the_host_what_rests():
    on, off = planned(offload=True), planned()
    assert (on.weights, on.moments) == (0, 0)
    assert on.host == off.weights + off.moments + off.weights  # the sums, too
    assert on.gathered == off.gathered and on.total < off.total


def test_context_ranks_share_activations_and_a_ring_holds_few_keys_at_once():
    alone, *cut = (planned(layout=Layout.of(context=context)) for context in (1, 2, 4, 8))
    # Flash attention over whole rows keeps the state of a random generator in each of the 8 blocks, 24 bytes;
    # the loss is one number.
    assert [(alone.activations - 8 * 24) / plan.activations for plan in cut] == [2, 4, 8]
    assert [(alone.logits - 8) / (plan.logits - 8) for plan in cut] == [2, 4, 8]
    more = []
    for ranks in (16, 32):
        gathered, ring = (
            planned(layout=Layout.of(context=ranks, ring=ring), length=2**16, compute=4).block
            for ring in (False, True)
        )
        more.append((gathered - ring) / (2 * 2**16 // ranks))
    # A token's keys and values of two heads, and their gradients, for each rank more.
    assert more[1] - more[0] == 16 * 2 * 2 * (512 // 8) * (4 + 4)
