"""A rank's whole step on a device that is not there: nothing is mixed, and no wait is new.

Forward, backward, clip, update, in bf16. A few layouts and families run always, the whole covering array and
every family in the nightly tests.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.combinations import LONG, Choice, covering_array
from support.configs import MODELS
from support.short_training import Case
from support.simulated_steps import step_counts
from trilith.layers.experts import grouped_matmul
from trilith.layers.experts.grouped_matmul import kernel_takes
from trilith.parallel_state import Layout
from trilith.pipeline import SCHEDULE_NAMES

BF16 = {"dtype": torch.float32, "compute": torch.bfloat16}

#: Between them every schedule, axis and stage of ZeRO.
SOME = [
    Choice("llama-kv1", tensor=2, data=2, zero=3, sequence=True, documents=True, checkpointing="selective"),
    Choice("mixtral", data=2, zero=2, expert=2, trains="lora", offload=True),
    Choice("gpt2", pipeline=2, data=2, zero=1, schedule="gpipe", trains="frozen", checkpointing="full"),
    Choice("llama-tied", pipeline=2, smoothing=0.1, loss_chunk=5),
    Choice("mistral", pipeline=2, schedule="interleaved"),
    Choice("gpt2", tensor=2, pipeline=2, schedule="interleaved-zero-bubble"),
    Choice("gpt2", pipeline=2, data=2, zero=3, schedule="zbv"),
    Choice("gpt2", pipeline=2, schedule="dualpipev", offload=True),
    Choice("phi3", context=2, micro_batch=2, ring=True),
]


def step(case, rank):
    step_counts(replace(case, **BF16), rank)


def few_blocks(choice):
    """Return the run with two blocks, or one a stage; three, where all but the third are frozen."""
    blocks = max(2 if choice.trains != "frozen" else 3, choice.stages)
    key = next(key for key in ("num_hidden_layers", "n_layer") if key in choice.config)
    return replace(choice.case, config=choice.config | {key: blocks})


def some_steps():
    """Run them all in one process: a new one would import for seconds."""
    for choice in SOME:
        try:
            step(few_blocks(choice), choice.world - 1)
        except Exception as error:
            error.add_note(f"in {choice}")
            raise


def test_a_step_mixes_no_devices_and_waits_where_the_list_says(alone):
    alone(some_steps)


def test_some_layouts_hold_every_schedule_axis_and_stage_of_zero():
    for key, values in {
        "schedule": SCHEDULE_NAMES,
        "zero": range(4),
        "trains": ("all", "frozen", "lora"),
        "checkpointing": ("none", "selective", "full"),
        **{axis: (1, 2) for axis in ("tensor", "pipeline", "data", "context", "expert")},
    }.items():
        assert {getattr(choice, key) for choice in SOME} >= set(values)


@pytest.mark.slow  # five minutes
@pytest.mark.parametrize("choice", [*covering_array(), *LONG], ids=str)
def test_every_layout_of_the_covering_array_runs_there(choice, alone):
    for rank in {0, choice.case.layout.world - 1}:
        alone(step, choice.case, rank)


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("model", MODELS)
def test_every_family_runs_there(model, alone):
    alone(step, Case(MODELS[model], samples=2), 0)


def test_float16_with_a_loss_scale_runs_there(alone):
    alone(step_counts, Case(MODELS["gpt2"], samples=2, dtype=torch.float32, compute=torch.float16))


#: Of a step of two micro-batches and two blocks on the first rank: the most kernels, the most thousands of
#: bytes that these read and write, and how often the host waits. Write smaller numbers when they fall.
COUNTS = {
    ("llama", Layout()): (954, 8950, 1),
    ("llama", Layout.of(data=2, zero=3)): (972, 13272, 1),
    ("llama", Layout.of(tensor=2, sequence=True)): (1091, 4930, 1),
    ("llama", Layout.of(pipeline=2)): (437, 3603, 1),
    ("mixtral", Layout.of(data=2, expert=2)): (1543, 11917, 5),
}


def counted():
    """Count these steps. All in one process, which has the device already after the first."""
    found = {}
    for model, layout in COUNTS:
        config = MODELS[model] | {"num_hidden_layers": 2}
        counts = step_counts(Case(config, layout, samples=2 * layout.data, **BF16))
        found[model, layout] = counts.kernels, counts.moved // 1000, counts.waits
    return found


def compare():
    for key, (kernels, moved, waits) in counted().items():
        most_kernels, most_moved, expected = COUNTS[key]
        assert kernels <= most_kernels and moved <= most_moved, (*key, kernels, moved)
        assert waits == expected, (*key, waits)


#: In its layers rows of bf16 have a multiple of 16 bytes, as the one kernel for all experts needs.
EXPERTS = Case(MODELS["mixtral"] | {"num_hidden_layers": 2}, samples=2, **BF16)


def experts_of_one_rank():
    """Compare a device that multiplies the rows of all experts at once, as GPUs do, with one that cannot."""

    def kernel(x, w):
        return kernel_takes(x.element_size(), x.shape[-1], w.shape[1])

    with mock.patch.object(grouped_matmul, "has_kernel", kernel):
        counts = step_counts(EXPERTS)
    assert [*counts.waited] == [("training/update.py: Update.__call__", "read")], counts.waited
    assert counts.waits == 1
    waited = step_counts(EXPERTS).waited
    blocks, micro_batches = 2, 2
    sizes = ("layers/experts/grouped_matmul.py: GroupSizes.sizes", "read")
    assert waited.pop(sizes) == blocks * micro_batches and waited == counts.waited


def test_experts_of_one_rank_make_the_host_wait_for_nothing(alone):
    alone(experts_of_one_rank)


def test_a_step_starts_no_more_kernels_and_moves_no_more_bytes(alone):
    alone(compare)
