"""Trackers get each figure once, a resumed run goes on in them, and none of them can end a run."""

import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from support.short_runs import tiny_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.recipes.recipe import parse_recipe
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics
from trilith.runs.trackers import Trackers
from trilith.training import run


class Notes:
    """A tracker that keeps what it is given, and fails at the step it is told to."""

    name = "notes"

    def __init__(self, fails_at=0):
        self.config = {}
        self.logged = []
        self.fails_at, self.calls = fails_at, list[str]()

    def start(self):
        self.calls.append("start")
        if self.fails_at < 0:
            raise ConnectionError("no\nanswer")

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None):
        if step == self.fails_at:
            raise ConnectionError("no answer")
        self.logged.append((step, values))

    def finish(self):
        self.calls.append("finish")

    @property
    def steps(self):
        return [step for step, _ in self.logged]


def begin(out, names, others, *, start, logged):
    said, more = [], {"project": "p", "recipe": {"seed": 1}, "start": start, "logged": logged}
    made = Trackers(names, others, out, **more, say=said.append)
    vars(made)["said"] = said
    return made


def test_each_tracker_gets_each_step_once_over_a_resume(tmp_path):
    """Run in this process; the checkpoint of step 3 is lost, so that step 3 is done again."""
    write_tokens(tmp_path / "tokens")
    watch = {"norms": 3, "activation_norms": True, "trackers": ["tensorboard"]}
    raw = tiny_recipe(tmp_path / "out", tmp_path / "tokens", steps=5, watch=watch)
    raw["evaluation"] = {"every": 2, "samples": 5, "tokens": str(write_tokens(tmp_path / "held-out", seed=5))}
    raw["checkpoint"] = {"every": 2, "keep": 9}
    first, second = Notes(), Notes()
    run(parse_recipe(raw | {"stop_after": 3}), quiet=True, trackers=[first])
    time.sleep(1)  # TensorBoard reads files in the order of their names, which have the second
    newest = tmp_path / "out" / "checkpoints" / "step-00000003"
    newest.rename(newest.with_name("step-00000003.lost"))
    run(parse_recipe(raw), quiet=True, trackers=[second])
    assert first.calls == second.calls == ["start", "finish"]
    assert first.config["optimizer.lr"] == raw["optimizer"]["lr"] and not second.config
    assert [*dict.fromkeys(first.steps)] == [1, 2, 3] and [*dict.fromkeys(second.steps)] == [4, 5]
    logged = [*first.logged, *second.logged]
    assert all(type(figure) in (int, float) for _, figures in logged for figure in figures.values())
    board = EventAccumulator(str(tmp_path / "out" / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    (norms,) = read_metrics(tmp_path / "out" / "norms.jsonl")
    keys = ("loss", "grad_norm", "lr", "tokens_per_second", "memory", "evaluation_loss")
    expected = {key: [(line["step"] + 1, line[key]) for line in lines if key in line] for key in keys}
    expected["norms/weights/model.norm.weight"] = [(3, norms["weights"]["model.norm.weight"])]
    for key, points in expected.items():
        own = [(step, figures[key]) for step, figures in logged if key in figures]
        assert [step for step, _ in own] == [step for step, _ in points], key
        assert own == points or key in ("tokens_per_second", "memory"), key  # which a step done again changes
        shown = {scalar.step: scalar.value for scalar in board.Scalars(key)}
        assert len(shown) == len(board.Scalars(key)) and shown == pytest.approx(dict(points)), key
    events = [(line["event"], line["step"]) for line in read_events(tmp_path / "out" / "events.jsonl")]
    assert events == [
        *[("started", 0), ("saved", 2), ("saved", 3), ("finished", 3)],
        *[("resumed", 2), ("saved", 4), ("saved", 5), ("finished", 5)],
    ]


def test_a_run_that_measures_no_norms_shows_itself_all_the_same(tmp_path):
    notes, raw = Notes(), tiny_recipe(tmp_path / "out", write_tokens(tmp_path / "tokens"), steps=2)
    run(parse_recipe(raw), quiet=True, trackers=[notes])
    assert notes.steps == [1, 2] and notes.calls == ["start", "finish"]


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path):
    bad, good = Notes(fails_at=2), Notes()
    trackers = begin(tmp_path, [], [bad, good], start=0, logged=0)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0, "skipped": None})
    trackers.close()
    assert bad.steps == [1] and good.steps == [1, 2, 3] and good.calls == ["start", "finish"]
    told = "tracker notes failed and gets nothing more: ConnectionError: no answer"
    assert vars(trackers)["said"] == [told]


def test_a_tracker_that_cannot_start_is_refused_and_the_started_ones_are_ended(tmp_path):
    good = Notes()
    says = r"watch\.trackers: expected notes to start, found ConnectionError: no ans"
    with pytest.raises(BadInput, match=says):
        begin(tmp_path, [], [good, Notes(fails_at=-1)], start=0, logged=0)
    assert good.calls == ["start", "finish"]


def install(monkeypatch, name, **offers):
    """Stand in for a tracker's package, which the tests do without."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in offers.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def service(monkeypatch, name):
    """Stand in for a package that Accelerate knows; return what it is begun with, and the steps it gets."""
    begun = []
    steps = []
    if name == "mlflow":
        limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=99, MAX_PARAMS_TAGS_PER_BATCH=9)

        def start_run(**options):
            begun.append(options)
            return SimpleNamespace(info=SimpleNamespace(run_id="theirs"))

        install(
            monkeypatch, name,
            search_experiments=lambda filter_string: [], create_experiment=lambda **options: "1",
            start_run=start_run, end_run=lambda: None, log_params=lambda values: None,
            utils=SimpleNamespace(validation=limits),
            log_metrics=lambda values, step: steps.append(step),
        )  # fmt: skip
        return begun, steps

    def init(**options):
        begun.append(options)
        return SimpleNamespace(log=lambda values, step: steps.append(step), finish=lambda: None)

    install(monkeypatch, name, init=init, config=SimpleNamespace(update=lambda values, **more: None))
    return begun, steps


@pytest.mark.parametrize(("name", "identity"), [("wandb", "id"), ("trackio", "name"), ("mlflow", "run_id")])
def test_a_resumed_run_goes_on_in_the_same_run_of_a_named_tracker(tmp_path, monkeypatch, name, identity):
    from accelerate import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {})  # another test of this process may have one
    begun, steps = service(monkeypatch, name)
    for start, logged, until in ((0, 0, 3), (2, 3, 5), (0, 0, 1)):
        trackers = begin(tmp_path, [name], [], start=start, logged=logged)
        for step in range(start + 1, until + 1):
            trackers.log(step, {"loss": 1.0 / step})
        trackers.close()
        assert not vars(trackers)["said"]
    assert steps == [1, 2, 3, 4, 5, 1]
    first, resumed, anew = (one[identity] for one in begun)
    assert (resumed == first and anew != first) if name != "mlflow" else (first, resumed, anew) == (
        *(None, "theirs"), None
    )  # fmt: skip
    assert not PartialState._shared_state  # Accelerate is as it was
