"""Run the written sbatch script on a real Slurm: a signal before the limit, a requeue, lost and bad nodes."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.kills import wait_for
from support.short_runs import losses
from support.slurm import NoSlurm, slurm, unpack
from support.slurm_job import Submitted
from trilith.checkpoints import complete_checkpoints, read_source, verify
from trilith.cli.app import run
from trilith.runs.events import read_events
from trilith.system.process_info import started_with

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    try:
        return unpack(tmp_path_factory.mktemp("slurm-packages"))
    except NoSlurm as reason:
        # A system without Debian's packages has no Slurm of ours; test_job_files.py reads the script there.
        pytest.skip(f"no Slurm to test with: {reason}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, unpacked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with slurm(tmp_path_factory.mktemp("slurm") / "run", unpacked) as running:
            yield running


def printed(mine):
    return "".join(path.read_text() for path in mine.folder.glob("*.log"))


@pytest.mark.slow  # 40 seconds, of which Slurm waits for most
def test_a_job_saves_before_its_limit_goes_back_into_the_queue_and_goes_on_bitwise(cluster, tmp_path):
    """A rank stands still in its seventh step until the script has heard the signal."""
    steps = 40
    # The other rank waits in its seventh step while this process may still train the whole.
    mine = Submitted.write(run, tmp_path, "--nodes", "2", steps=steps, timeout=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", "rank=1;at=step.forward;step=7;act=stop")
        job = cluster.submit(tmp_path / "job.sbatch")
    whole = mine.uninterrupted()  # a new controller starts its first job after three seconds
    mine.wait_for_steps(6)
    standing = mine.wait_until_it_stands(1)
    cluster.command("scancel", "--batch", "--signal=USR1", job)  # as Slurm does two minutes before the limit
    wait_for((mine.out / "stop").exists, 60, "what the script asks of the run")
    os.kill(standing, signal.SIGCONT)
    assert cluster.wait(job, "PENDING", "COMPLETED", "FAILED") == "PENDING", printed(mine)
    cluster.start_soon(job)
    first = len(losses(mine.out))
    assert 6 <= first < steps
    assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", printed(mine)
    assert f"stopped and saved after step {first}" in printed(mine)
    assert losses(mine.out) == whole
    assert not (mine.out / "stop").exists()


def nodes_used(cluster, job):
    """Return the nodes of the job, in Slurm's short form."""
    shown = cluster.command("scontrol", "show", "job", job)
    return next(word for word in shown.split() if word.startswith("NodeList=")).partition("=")[2]


def test_a_node_in_the_run_s_exclusion_list_is_left_alone_and_a_spare_takes_its_place(cluster, tmp_path):
    """The launcher only notes where it runs; the job then ends with 2, because no rank has started."""
    mine = Submitted.write(run, tmp_path, "--nodes", "1", "--spares", "1", steps=2, ranks=1)
    mine.out.mkdir()
    (mine.out / "excluded-nodes").write_text("n1\n")
    script = (tmp_path / "job.sbatch").read_text()
    noting = script.replace("launcher='exec", 'launcher=\'echo "$SLURMD_NODENAME" >> ran-on; exit; exec')
    assert noting != script
    (tmp_path / "job.sbatch").write_text(noting)
    job = cluster.submit(tmp_path / "job.sbatch")
    assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED", printed(mine)
    assert nodes_used(cluster, job) == "n[1-2]"
    assert (tmp_path / "ran-on").read_text() == "n2\n"


@pytest.mark.slow
def test_a_job_whose_nodes_are_all_excluded_ends_and_says_so(cluster, tmp_path):
    mine = Submitted.write(run, tmp_path, "--nodes", "2", steps=2)
    mine.out.mkdir()
    (mine.out / "excluded-nodes").write_text("n2\n")
    assert cluster.wait(cluster.submit(tmp_path / "job.sbatch"), "COMPLETED", "FAILED") == "FAILED"
    assert "error: 1 nodes of n[1-2] are not excluded, 2 are needed" in printed(mine)


@pytest.mark.slow
def test_a_job_goes_on_with_what_is_left_of_its_nodes_on_the_same_curve(cluster, tmp_path):
    steps = 200
    mine = Submitted.write(
        run, tmp_path, "--nodes", "2", "--fit", steps=steps, checkpoint={"every": 20, "keep": 3}
    )
    cluster.wait_until_idle()
    job = cluster.submit(tmp_path / "job.sbatch")
    mine.wait_for_steps(45)
    try:
        cluster.lose("n2")
        assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", printed(mine)
        assert nodes_used(cluster, job) == "n1"
    finally:
        cluster.start_node("n2")
    events = [one for one in read_events(mine.out / "events.jsonl") if one["event"] in ("started", "resumed")]
    assert [one["world"] for one in events] == [2, 1]
    assert events[1]["fitted"].startswith("fit: ranks here: 1, in the recipe: 2: ")
    assert events[1]["step"] >= 40
    whole, parts = mine.uninterrupted(), losses(mine.out)
    assert len(whole) == len(parts) == steps
    for one, other in zip(whole, parts, strict=True):
        # The loss, and the norm of the gradients, in which differences of rounding are larger.
        assert other[0] == pytest.approx(one[0], rel=1e-10)
        assert other[1] == pytest.approx(one[1], rel=1e-8)


@pytest.mark.slow
def test_a_cancelled_job_leaves_nothing_running_and_nothing_half_written(cluster, tmp_path):
    mine = Submitted.write(run, tmp_path, "--nodes", "2", steps=100_000, checkpoint={"every": 5, "keep": 3})
    job = cluster.submit(tmp_path / "job.sbatch")
    mine.wait_for_steps(23)
    cluster.command("scancel", job)
    assert cluster.wait(job, "CANCELLED", "FAILED", "COMPLETED") == "CANCELLED", printed(mine)
    mine_are = f"SLURM_JOB_ID={job}", f"SLURM_CONF={cluster.folder / 'slurm.conf'}"
    wait_for(lambda: not started_with(*mine_are), 60, "the end of the job's processes")
    saved = complete_checkpoints(mine.out / "checkpoints")
    assert saved
    for path in saved:
        manifest = read_source(path).manifest
        assert manifest is not None
        verify(path, manifest)
    assert run(["verify", str(mine.out)]) == 0
    done = int(saved[-1].name.removeprefix("step-"))
    assert (
        run(["train", str(tmp_path / "recipe.toml"), "--fit", "--nproc", "1", f"stop_after={done + 2}"]) == 0
    )


@pytest.mark.slow
def test_tasks_of_srun_without_torchrun_are_the_ranks(cluster, tmp_path):
    mine = Submitted.write(run, tmp_path, "--nodes", "2", steps=20)
    (tmp_path / "plain.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=plain.log\n"
        "export MASTER_ADDR=127.0.0.1  # the nodes of this test have no names of their own\n"
        "srun --kill-on-bad-exit=1 trilith train recipe.toml\n"
    )
    job = cluster.submit(tmp_path / "plain.sbatch")
    assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", printed(mine)
    assert losses(mine.out) == mine.uninterrupted()
