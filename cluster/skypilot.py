"""Write a SkyPilot task, which finds the machines on a cloud and starts the ranks on them."""

from __future__ import annotations

from .job import Job
from .kubernetes import yaml_of
from .network import variables

_RUN = """\
run: |
  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc-per-node={ranks} --node-rank=$SKYPILOT_NODE_RANK \\
    --master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) --master-port=29400 \\
    --max-restarts={restarts} --no-python {command}
"""


def skypilot_task(job: Job, file: str) -> str:
    """Return the YAML of a task; ``sky jobs launch`` starts it anew on other machines when some are lost."""
    resources = {"accelerators": f"H100:{job.ranks}"} if job.gpu else {"cpus": f"{job.ranks}+"}
    head = (
        f"# Trains {job.recipe} on {job.nodes} nodes with {job.ranks} ranks each. Start it with: "
        f"sky jobs launch {file}\n"
        "# Read it and adapt it: the recipe's folder (out) must lie on a disk that outlives the machines.\n"
    )
    described = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": {name: value for name, value, _ in variables(gpu=job.gpu)},
        "workdir": ".",
    }
    run = _RUN.format(ranks=job.ranks, restarts=job.restarts, command=job.command)
    return head + yaml_of(described) + "setup: pip install trilith\n" + run
