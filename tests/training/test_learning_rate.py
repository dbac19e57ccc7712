"""Learning rates against their laws and, after the warm-up, against transformers' number for number."""

import math
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.short_runs import run_and_listen, tiny_recipe
from trilith.testing import run_parallel
from trilith.training.learning_rate import Schedule, scaled_rate

PEAK, TOTAL, WARMUP, DECAY = 3e-4, 40, 7, 12

#: Ours, and the name by which transformers makes its own, with its further arguments.
THEIRS = {
    "constant": (Schedule("constant", PEAK, TOTAL, WARMUP), "constant_with_warmup", {}),
    "linear": (Schedule("linear", PEAK, TOTAL, WARMUP), "linear", {}),
    "cosine": (Schedule("cosine", PEAK, TOTAL, WARMUP), "cosine", {}),
    "cosine-minimum": (
        Schedule("cosine", PEAK, TOTAL, WARMUP, minimum=0.1),
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
    ),
    "inverse_sqrt": (Schedule("inverse_sqrt", PEAK, TOTAL, WARMUP), "inverse_sqrt", {}),
    "inverse_sqrt-no-warmup": (Schedule("inverse_sqrt", PEAK, TOTAL), "inverse_sqrt", {}),
    **{
        f"wsd-{shape}": (
            Schedule("wsd", PEAK, TOTAL, WARMUP, minimum=0.05, decay=DECAY, shape=shape),
            "warmup_stable_decay",
            {"num_decay_steps": DECAY, "decay_type": shape, "min_lr_ratio": 0.05},
        )
        for shape in ("linear", "cosine", "1-sqrt")
    },
}


@pytest.mark.parametrize("name", THEIRS)
def test_rates_rise_in_a_straight_line_whose_first_step_learns_and_then_are_transformers(name):
    ours, theirs, more = THEIRS[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    sizes = {"num_warmup_steps": ours.warmup, "num_training_steps": TOTAL}
    scheduler = transformers.get_scheduler(theirs, optimizer, **sizes, scheduler_specific_kwargs=more)
    for step in range(TOTAL + 1):
        if step < ours.warmup:
            assert ours.rate(step) == pytest.approx(PEAK * (step + 1) / WARMUP, rel=1e-15)
        else:
            assert ours.rate(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-14, abs=1e-18), step
        optimizer.step()
        scheduler.step()
    if ours.warmup:
        assert ours.rate(WARMUP - 1) == ours.rate(WARMUP) == pytest.approx(PEAK)


def test_each_law_at_points_worked_out_by_hand():
    linear = Schedule("linear", 1.0, 110, warmup=10, minimum=0.2)
    assert [linear.rate(step) for step in (0, 10, 60, 110, 500)] == pytest.approx([0.1, 1, 0.6, 0.2, 0.2])
    cosine = Schedule("cosine", 1.0, 110, warmup=10, minimum=0.2)
    assert cosine.rate(60) == pytest.approx(0.6)
    assert cosine.rate(35) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)))
    wsd = Schedule("wsd", 1.0, 100, warmup=10, decay=36)
    assert [wsd.rate(step) for step in (10, 63, 64, 73, 80, 100)] == pytest.approx([1, 1, 1, 0.5, 1 / 3, 0])
    inverse = Schedule("inverse_sqrt", 1.0, 10**9, warmup=100, minimum=0.25)
    assert [inverse.rate(step) for step in (99, 100, 400, 10_000)] == pytest.approx([1, 1, 0.5, 0.25])


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd", "inverse_sqrt"]),
    total=st.integers(2, 500),
    warmup=st.integers(0, 100),
    decay=st.integers(0, 100),
    minimum=st.floats(0, 1),
    shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
)
def test_a_rate_lies_between_minimum_and_peak_and_falls_after_the_warmup(
    kind, total, warmup, decay, minimum, shape
):
    schedule = Schedule(kind, 2.0, total, warmup, minimum, decay, shape)
    rates = [schedule.rate(step) for step in range(total + 3)]
    assert all(rate > 0 for rate in rates[:warmup])
    after = rates[warmup:]
    assert all(2 * minimum - 1e-12 <= rate <= 2 + 1e-12 for rate in after)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))


def test_the_rate_scales_with_the_batch_by_the_rule_and_says_so():
    assert scaled_rate(1e-3, "sqrt", batch=64, reference=16) == (
        2e-3,
        "learning rate 0.002 = 0.001 x sqrt(64 / 16), for a batch of 64 samples",
    )
    assert scaled_rate(1e-3, "linear", batch=8, reference=16) == (
        5e-4,
        "learning rate 0.0005 = 0.001 x 8 / 16, for a batch of 8 samples",
    )
    assert scaled_rate(1e-3, None, batch=8, reference=16) == (1e-3, "")


@pytest.mark.parametrize("layout", [{}, {"data": 2}], ids=["one-process", "dp2"])
def test_a_run_follows_its_schedule_and_says_how_its_rate_was_scaled(tmp_path, tokens, layout):
    wanted = {"schedule": "wsd", "decay": 2, "decay_shape": "linear", "minimum_ratio": 0.0, "warmup": 2}
    scaled = {"lr": 1e-3, "scale_lr": "sqrt", "reference_batch": 1}
    raw = tiny_recipe(tmp_path / "run", tokens, layout=layout, optimizer=wanted | scaled)
    ran = run_parallel(run_and_listen, len(layout) + 1, raw)
    (rates, said), *others = (([step.lr for step in steps], lines) for steps, lines in ran)
    assert rates == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 2e-3, 1e-3])
    assert "learning rate 0.002 = 0.001 x sqrt(4 / 1), for a batch of 4 samples" in said
    assert all(other == rates and "learning rate" not in quiet for other, quiet in others)
