"""The README's command for several hosts: what it says on each host makes them train together."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from trilith.cli.train import train
from trilith.runs.events import read_events

README = Path(__file__).parents[2] / "README.md"
AGENTS = 2


def shown():
    (command,) = re.findall(r"^(torchrun --nnodes .*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    return str(command)


def filled_in(recipe):
    """Return the command with its placeholders filled in, and one rank a host in place of eight."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        port = holder.getsockname()[1]
    values = {"HOST:29400": f"localhost:{port}", "NAME": "a-run", "recipe.toml": str(recipe), "8": "1"}
    words = [values.get(word, word) for word in shlex.split(shown())]
    beside = Path(sys.executable).parent
    return [str(beside / word) if word in ("torchrun", "trilith") else word for word in words]


def test_the_command_in_the_help_is_the_one_in_the_readme():
    help_text = " ".join((train.__doc__ or "").split())
    assert shown() in help_text.replace("\\ ", "")


def test_two_hosts_that_start_the_readme_s_command_train_together(make):
    """Two agents of torchrun on this machine, one rank each; without a rendezvous each waits for ever."""
    run = make(4)
    command = filled_in(run.recipe)
    assert command[command.index("--nnodes") + 1] == str(AGENTS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(AGENTS)
    ]
    try:
        said = [agent.communicate(timeout=180)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert [agent.returncode for agent in agents] == [0] * AGENTS, said
    assert run.steps_saved == [2, 4]
    (began,) = [one for one in read_events(run.out / "events.jsonl") if one["event"] == "started"]
    assert began["world"] == AGENTS
    assert {run.status(rank)["rank"] for rank in range(AGENTS)} == {0, 1}
    assert run.status(0)["run"] == run.status(1)["run"] != ""
