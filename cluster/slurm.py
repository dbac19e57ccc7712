"""Say what the sbatch script states of a job: it trains, saves before the time limit, and is queued again."""

from typing import Any

from .excluded_nodes import EXCLUDED_NODES
from .job import Job


def slurm_values(job: Job) -> dict[str, Any]:
    """Return the values of ``job.sbatch`` that are no fields of the job."""
    assert job.minutes is not None and job.warning is not None and job.spares is not None
    least = (job.least_nodes or 1) if job.fit else job.nodes
    most = job.nodes + job.spares
    return {
        "command": job.words,
        "range": f"{least}-{most}" if least < job.nodes else most,
        # Told the tasks of a node, Slurm takes the fewest nodes of a range, else all that are free.
        "launchers": None if least < job.nodes else 1,
        "shrinks": least if least < job.nodes else None,
        "least_nodes": least,
        "spares": f"{job.spares} more" if job.spares else "no spare nodes",
        "time": f"{job.minutes // 60:02d}:{job.minutes % 60:02d}:00",
        "seconds": 60 * job.warning,
        "excluded": EXCLUDED_NODES,
    }
