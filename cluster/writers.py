"""Name the writer of each system's file, and the file's suffix."""

from __future__ import annotations

from collections.abc import Callable

from .job import Job
from .kubernetes import job_set, train_job
from .skypilot import skypilot_task
from .slurm import slurm_script

#: For each name that ``trilith launch`` takes: the writer (a function of job and file name) and the suffix.
WRITERS: dict[str, tuple[Callable[[Job, str], str], str]] = {
    "slurm": (slurm_script, ".sbatch"),
    "kubernetes": (train_job, ".trainjob.yaml"),
    "jobset": (job_set, ".jobset.yaml"),
    "skypilot": (skypilot_task, ".sky.yaml"),
}
