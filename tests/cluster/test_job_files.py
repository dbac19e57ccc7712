"""Write a job's file for each system with ``trilith launch``, and refuse jobs that cannot be."""

import subprocess

import pytest
import yaml
from support.command_lines import call_command
from support.pages import Page
from support.refusals import Refused, refusals
from trilith.cli.app import run

RECIPE = "llama-3.1-70b-64gpus"


def written(folder, *words):
    out = folder / "job"
    assert run(["launch", *words, "--out", str(out), "--force"]) == 0
    return out.read_text()


def loaded(folder, *words):
    return yaml.safe_load(written(folder, *words))


@pytest.mark.parametrize("system", ["slurm", "kubernetes", "jobset", "skypilot"])
def test_a_file_says_the_layout_s_ranks_and_how_it_is_started(system, tmp_path):
    text = written(tmp_path, system, RECIPE, "--nodes", "16")
    assert "on 16 nodes with 4 ranks each" in text
    assert f"trilith train {RECIPE}" in text or RECIPE in yaml.safe_load(text)["spec"].__repr__()


def test_a_slurm_script_is_a_script_of_bash_and_holds_what_was_asked(tmp_path):
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


def test_kubeflow_s_plugin_starts_torchrun_with_the_numbers_of_the_job(tmp_path):
    job = loaded(tmp_path, "kubernetes", RECIPE, "--image", "here/trilith:1", "--name", "Llama_70B")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (8, 8, "here/trilith:1")
    assert trainer["command"][:2] == ["torchrun", "--no-python"]
    assert job["metadata"]["name"] == "llama-70b"


