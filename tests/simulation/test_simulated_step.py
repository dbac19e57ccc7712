"""A rank's whole step on the simulated device: who holds the bytes at its worst instant, and what it sends.

That the peak is the measured one to 0.1% is tested with the layouts themselves, in ``tests/layouts``.
"""

import os
import re
import signal
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.short_runs import tiny_recipe, write_recipe
from support.short_training import Case
from support.simulated_steps import ledger_of
from trilith.cli.app import run
from trilith.layers import GatedMLP, RMSNorm
from trilith.parallel_state import BadInput, Layout, engine
from trilith.planner.dry_run import dry_run
from trilith.planner.search.simulation_worker import Worker
from trilith.recipes.recipe import parse_recipe
from trilith.simulation import operators
from trilith.simulation.operators import facts_of

EXAMPLES = Path(__file__).parents[2] / "examples"
CASE = Case(
    TINIEST_LLAMA,
    Layout.of(tensor=2, sequence=True, data=2, zero=3),
    samples=4,
    dtype=torch.float32,
    compute=torch.bfloat16,
)


def recipe(folder, **more):
    raw = tiny_recipe(
        folder / "run",
        folder / "tokens",
        steps=1,
        dtype="float32",
        compute="bfloat16",
        data={"global_batch": 8},
    )
    raw["model"] = {"config": TINIEST_LLAMA}
    return parse_recipe(raw | more)


def test_a_worker_answers_for_each_rank_of_a_recipe(worker, tmp_path):
    """Stages differ; a question repeated gives the same record, byte by byte; bad input ends no worker."""
    cut = recipe(tmp_path, layout={"pipeline": 2, "data": 2, "zero": 1}, device="cuda")
    first, last = (worker.simulate(cut, rank) for rank in (0, 3))
    assert first.kernels == "gpu" and (first.rank, last.rank) == (0, 3)
    assert worker.simulate(cut, 0) == first
    with pytest.raises(BadInput, match="sequence_length"):
        worker.simulate(recipe(tmp_path, data={**cut.data.model_dump(), "sequence_length": 4096}))
    for record in (first, last):
        assert sum(record.kinds.values()) == sum(one.bytes for one in record.holders) == record.peak
        assert max(size for _, size in record.timeline) <= record.peak and record.host == 0
        assert {phase for phase, _ in record.timeline} == {"forward", "backward", "update"}
        axes = {(one.axis, one.kind) for one in record.collectives}
        assert {("data", "all_gather"), ("data", "reduce_scatter"), ("pipeline", "send")} <= axes
    assert not any("head" in one.module for one in first.holders)
    assert any(one.kind == "logits and loss" for one in last.holders)


def test_the_plan_counts_what_waits_for_the_second_part_of_a_backward(worker, tmp_path):
    """Products of experts and a recurrence make more than they free: 5% of this step."""
    zbv = recipe(
        tmp_path,
        layout={"pipeline": 2, "schedule": "zbv", "expert": 2, "data": 2, "zero": 1},
        model={"size": "qwen3-next-80b-a3b", "config": {"num_hidden_layers": 4, "num_experts": 16}},
        data={"tokens": "tokens", "sequence_length": 2048, "global_batch": 8, "micro_batch": 1},
        device="cuda",
    )
    planned = dry_run(zbv, rank=2).rank.memory.total
    assert planned / worker.simulate(zbv, 2).peak == pytest.approx(1, abs=0.003)


def test_stages_of_a_users_module_have_their_tensor_ranks_and_learned_masks(worker):
    """T5's biases of attention need a gradient, which a CPU's kernel has not: the CPU composes it."""
    raw = tomllib.loads((EXAMPLES / "t5.toml").read_text())
    raw["model"]["module"], raw["loss"]["module"] = (f"{EXAMPLES}/t5_parallel.py:{x}" for x in ("T5", "loss"))
    raw["data"]["module"] = f"{EXAMPLES}/own_data.py:Reversed"
    checked = parse_recipe(raw | {"layout": {"tensor": 2, "pipeline": 2}})
    record = worker.simulate(checked, 2)
    assert dry_run(checked, rank=2).rank.memory.total / record.peak == pytest.approx(1, abs=0.02)
    assert any("bmm" in operator.name for operator in record.operators)  # scores, a matrix of their own


def test_a_worker_that_has_ended_is_an_error(tmp_path):
    made = Worker()
    made._process.kill()
    with pytest.raises(RuntimeError, match="ended with code -9"):
        made.simulate(recipe(tmp_path))
    made.close()


def test_offload_is_counted_apart(worker, tmp_path):
    away = worker.simulate(recipe(tmp_path, memory={"offload": True}, device="cuda"))
    here = worker.simulate(recipe(tmp_path, device="cuda"))
    assert "moments" not in away.kinds and away.host > 0
    assert here.kinds["moments"] + here.kinds["weights"] <= away.host + here.kinds["weights"]
    assert away.peak < here.peak


