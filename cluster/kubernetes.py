"""Say what the files for Kubernetes state of a job: a TrainJob of Kubeflow Trainer v2, or a plain JobSet."""

import posixpath
from pathlib import PurePosixPath
from typing import Any

from ..parallel_state import BadInput
from .job import Job

#: What stands for a pod's working directory, which is gone with the pod, if the recipe's ``out`` is relative.
_WORKING = "/claim"
#: What an image needs or a pod mounts: a claim that is mounted there or around it would hide it.
_TAKEN = "/bin /boot /dev /etc /lib /lib32 /lib64 /proc /run /sbin /sys /usr /var/run"
#: Where the launchers of a JobSet meet, on its first pod.
_PORT = 29400


def pod_values(job: Job) -> dict[str, Any]:
    """Return the values of the YAML templates that are no fields of the job."""
    assert job.warning is not None
    folder = _claimed(job)
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
        "folder": folder,
        # A folder of its own for each path: the runs on one claim do not meet.
        "inside": folder.removeprefix("/"),
        "grace": 60 * job.warning,
        "deadline": None if job.minutes is None else 60 * (job.minutes - job.warning),
    }


def _claimed(job: Job) -> str:
    """Return the run's folder as its pods know it, absolute: there the run's part of the claim is mounted."""
    out = posixpath.normpath(job.out)
    if ":" in out or out.split("/")[0] == "..":
        expected = "a path without :, not above the working directory, for Kubernetes to mount"
        raise BadInput("launch", "out", expected=expected, found=repr(job.out))
    folder = PurePosixPath("/", posixpath.join(_WORKING, out).lstrip("/"))
    taken = [PurePosixPath(place) for place in _TAKEN.split()]
    if any(folder.is_relative_to(place) or place.is_relative_to(folder) for place in taken):
        expected = f"a folder of the run, neither in nor around {_TAKEN}"
        raise BadInput("launch", "out", expected=expected, found=repr(job.out))
    return str(folder)
