"""Launchers start ranks that train together: those of docs/clusters.md."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.forked_launch import OF_LAUNCHERS, torchrun_forked
from support.kills import wait_for
from support.pages import Page
from trilith.cli.app import run
from trilith.cli.train import train as train_command
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics
from trilith.system.process_end import leave
from trilith.testing import run_fresh
from trilith.training import run as train

PAGE = Page.read("docs/clusters.md")
OURS = (*OF_LAUNCHERS, "TORCHELASTIC_USE_AGENT_STORE")


def free_port(first=20_000, last=29_999):
    for port in range(first + os.getpid() % 5000, last):
        with socket.socket() as holder:
            try:
                holder.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def rank_and_world():
    """Forget the variables of torchrun; return this process's number and how many there are."""
    forgotten = [os.environ.pop(name, "") for name in OURS]
    return forgotten[:2]


def started_by_srun(recipe, port):
    """Run as one of the tasks of a step on one host, with exactly the variables that srun sets."""
    rank, world = rank_and_world()
    os.environ |= {"SLURM_JOB_ID": "40000", "SLURM_STEP_ID": str(port - 20_000), "SLURM_PROCID": rank}
    os.environ |= {"SLURM_LOCALID": rank, "SLURM_NTASKS": world, "SLURM_STEP_NODELIST": "localhost"}
    leave(run(["train", recipe, "--quiet"]))


def started_by_mpirun(recipe, port):
    """Run as one of the processes of mpirun, with exactly its variables and those that -x adds."""
    rank, world = rank_and_world()
    os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": world}
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    leave(run(["train", recipe, "--quiet"]))


def started_by_ray(recipe, port):
    """Run as Ray Train's worker does: torchrun's variables, and a process group that exists already."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ["RAY_JOB_ID"] = "01000000"
    dist.init_process_group("gloo")
    dist.barrier()  # this and the next two as the lines of the page do
    dist.destroy_process_group()
    time.sleep(1)
    leave(train(recipe, quiet=True))


@pytest.mark.parametrize(
    "start", [started_by_srun, pytest.param(started_by_mpirun, marks=pytest.mark.slow), started_by_ray]
)
def test_ranks_of_each_launcher_train_together(make, start):
    run = make(2)
    codes = run_fresh(start, 2, str(run.recipe), free_port(), timeout=180, process_group=False)
    assert codes == [0, 0], [code.output for code in codes]
    assert run.steps_saved == [2]


def with_a_group(recipe):
    dist.init_process_group("gloo")
    sys.exit(run(["train", recipe]))


@pytest.mark.slow
def test_a_process_group_that_is_there_is_refused_in_one_line(make):
    codes = run_fresh(with_a_group, 2, str(make(2).recipe), process_group=False)
    assert codes == [2, 2]
    for code in codes:
        assert code.output.startswith(
            "error: run: process group: expected none yet: a run makes its own, found"
        )
        assert code.output.count("\n") == 1


def command(first):
    """Return the page's command that begins so."""
    return shlex.split(re.findall(rf"^{first} .*$", PAGE.text, re.MULTILINE)[0], comments=True)


def test_the_page_s_lines_for_ray_train_are_python():
    (text,) = [text for text in PAGE.blocks("python") if "TorchTrainer" in text]
    compile(text, str(PAGE), "exec")
    assert text.index("destroy_process_group()") < text.index("run(")


def start(words, folder=None, **environment):
    """Start a command with these variables, and with none that a launcher has set for this process."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    clean |= {"OMP_NUM_THREADS": "1", **environment}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env=clean, **piped)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun --nproc-per-node", "accelerate"])
def test_the_page_s_lines_train_under_their_launcher(make, launcher):
    run = make(2)
    (script,) = [text for text in PAGE.blocks("python") if text.startswith("# train.py")]
    (run.folder / "train.py").write_text(script)
    words = [{"8": "2"}.get(word, word) for word in command(launcher)]
    words[0] = str(Path(sys.executable).parent / words[0])
    check_all_train([start(words, run.folder, ACCELERATE_USE_CPU="true")])
    assert run.steps_saved == [2]


def check_all_train(processes):
    try:
        output = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes), output


AGENTS = 2
TWO_HOSTS = command("torchrun --nnodes")


def test_the_command_in_the_help_is_the_one_of_the_page():
    help_text = " ".join((train_command.__doc__ or "").split())
    assert " ".join(TWO_HOSTS) in help_text.replace("\\ ", "")


def test_two_hosts_that_start_the_page_s_command_train_together(make):
    """Two agents of torchrun on this machine, one rank each; without a rendezvous each waits for ever."""
    made, host = make(4), f"localhost:{free_port()}"
    values = {"HOST:29400": host, "NAME": "a-run", "recipe.toml": str(made.recipe), "8": "1"}
    words = [values.get(word, word) for word in TWO_HOSTS[1:]]
    assert words[words.index("--nnodes") + 1] == str(AGENTS)
    given = run, words, str(made.folder)
    codes = run_fresh(torchrun_forked, AGENTS, *given, process_group=False, timeout=180)
    assert codes == [0] * AGENTS, [code.output for code in codes]
    assert made.steps_saved == [2, 4]
    (began,) = [one for one in read_events(made.out / "events.jsonl") if one["event"] == "started"]
    assert began["world"] == AGENTS
    assert {made.status(rank)["rank"] for rank in range(AGENTS)} == {0, 1}
    assert made.status(0)["run"] == made.status(1)["run"] != ""


@pytest.mark.slow  # two starts of two ranks with all their imports
def test_a_run_that_torchrun_restarts_goes_on_from_its_last_checkpoint(make):
    """Rank 1 is killed from outside, once; nobody starts anything again but torchrun."""
    run = make(100)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.2", "--no-python", sys.executable, "-m"]
    command += ["trilith.cli", "train", str(run.recipe), "--quiet", "timeout=20", "checkpoint.every=10"]
    process = start(command)
    wait_for(lambda: len(read_metrics(run.out / "metrics.jsonl")) >= 15, 120)
    killed = run.status(1)["pid"]
    os.kill(int(killed), signal.SIGKILL)
    check_all_train([process])
    assert run.status(1)["pid"] != killed
    assert run.steps_saved[-1] == 100
    assert [line["step"] for line in read_metrics(run.out / "metrics.jsonl")] == [*range(100)]
    events = [(one["event"], one["step"]) for one in read_events(run.out / "events.jsonl")]
    assert events[0] == ("started", 0) and events[-1] == ("finished", 100)
    (resumed,) = (step for event, step in events if event == "resumed")
    assert resumed >= 10
