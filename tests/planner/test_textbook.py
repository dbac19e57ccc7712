"""Figures that textbooks print of GPT-3's activations and of 405B, from the functions that compute a plan.

The others stand in docs/techniques.md, whose commands print them (``tests/test_pages.py``).
"""

import pytest
from support.topics import values
from trilith.models import published_size
from trilith.parallel_state import Layout, ParallelState
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
