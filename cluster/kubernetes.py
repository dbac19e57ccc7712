"""Write Kubernetes objects: a TrainJob of Kubeflow Trainer v2, or a plain JobSet with a headless service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from .job import Job
from .network import optional, variables

_HEAD = """\
# Trains {recipe} on {nodes} nodes with {ranks} ranks each. Apply it with: kubectl apply -f {file}
# Read it and adapt it: the image must hold trilith and the recipe, and each node must
# be able to write the claim.
# Variables that depend on the network:
{optional}
"""
_PORT = 29400


def train_job(job: Job, file: str) -> str:
    """Return a ``TrainJob`` for the runtime ``torch-distributed``, whose plugin sets torchrun's variables."""
    spec = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _name(job)},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.image,
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks,
                "command": ["torchrun", "--no-python", *job.words],
                "env": _environment(job),
                "resourcesPerNode": {"limits": _limits(job)},
            },
        },
    }
    return _head(job, file) + yaml_of(spec)


def job_set(job: Job, file: str) -> str:
    """Return a ``JobSet``: one Job with a pod for each node, which meet at the first pod."""
    name = _name(job)
    first = f"{name}-node-0-0.{name}"
    words = [
        *("torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks}", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint={first}:{_PORT}", f"--rdzv-id={name}"),
        *("--no-python", *job.words),
    ]
    container = {
        "name": "trainer",
        "image": job.image,
        "command": words,
        "ports": [{"containerPort": _PORT}],
        "env": _environment(job),
        "resources": {"limits": _limits(job)},
        "volumeMounts": [
            {"name": "run", "mountPath": "/run-folder"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60 * job.warning,
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": f"{name}-run"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": job.restarts},
            "replicatedJobs": [
                {
                    "name": "node",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": job.nodes,
                            "completions": job.nodes,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "template": {"spec": pod},
                        }
                    },
                }
            ],
        },
    }
    return _head(job, file) + yaml_of(spec)


def yaml_of(value: Mapping[str, Any]) -> str:
    """Return YAML with the keys in their order."""
    text: str = yaml.safe_dump(dict(value), sort_keys=False, width=110)
    return text


def _name(job: Job) -> str:
    """Return the job's name as Kubernetes takes it: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")[:40]


def _environment(job: Job) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value, _ in variables(gpu=job.gpu)]


def _limits(job: Job) -> dict[str, Any]:
    return {"nvidia.com/gpu": job.ranks} if job.gpu else {"cpu": job.ranks}


def _head(job: Job, file: str) -> str:
    network = "\n".join(f"#   {name}={value}: {why}" for name, value, why in optional(gpu=job.gpu))
    return _HEAD.format(recipe=job.recipe, nodes=job.nodes, ranks=job.ranks, file=file, optional=network)