@contextmanager
def kept_too_long():
    """Keep the output of each feed-forward until the step's end."""
    sound, kept = GatedMLP.forward, []

    def forward(mlp, x):
        y = sound(mlp, x)
        kept.append(y.detach() * 1)
        return y

    with mock.patch.object(GatedMLP, "forward", forward):
        yield


@contextmanager
def summed_twice():
    """Sum the input of each norm over the tensor ranks for nothing."""
    sound = RMSNorm.forward

    def forward(norm, x):
        engine.all_reduce(x.detach(), norm.state.tensor.group)
        return sound(norm, x)

    with mock.patch.object(RMSNorm, "forward", forward):
        yield


@contextmanager
def computed_twice():
    sound = GatedMLP.forward

    def forward(mlp, x):
        sound(mlp, x.detach())
        return sound(mlp, x)

    with mock.patch.object(GatedMLP, "forward", forward):
        yield


def faults():
    """Each mistake changes the figure that it must change, and who is to blame is named."""
    sound = ledger_of(CASE)
    with kept_too_long():
        record = ledger_of(CASE)
    blamed = [one for one in record.holders if one.operator == "aten::mul" and one.module.endswith("mlp")]
    assert record.peak > sound.peak and blamed
    with summed_twice():
        record = ledger_of(CASE)
    counts = [
        sum((one.axis, one.kind) == ("tensor", "all_reduce") for one in each.collectives)
        for each in (sound, record)
    ]
    assert counts[1] > counts[0] + 1
    with computed_twice():
        assert ledger_of(CASE).flops > sound.flops


def kernels():
    """A GPU keeps the log-sums of attention and no scores; full checkpointing recomputes what it forgot."""
    case = replace(CASE, layout=Layout(), length=64, samples=1)
    for which, operator in {"gpu": "flash_attention", "cpu": "flash_attention_for_cpu"}.items():
        record = ledger_of(case, kernels=which)
        with mock.patch.object(operators, "facts_of", lambda func: facts_of(func)._replace(gives=None)):
            # Nothing is remembered.
            assert ledger_of(case, kernels=which) == record
        names = {one.name for one in record.operators if "attention" in one.name}
        name = f"aten::_scaled_dot_product_{operator}"
        assert names == {name, f"{name}_backward"}
    full = replace(case, memory=case.memory.model_copy(update={"checkpointing": "full"}))
    again = ledger_of(full)
    assert {one.phase for one in again.operators} == {"forward", "recomputation", "backward", "update"}
    assert 1.1 < again.flops / record.flops < 1.4


def figures():
    kernels()
    faults()


def test_each_device_has_its_kernels_and_mistakes_change_the_figures(alone):
    alone(figures)


def test_a_dry_run_says_who_holds_the_bytes_and_draws_the_step(worker, tmp_path, capsys, monkeypatch):
    """As the plan of the same rank, in the kinds that the ledger knows; no foreign file is replaced."""
    lent = SimpleNamespace(simulate=worker.simulate, close=lambda: None)
    monkeypatch.setattr("trilith.planner.search.Worker", lambda: lent)
    recipe, page = tmp_path / "recipe.toml", tmp_path / "memory.html"
    raw = tiny_recipe(tmp_path / "run", tmp_path / "tokens", layout={"data": 2, "zero": 1})
    write_recipe(recipe, raw | {"model": {"config": TINIEST_LLAMA}})
    assert run(["train", str(recipe), "--dry-run", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert abs(float(re.search(r"the plan says .*\((.*)%\)", printed)[1])) < 1
    assert "activations" in printed and "layers.*" in printed and " MB of tensors at" in printed
    drawn = page.read_text()
    assert "<svg" in drawn and "backward" in drawn and "layers.*" in drawn
    page.write_text("mine")
    assert run(["train", str(recipe), "--dry-run", "--html", str(page)]) == 2 and page.read_text() == "mine"
    assert run(["train", str(recipe), "--exact"]) == 2
    capsys.readouterr()
    assert run(["train", str(recipe), "--dry-run", "--exact", "device=cpu", "memory.offload=true"]) == 0
    printed = capsys.readouterr().out  # what a CPU moves to the host stays in the same memory
    assert abs(float(re.search(r"the plan says .*\((.*)%\)", printed)[1])) < 1
    assert "memory.offload saves nothing on a CPU" in printed and "beside, on the host" not in printed


@pytest.mark.parametrize("dies", ["the one who asks stops", "the one who asks dies"])
def test_a_worker_that_nobody_listens_to_ends_in_silence(dies, tmp_path, capfd):
    """Stopped, as by Ctrl-C, it ends at once; and it may just have an answer when its parent is gone."""
    made = Worker()
    process = made._process
    made._pipe.send((recipe(tmp_path), 0, None))
    assert os.getpgid(process.pid) == process.pid, "Ctrl-C is for the one who asks"
    if dies.endswith("dies"):
        made._pipe.close()
        assert process.wait() == 0
    else:
        made.close()
        assert process.returncode == -signal.SIGKILL
    assert capfd.readouterr() == ("", "")
