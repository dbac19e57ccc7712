"""Write a job's file from its system's template: each value quoted for the place where it stands.

In a template ``{{name}}`` is the job's value of that name. A line with a value that is ``None`` is left out;
``{{if name}}`` stands for nothing, and its line is left out in the same way. A line with ``{{each name}}``
or ``{{each name.key}}`` is repeated for each element of a list.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from ..parallel_state import BadInput, require
from ..storage.small_files import read_text
from ..system import counted
from .job import EXCLUDED_NODES, SYSTEMS, Job

#: What stands for a pod's working directory, which is gone with the pod, if the recipe's ``out`` is relative.
_WORKING = "/claim"
#: What an image needs or a pod mounts: a claim that is mounted there or around it would hide it.
_TAKEN = "/bin /boot /dev /etc /lib /lib32 /lib64 /proc /run /sbin /sys /usr /var/run"
#: Where the launchers of a JobSet meet, on its first pod.
_PORT = 29400


def pod_values(job: Job) -> dict[str, Any]:
    """Return the values of the YAML templates that are no fields of the job."""
    folder = _claimed(job)
    words = [*job.words, *([f"out={folder}"] if folder != job.out else [])]
    return {
        # Kubernetes replaces $(NAME), and takes $$ for a $.
        "command": [word.replace("$", "$$") for word in words],
        "meeting": [f"--rdzv-endpoint={job.name}-node-0-0.{job.name}:{_PORT}", f"--rdzv-id={job.name}"],
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
    expected = "a path without :, not above the working directory, for Kubernetes to mount"
    require(":" not in out and out.split("/")[0] != "..", "launch", "out", expected, repr(job.out))
    folder = PurePosixPath("/", posixpath.join(_WORKING, out).lstrip("/"))
    taken = [PurePosixPath(place) for place in _TAKEN.split()]
    fits = not any(folder.is_relative_to(place) or place.is_relative_to(folder) for place in taken)
    require(fits, "launch", "out", f"a folder of the run, neither in nor around {_TAKEN}", repr(job.out))
    return str(folder)


def slurm_values(job: Job) -> dict[str, Any]:
    """Return the values of ``job.sbatch`` that are no fields of the job."""
    assert job.minutes is not None
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


Place = Literal["bash", "yaml", "directive", "comment"]

_TEMPLATES = Path(__file__).parent
_MARK = re.compile(r"\{\{(?:(if|each) )?(\w+)(?:\.(\w+))?\}\}")
#: What Slurm would not take as it stands from a line that begins with #SBATCH.
_SPECIAL = re.compile(r"[\s'\"#\\]")
#: How the user knows a value that is no option of its own name.
_ASKED = {"recipe": "RECIPE", "command": "KEY=VALUE", "file": "--out"}
_ASKED |= dict.fromkeys(("out", "folder", "inside"), "out")  # the recipe's key


def render(job: Job, file: str) -> str:
    """Return the text of the job's file, which will have the path ``file``.

    ``BadInput`` for a value that cannot stand in one line: a name or a path with control characters.
    """
    suffix = SYSTEMS[job.system].suffix
    template = read_text(_TEMPLATES / f"job{suffix}")
    code: Place = "yaml" if suffix.endswith(".yaml") else "bash"
    own = slurm_values(job) if job.system == "slurm" else pod_values(job)
    values = {
        **asdict(job),
        "file": file,
        "size": f"{counted(job.nodes, 'node')} of {counted(job.ranks, 'rank')}",
        "variables": [variable._asdict() for variable in VARIABLES if job.gpu or not variable.gpu],
        "hints": [variable._asdict() for variable in OPTIONAL if job.gpu or not variable.gpu],
        "exclude": job.exclude or None,
        "gpus": job.ranks if job.gpu else None,
        "cores": None if job.gpu else job.ranks,
        **own,
    }
    return "".join(f"{line}\n" for text in template.splitlines() for line in _lines(text, values, code))


def quoted(value: object, place: Place, name: str) -> str:
    """Return a value, or a list of them, as text that has the same value in that place and nowhere ends it.

    ``BadInput`` with ``name`` for text that no quotes would hold there.
    """
    texts = [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
    key = _ASKED.get(name, f"--{name.replace('_', '-')}")
    for text in texts:
        fits = text and text.isprintable()
        require(fits, "launch", key, "text that can be printed in one line", repr(text)[:80])
        if place == "directive" and (match := _SPECIAL.search(text)):
            expected = "a name that #SBATCH takes, without spaces, quotes, # and \\"
            raise BadInput("launch", key, expected=expected, found=f"{match[0]!r} in {text[:80]!r}")
    if place == "yaml":  # in quotes, so that no reader takes 1e3 or yes for a number or a truth
        return json.dumps(value, ensure_ascii=False)
    if place == "directive":
        return ",".join(texts)
    return shlex.join(texts) if place == "bash" else " ".join(texts)


def _lines(text: str, values: Mapping[str, Any], code: Place) -> Iterator[str]:
    """Yield the lines that a template's line becomes."""
    marks = list(_MARK.finditer(text))
    if any(values[mark[2]] is None for mark in marks):
        return
    lists = {mark[2] for mark in marks if mark[1] == "each"}
    for index in range(max((len(values[name]) for name in lists), default=1)):
        yield _MARK.sub(partial(_filled, values=values, index=index, code=code), text).rstrip()


def _filled(mark: re.Match[str], values: Mapping[str, Any], index: int, code: Place) -> str:
    """Return what stands for a mark; in what it stands, its line up to there tells."""
    (what, name, key), before = mark.groups(), mark.string[: mark.start()]
    if what == "if":
        return ""
    value = values[name][index] if what == "each" else values[name]
    place: Place = "comment" if before.lstrip().startswith("#") or " # " in before else code
    if before.startswith("#SBATCH ") and " # " not in before:
        place = "directive"
    return quoted(value if key is None else value[key], place, name)


class Variable(NamedTuple):
    """Name a variable of the ranks' environment, its value, why it is set, and whether only GPUs need it."""

    name: str
    value: str
    why: str
    gpu: bool


VARIABLES = (
    Variable("OMP_NUM_THREADS", "1", "one thread a rank; more only where a rank has cores to spare", False),
    Variable("TRITON_CACHE_DIR", "/tmp/triton", "compiled kernels on the host's own disk", True),
    Variable("NCCL_DEBUG", "WARN", "say why a connection fails", True),
    Variable("TORCH_FR_BUFFER_SIZE", "2000", "the flight recorder keeps the last 2,000 collectives", True),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and writes them to a file when one of them times out", True),
)
#: To be set by whoever knows the network: written as comments.
OPTIONAL = (
    Variable("NCCL_SOCKET_IFNAME", "eth0", "the interface by which hosts meet, if it is not found", True),
    Variable("GLOO_SOCKET_IFNAME", "eth0", "the same for gloo, which saves and signals use", False),
    Variable("NCCL_IB_HCA", "mlx5", "the InfiniBand cards to use", True),
    Variable("FI_PROVIDER", "efa", "on AWS with EFA", True),
)
