"""A step that updates nothing: all ranks skip the same one, no bit of a parameter moves, a resume knows."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.short_runs import tiny_recipe, trainer_of
from support.stop_and_go import StopAndGo, stop_and_go
from trilith.parallel_state import Layout, NotTrained, ParallelState, declarations
from trilith.parallel_state.engine import local_data
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.section import LossScaleSection, SpikeSection
from trilith.runs.metrics import read_metrics
from trilith.testing import RankError, run_parallel
from trilith.training.update import MOST_OVERFLOWS, LossScale, Spikes, Update

HALF = {"dtype": "float32", "compute": "float16", "steps": 5}
HALF["loss_scale"] = {"initial": 256.0, "growth_interval": 2}
TOO_HIGH = HALF | {"loss_scale": {"initial": 2.0**24, "growth_interval": 0}}
SPIKES = {"optimizer": {"skip_spikes": {"window": 4, "deviations": 100.0}}}
LAYOUTS = [
    pytest.param({"tensor": 2}, id="tp2"),
    pytest.param({"pipeline": 2}, id="pp2"),
    pytest.param({"data": 2, "zero": 1}, id="zero1", marks=pytest.mark.slow),
    pytest.param({"data": 2, "zero": 3}, id="zero3"),
    pytest.param({"data": 2}, id="dp2", marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "pipeline": 2}, id="tp2-pp2", marks=pytest.mark.slow),
]


def run_to_end(trainer):
    """Train, and return the metrics of each step."""
    steps = []
    trainer.run(steps.append)
    return steps


def run_with_a_leap(raw, step, factor):
    """Train, multiplying the last rank's last gradient at ``step``; return metrics and which steps moved.

    That gradient is a norm's: under tensor parallelism the last rank has only a copy of it, which does not
    count in the gradient norm.
    """
    trainer = trainer_of(raw)
    state = trainer.state
    update, moved = Update.__call__, []

    def stored():
        return [local_data(parameter).clone() for parameter in trainer.model.parameters()]

    def leap(number, scale):
        if number == step and state.rank == state.layout.world - 1:
            norms = [name for name, one in declarations(trainer.model).items() if len(one.shape) == 1]
            last = trainer.model.get_parameter([name for name in norms if "norm" in name][-1])
            assert last.grad is not None
            local_data(last.grad).mul_(factor)

    def noting(self, result):
        before = stored()
        done = update(self, result)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, stored(), strict=True)))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Update, "__call__", noting)
        patch.setattr(trainer.callbacks, "gradients", leap)
        return run_to_end(trainer), moved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(tmp_path, tokens, layout):
    raw = tiny_recipe(tmp_path / "run", tokens, layout=layout, **HALF)
    world = parse_recipe(raw).layout.world
    for metrics, moved in run_parallel(run_with_a_leap, world, raw, 1, math.inf):
        assert [one.skipped for one in metrics] == [None, "overflow", None, None, None]
        assert moved == [True, False, True, True, True]
        assert [one.loss_scale for one in metrics] == [256, 256, 128, 128, 256]
        assert [one.skips for one in metrics] == [0, 1, 1, 1, 1]
        assert all(math.isfinite(one.loss) for one in metrics)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("skipped") for line in lines] == [None, "overflow", None, None, None]
    assert [line["grad_norm"] is None for line in lines] == [False, True, False, False, False]


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"data": 2, "zero": 3}], ids=["pp2", "zero3"])
def test_a_leap_of_the_norm_on_one_rank_skips_the_step_on_all(tmp_path, tokens, layout):
    raw = tiny_recipe(tmp_path / "run", tokens, layout=layout, **SPIKES)
    for metrics, moved in run_parallel(run_with_a_leap, 2, raw, 3, 1e9):
        assert [one.skipped for one in metrics] == [None, None, None, "spike", None, None]
        assert moved == [True, True, True, False, True, True]
        assert metrics[-1].skips == 1


def run_in_doubt(raw):
    """Return which steps are skipped when only the last rank takes the third step for a spike."""
    trainer = trainer_of(raw)
    state = trainer.state

    def doubt(self, loss, norm):
        return state.rank == state.layout.world - 1 and len(self.losses) == 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spikes, "is_one", doubt)
        return [metrics.skipped for metrics in run_to_end(trainer)]


def test_if_one_rank_sees_a_spike_all_skip(tmp_path, tokens):
    raw = tiny_recipe(tmp_path / "run", tokens, layout={"data": 2}, steps=3, **SPIKES)
    assert run_parallel(run_in_doubt, 2, raw) == [[None, None, "spike"]] * 2


def test_the_state_is_the_model_s_where_none_is_given():
    model = torch.nn.Linear(1, 1)
    for own in (ParallelState.stand_in(Layout.of(data=2), 1), None):
        model.state = own
        state = Update(model, torch.optim.SGD(model.parameters()), clip=1.0).state
        assert state is own or (own is None and state.layout == Layout())


def leap_to_infinity(raw):
    check_third_skipped(run_with_a_leap(raw, 2, math.inf))


def leap_of_the_norm(raw):
    check_third_skipped(run_with_a_leap(raw, 2, 1e9))


def check_third_skipped(ended):
    assert all((one.skipped is not None) == (one.step == 2) for one in ended[0])


def skipped(why, layout, changes, leap, *, slow=False):
    """Stopped with a window half full, and after the skipped step, whose moments did not count."""
    recipe = {**changes, "layout": layout, "steps": 4}
    return StopAndGo(why, [{}] * 3, recipe, stops=[1, 3], train=leap, slow=slow)


test_a_run_with_a_skipped_step_resumes_bitwise = stop_and_go(
    skipped("fp16", {}, HALF, leap_to_infinity),
    skipped("fp16-tp2", {"tensor": 2}, HALF, leap_to_infinity, slow=True),
    skipped("fp16-zero1", {"data": 2, "zero": 1}, HALF, leap_to_infinity, slow=True),
    skipped("spike-pp2", {"pipeline": 2}, SPIKES, leap_of_the_norm, slow=True),
    skipped("spike-zero3", {"data": 2, "zero": 3}, SPIKES, leap_of_the_norm, slow=True),
    skipped("spike", {}, SPIKES, leap_of_the_norm),
)


def test_gradients_that_do_overflow_bring_the_scale_down_until_they_do_not(tmp_path, tokens):
    raw = tiny_recipe(tmp_path / "run", tokens, **TOO_HIGH | {"steps": 12}, layout={"data": 2})
    ((metrics, moved), _) = run_parallel(run_with_a_leap, 2, raw, -1, 1.0)
    assert metrics[0].skipped == "overflow" and metrics[-1].skipped is None and moved[-1]
    assert moved == [one.skipped is None for one in metrics]
    assert metrics[-1].loss_scale == 2.0 ** (24 - metrics[-1].skips)


def test_overflows_without_end_stop_the_run_and_name_the_scale():
    scale = LossScale(LossScaleSection(initial=2.0**64, maximum=2.0**64))
    for _ in range(MOST_OVERFLOWS - 1):
        assert scale.overflowed()
    with pytest.raises(NotTrained, match=r"40 steps in a row were skipped.* loss scale of 3.35544e.07"):
        scale.overflowed()
    with pytest.raises(ValidationError):
        LossScaleSection(initial=2.0**1000)


@pytest.mark.parametrize("half", [True, False], ids=["fp16-at-its-minimum", "fp64"])
def test_what_scaling_cannot_mend_stops_the_run(tmp_path, tokens, half):
    least = {"initial": 1.0, "minimum": 1.0}
    changes = HALF | {"loss_scale": least} if half else {}
    raw = tiny_recipe(tmp_path / "run", tokens, layout={"tensor": 2}, **changes)
    with pytest.raises(RankError, match=r"step 2: rank 1: the gradient of norm\.weight is not finite"):
        run_parallel(run_with_a_leap, 2, raw, 1, math.nan)


def test_the_scale_halves_grows_and_stays_between_its_bounds():
    scale = LossScale(LossScaleSection(initial=4, growth_interval=2, minimum=2, maximum=8))
    seen = []
    for finite in (True, True, True, True, True, False, True, False, True, True):
        scale.went_well() if finite else scale.overflowed()
        seen.append(scale.value)
    assert seen == [4, 8, 8, 8, 8, 4, 4, 2, 2, 4]
    assert scale.overflowed() and scale.value == 2 and not scale.overflowed() and scale.value == 2
    for saved, restored in ((2.0, 2), (0.5, 2), (64.0, 8)):  # a resumed run may have other bounds
        scale.restore({"value": saved, "good": 0})
        assert scale.value == restored


def test_a_spike_is_so_many_deviations_above_the_mean_of_the_window():
    spikes = Spikes(SpikeSection(window=8, deviations=3))
    drawn = np.random.default_rng(0).normal(3.0, 0.1, 20)
    for number, loss in enumerate(drawn):
        seen = drawn[max(0, number - 8) : number]
        if number < 4:
            assert not spikes.is_one(1e9, 1e9)
        else:
            limit = seen.mean() + 3 * seen.std(ddof=1)
            assert not spikes.is_one(limit - 1e-9, 1.0) and spikes.is_one(limit + 1e-9, 1.0)
            assert spikes.is_one(3.0, 1.0 + 1e-9), "the norm alone"
            assert not spikes.is_one(-1e9, -1e9), "less is no spike"
        spikes.note(float(loss), 1.0)


def test_a_level_that_stays_is_no_spike_for_long():
    spikes = Spikes(SpikeSection(window=16, deviations=6))
    values = [1.0 + 0.01 * (step % 3) for step in range(32)] + [5.0] * 16
    found = []
    for value in values:
        found.append(spikes.is_one(value, 1.0))
        spikes.note(value, 1.0)
    assert found.index(True) == 32 and not found[-1] and sum(found) < 4
