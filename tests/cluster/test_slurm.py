"""Run the written sbatch script on a real Slurm: two nodes, a signal before the limit, a requeue."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trilith.cli.app import run
from trilith.recipes.foreign.translation import to_toml
from trilith.testing.short_runs import losses, tiny_recipe, train, write_tokens
from trilith.testing.slurm import NoSlurm, Slurm, slurm, unpack

pytestmark = pytest.mark.timeout(500)
STEPS = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    try:
        root = unpack(folder / "unpacked")
    except NoSlurm as reason:
        # A system without Debian's packages has no Slurm of ours; test_job_files.py reads the script there.
        pytest.skip(f"no Slurm to test with: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with slurm(folder / "run", root) as running:
            yield running


def prepare(folder: Path) -> dict[str, Any]:
    """Write a recipe of two ranks and its script for two nodes; return the recipe."""
    tokens = write_tokens(folder / "tokens", count=40_000)
    raw = tiny_recipe(folder / "run", tokens, steps=STEPS, layout={"data": 2}, log_every=1)
    (folder / "recipe.toml").write_text("".join(f"{key} = {to_toml(value)}\n" for key, value in raw.items()))
    script = ["--nodes", "2", "--minutes", "10", "--warning", "2", "--out", str(folder / "job.sbatch")]
    assert run(["launch", "slurm", str(folder / "recipe.toml"), *script]) == 0
    return raw


def wait_for_steps(folder: Path, count: int, seconds: float = 200) -> None:
    ends, metrics = time.monotonic() + seconds, folder / "run/metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < ends, f"no step {count}: {[*folder.rglob('*.log')]}"
        time.sleep(0.05)


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))


def test_a_job_saves_before_its_limit_goes_back_into_the_queue_and_goes_on_bitwise(
    cluster: Slurm, tmp_path: Path
) -> None:
    raw = prepare(tmp_path)
    job = cluster.submit(tmp_path / "job.sbatch")
    wait_for_steps(tmp_path, 5)
    cluster.command("scancel", "--batch", "--signal=USR1", job)  # as Slurm does two minutes before the limit
    state = cluster.wait(job, "PENDING", "COMPLETED", "FAILED")
    assert state == "PENDING", said(tmp_path)
    first = len(losses(tmp_path / "run"))
    assert 5 <= first < STEPS
    assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", said(tmp_path)
    assert f"stopped and saved after step {first}" in said(tmp_path)
    train(raw | {"out": str(tmp_path / "whole")})
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not (tmp_path / "run/stop").exists()
