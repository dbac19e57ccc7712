"""Trackers get each figure once, a resumed run goes on in them, and none of them can end a run."""

import json
import sqlite3
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from support.short_runs import tiny_recipe
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.recipes.recipe import parse_recipe
from trilith.runs.trackers import Trackers, check_trackers
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


def test_a_tracker_of_the_user_s_own_gets_each_step_once_over_a_resume(tmp_path):
    """Run in this process; the checkpoint of step 3 is lost, so that step 3 is done again."""
    write_tokens(tmp_path / "tokens")
    raw = tiny_recipe(tmp_path / "out", tmp_path / "tokens", steps=5, watch={"norms": 2})
    raw["checkpoint"] = {"every": 2, "keep": 9}
    first, second = Notes(), Notes()
    run(parse_recipe(raw | {"stop_after": 3}), quiet=True, trackers=[first])
    newest = tmp_path / "out" / "checkpoints" / "step-00000003"
    newest.rename(newest.with_name("step-00000003.lost"))
    run(parse_recipe(raw), quiet=True, trackers=[second])
    assert first.calls == second.calls == ["start", "finish"]
    assert first.config["optimizer.lr"] == raw["optimizer"]["lr"] and not second.config
    assert [*dict.fromkeys(first.steps)] == [1, 2, 3] and [*dict.fromkeys(second.steps)] == [4, 5]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    figures = {step: values for step, values in second.logged if "loss" in values}
    assert {step: values["loss"] for step, values in figures.items()} == {
        line["step"] + 1: line["loss"] for line in lines if line["step"] >= 3
    }
    assert any(name.startswith("norms/weights/") for step, values in second.logged for name in values)
    assert all(type(value) in (int, float) for _, values in second.logged for value in values.values())


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


def attempts(out, name, *starts):
    """Log the steps of each start; by default 1 to 3, and after a resume from step 2 those up to 5."""
    for start, logged, until in starts or ((0, 0, 3), (2, 3, 5)):
        trackers = begin(out, [name], [], start=start, logged=logged)
        for step in range(start + 1, until + 1):
            trackers.log(step, {"loss": 1.0 / step})
        trackers.close()
        assert not vars(trackers)["said"]


@pytest.mark.parametrize(("name", "identity"), [("wandb", "id"), ("trackio", "name"), ("mlflow", "run_id")])
def test_a_resumed_run_goes_on_in_the_same_run_of_a_named_tracker(tmp_path, monkeypatch, name, identity):
    from accelerate import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {})  # another test of this process may have one
    begun, steps = service(monkeypatch, name)
    attempts(tmp_path, name, (0, 0, 3), (2, 3, 5), (0, 0, 1))
    assert steps == [1, 2, 3, 4, 5, 1]
    first, resumed, anew = (one[identity] for one in begun)
    assert (resumed == first and anew != first) if name != "mlflow" else (first, resumed, anew) == (
        *(None, "theirs"), None
    )  # fmt: skip
    assert not PartialState._shared_state  # Accelerate is as it was


def wandb_steps(file):
    """Return the steps in a file of wandb's: LevelDB's log format around protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, found = file.read_bytes(), 7, []
    while at + 7 <= len(raw):
        length = int.from_bytes(raw[at + 4 : at + 6], "little")
        record = Record()
        record.ParseFromString(raw[at + 7 : at + 7 + length])
        found += [
            int(item.value_json) for item in record.history.item if "_step" in (item.key, *item.nested_key)
        ]
        at += 7 + length
    return found


@pytest.mark.slow
def test_wandb_itself_offline_has_each_step_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is no dependency of the tests")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    attempts(tmp_path, "wandb")
    wandb.teardown()  # the process that it starts, which would live as long as this one
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [step for file in files for step in wandb_steps(file)] == [1, 2, 3, 4, 5]
    assert len({file.name for file in files}) == 1  # one run for wandb


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "key"), [("trackio", "trackio/p.db", "run_name"), ("mlflow", "mlflow.db", "run_uuid")]
)
def test_trackio_and_mlflow_have_each_step_once_and_the_recipe(tmp_path, monkeypatch, name, file, key):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by its import
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    pytest.importorskip(name, reason=f"{name} is no dependency of the tests")
    attempts(tmp_path, name)
    with sqlite3.connect(tmp_path / file) as base:
        rows = base.execute(f"select {key}, step from metrics order by step").fetchall()
        params = base.execute("select key, value from params").fetchall() if name == "mlflow" else []
    assert [step for _, step in rows] == [1, 2, 3, 4, 5] and len({one for one, _ in rows}) == 1
    assert params == [("seed", "1")][: name == "mlflow"]


def test_a_package_that_is_missing_is_named_with_what_to_install():
    unknown = "no_such"  # no name of the list, because the packages of those may be installed
    with pytest.raises(BadInput, match=r"trackers: no_such: .*pip install no_such"):
        check_trackers([unknown])
