"""Write a job's file for each system with ``trilith launch``, and refuse jobs that cannot be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from trilith.cli.app import run

RECIPE = "llama-3.1-70b-64gpus"


def written(folder: Path, *words: str) -> str:
    out = folder / "job"
    assert run(["launch", *words, "--out", str(out), "--force"]) == 0
    return out.read_text()


def loaded(folder: Path, *words: str) -> Any:
    return yaml.safe_load(written(folder, *words))


@pytest.mark.parametrize("system", ["slurm", "kubernetes", "jobset", "skypilot"])
def test_a_file_says_the_layout_s_ranks_and_how_it_is_started(system: str, tmp_path: Path) -> None:
    text = written(tmp_path, system, RECIPE, "--nodes", "16")
    assert "on 16 nodes with 4 ranks each" in text
    assert f"trilith train {RECIPE}" in text or RECIPE in yaml.safe_load(text)["spec"].__repr__()


def test_a_slurm_script_is_a_script_of_bash_and_holds_what_was_asked(tmp_path: Path) -> None:
    options = ["--partition", "gpu", "--account", "lab", "--exclude", "n7", "--exclude", "n9"]
    limits = ["--minutes", "90", "--warning", "10", "--restarts", "2"]
    text = written(tmp_path, "slurm", RECIPE, "optimizer.lr=1e-4", *options, *limits)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    directives = [line.split("#SBATCH ")[1].split()[0] for line in text.splitlines() if "#SBATCH " in line]
    wanted = {"--nodes=8", "--gpus-per-node=8", "--time=01:30:00", "--signal=B:USR1@600", "--requeue"}
    wanted |= {"--partition=gpu", "--account=lab", "--exclude=n7,n9", "--ntasks-per-node=1"}
    assert wanted <= set(directives)
    assert f"trilith train {RECIPE} optimizer.lr=1e-4" in text and '"$restart" -lt 2' in text
    assert text.index("#SBATCH --exclude") < text.index("set -u"), "Slurm reads no directive after a command"


def test_kubeflow_s_plugin_starts_torchrun_with_the_numbers_of_the_job(tmp_path: Path) -> None:
    job = loaded(tmp_path, "kubernetes", RECIPE, "--image", "here/trilith:1", "--name", "Llama_70B")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (8, 8, "here/trilith:1")
    assert trainer["command"][:2] == ["torchrun", "--no-python"]
    assert job["metadata"]["name"] == "llama-70b"


def test_the_pods_of_a_job_set_meet_at_the_first(tmp_path: Path) -> None:
    job = loaded(tmp_path, "jobset", RECIPE, "--name", "big")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (8, 8, "Indexed")
    container = spec["template"]["spec"]["containers"][0]
    assert "--rdzv-endpoint=big-node-0-0.big:29400" in container["command"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    claims = spec["template"]["spec"]["volumes"]
    assert {one["name"] for one in claims} == {one["name"] for one in container["volumeMounts"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([RECIPE, "--nodes", "7"], "layout: expected 70 ranks for 7 nodes x 10, found"),
        ([RECIPE, "--nodes", "4", "--ranks-per-node", "8"], "expected 32 ranks for 4 nodes x 8, found"),
        ([RECIPE, "--minutes", "5"], "--warning: expected fewer minutes than the limit of 5, found 5"),
        ([RECIPE, "--name", "a b"], "--name: expected letters, digits, - _ and ., found 'a b'"),
        ([RECIPE, "layout.tensor=3"], "tensor"),
    ],
)
def test_a_job_that_cannot_be_is_refused_and_nothing_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job"
    assert run(["launch", "slurm", *words, "--out", str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_somebody_adapted_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "job"
    out.write_text("mine")
    assert run(["launch", "slurm", RECIPE, "--out", str(out)]) == 2
    assert out.read_text() == "mine"


def test_a_job_is_not_submitted_where_there_is_no_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "job"
    assert run(["launch", "slurm", RECIPE, "--out", str(out), "--submit"]) == 2
    assert "expected the program sbatch on this machine" in capsys.readouterr().err
    assert not out.exists()