def test_the_pods_of_a_job_set_meet_at_the_first(tmp_path):
    job = loaded(tmp_path, "jobset", RECIPE, "--name", "big")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (8, 8, "Indexed")
    container = spec["template"]["spec"]["containers"][0]
    assert "--rdzv-endpoint=big-node-0-0.big:29400" in container["command"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    claims = spec["template"]["spec"]["volumes"]
    assert {one["name"] for one in claims} == {one["name"] for one in container["volumeMounts"]}


def lacks(there, mine, at=""):
    """Return the places at which ``there`` does not say what ``mine`` says; it may say more."""
    if isinstance(mine, dict):
        pairs = [(key, there.get(key) if isinstance(there, dict) else None) for key in mine]
        return [one for key, value in pairs for one in lacks(value, mine[key], f"{at}.{key}")]
    if isinstance(mine, list):
        if not isinstance(there, list) or len(there) != len(mine):
            return [at]
        return [one for n, value in enumerate(mine) for one in lacks(there[n], value, f"{at}[{n}]")]
    return [] if there == mine else [at]


@pytest.mark.parametrize(
    ("system", "module", "kind"),
    [
        ("kubernetes", "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
        ("jobset", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    ],
)
@pytest.mark.parametrize("recipe", [RECIPE, "llama-3.2-1b-1gpu"])
def test_the_published_schemas_of_kubernetes_objects_know_each_key_and_accept_each_value(
    system, module, kind, recipe, tmp_path
):
    """The models are generated from the schemas; they drop keys that a schema has not."""
    name = f"kubeflow_trainer_api.models.{module}"
    models = pytest.importorskip(name, reason="comes with the extra trilith[test]: kubeflow-trainer-api")
    model, job = getattr(models, kind), loaded(tmp_path, system, recipe)
    assert lacks(model.from_dict(job).to_dict(), job) == []
    job["spec"]["retries"] = 3
    assert lacks(model.from_dict(job).to_dict(), job) == [".spec.retries"], "an unknown key must be seen"


def launch(why, says, *words, system="slurm", given=lambda folder: None):
    def call(folder):
        call_command(folder, "launch", system, RECIPE, *words, "--out", "job")

    return Refused(why, call, says, given=given)


test_jobs_that_cannot_be_are_refused = refusals(
    launch("least-nodes", "--least-nodes: expected --fit with it, found 2", "--least-nodes", "2"),
    launch("too-many", "--least-nodes: expected at most 8, .* 9", "--fit", "--least-nodes", "9"),
    launch("ranks", "layout: expected 70 ranks for 7 nodes x 10, found", "--nodes", "7"),
    launch("ranks-of-4", "expected 32 ranks for 4 nodes x 8", "--nodes", "4", "--ranks-per-node", "8"),
    launch("limit", "--warning: expected fewer minutes than the limit of 5, found 5", "--minutes", "5"),
    launch("name", "--name: expected letters, digits, - _ and ., found 'a b'", "--name", "a b"),
    launch("layout", "tensor", "layout.tensor=3"),
    launch("spares", "--spares: expected slurm: .* found jobset", "--spares", "1", system="jobset"),
    launch("somebody-adapted-it", "job", given=lambda folder: (folder / "job").write_text("mine")),
)


def test_a_job_that_may_shrink_asks_for_a_range_of_nodes(tmp_path):
    text = written(tmp_path, "slurm", RECIPE, "--fit", "--least-nodes", "4", "--spares", "2")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --nodes=4-10\n" in text and 'if [ "$count" -lt 4 ]' in text and "| head -n 8)" in text
    assert f"trilith train {RECIPE} --fit" in text
    # With it, Slurm would give the job the fewest nodes of the range.
    assert "#SBATCH --ntasks-per-node" not in text
    fixed = written(tmp_path, "slurm", RECIPE, "--spares", "2")
    assert "#SBATCH --nodes=10\n" in fixed and 'if [ "$count" -lt 8 ]' in fixed and "--fit" not in fixed


def test_a_slurm_script_has_all_that_a_run_on_many_hosts_needs(tmp_path):
    text = written(tmp_path, "slurm", RECIPE)
    needed = "--kill-on-bad-exit=1 --dependency=singleton excluded-nodes --signal=B:USR1@ --requeue "
    needed += "FI_PROVIDER NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME NCCL_IB_HCA TORCH_FR_BUFFER_SIZE "
    needed += "TORCH_NCCL_DUMP_ON_TIMEOUT"
    assert [word for word in [*needed.split(), "hostname --all-ip-addresses"] if word not in text] == []


def commands(first):
    return [words for words in Page.read("docs/clusters.md").commands() if words[0] == first]


def test_the_page_s_commands_write_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(commands("launch")) == 7
    for words in commands("launch"):
        assert run([*words, "--force"]) == 0, words
    spared = (tmp_path / "llama-3.1-8b-8gpus.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in spared and "layout.data=16" in spared


@pytest.mark.slow
def test_the_page_s_models_fit_their_gpus(capsys):
    assert len(commands("train")) == 2
    for words in commands("train"):
        assert run(words) == 0, words


def test_a_job_is_not_submitted_where_there_is_no_scheduler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "job"
    assert run(["launch", "slurm", RECIPE, "--out", str(out), "--submit"]) == 2
    assert "expected the program sbatch on this machine" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("system", "program", "words"),
    [
        ("slurm", "sbatch", ""),
        ("kubernetes", "kubectl", "apply -f "),
        ("jobset", "kubectl", "apply -f "),
        ("skypilot", "sky", "jobs launch --yes "),
    ],
)
@pytest.mark.parametrize("code", [0, 7])
def test_the_written_file_is_handed_to_the_scheduler_whose_refusal_is_told(
    system, program, words, code, tmp_path, monkeypatch, capfd
):
    scheduler = tmp_path / program
    scheduler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\ntest -s "{tmp_path}/job" && exit {code}\n')
    scheduler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    out = tmp_path / "job"
    assert run(["launch", system, RECIPE, "--out", str(out), "--submit"]) == (2 if code else 0)
    assert (tmp_path / "said").read_text() == f"{words}{out}\n"
    told = f"error: launch: --submit: expected {program} to take the file, found exit code 7\n"
    assert capfd.readouterr().err == (told if code else "")
