"""Say what the files for Kubernetes state of a job: a TrainJob of Kubeflow Trainer v2, or a plain JobSet."""

from __future__ import annotations

import posixpath
from typing import Any

from ..parallel_state import BadInput
from .job import Job

#: Where a claim is mounted in a pod if the recipe's ``out`` is relative: it then lies below.
_CLAIM = "/claim"
#: Where the launchers of a JobSet meet, on its first pod.
_PORT = 29400


def pod_values(job: Job) -> dict[str, Any]:
    """Return the values of the YAML templates that are no fields of the job."""
    assert job.warning is not None
    mount, folder = _claimed(job)
    words = [*job.words, *([f"out={folder}"] if folder != job.out else [])]
    return {
        # Kubernetes replaces $(NAME), and takes $$ for a $.
        "command": [word.replace("$", "$$") for word in words],
        "meeting": [
            f"--rdzv-endpoint={job.name}-node-0-0.{job.name}:{_PORT}",
            f"--rdzv-id={job.name}",
        ],
        "port": _PORT,
        "claim": f"{job.name}-run" if job.claim is None else job.claim,
        "mount": mount,
        "folder": folder,
        "grace": 60 * job.warning,
        "deadline": None if job.minutes is None else 60 * (job.minutes - job.warning),
    }


def _claimed(job: Job) -> tuple[str, str]:
    """Return where a pod mounts the claim, and the run's folder there, both absolute.

    An absolute ``out`` is the place itself. A relative one lies in a pod's own working directory, which is
    gone with the pod: the folder of that name on the claim stands for it.
    """
    folder = posixpath.normpath(posixpath.join("/", job.out))
    if ":" in folder:
        expected = "a path without :, for Kubernetes to mount"
        raise BadInput("launch", "out", expected=expected, found=repr(folder))
    return (folder, folder) if posixpath.isabs(job.out) else (_CLAIM, _CLAIM + folder)
