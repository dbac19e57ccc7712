"""Describe a job of a recipe: its hosts, its ranks on each host, and what the scheduler must know."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..parallel_state import BadInput, nearest_divisors, require
from ..recipes.recipe import Recipe
from ..storage.disk import write_whole
from ..storage.small_files import read_text


@dataclass(frozen=True)
class System:
    """Hold what a system is given: the file's suffix, the command that takes it, the options that the file
    can express, and the time limit of a job for which none is given.
    """

    suffix: str
    submit: tuple[str, ...]
    options: tuple[str, ...]
    minutes: int | None = None


_KUBECTL, _PODS = ("kubectl", "apply", "-f"), ("minutes", "warning", "exclude", "fit", "image", "claim")
_SLURM = (*_PODS[:4], "restarts", "partition", "account", "spares", "least_nodes")
#: The systems that ``trilith launch`` knows.
SYSTEMS = {
    "slurm": System(".sbatch", ("sbatch",), options=_SLURM, minutes=24 * 60),
    "kubernetes": System(".trainjob.yaml", _KUBECTL, options=_PODS),
    "jobset": System(".jobset.yaml", _KUBECTL, options=(*_PODS, "restarts")),
}
_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
#: Options that name something that Kubernetes knows: what it is, and the form of its names.
_NAMES = {"exclude": ("node", _NAME), "claim": ("claim", _NAME), "image": ("image", r"[^\s-]\S*")}


@dataclass(frozen=True)
class Job:
    """Hold the values that a file for a scheduler states, of which each system's template takes its own.

    ``nodes``: number of hosts. ``ranks``: number of ranks on each host. ``minutes``: the scheduler's time
    limit, ``None`` for none. ``warning``: how many minutes before the limit the run is asked to save.
    ``restarts``: how often a failed job is started again. ``exclude``: hosts that are not used. ``image``:
    the container image. ``claim``: the volume claim on which the run's folder lies. ``spares``: hosts in
    addition to ``nodes``, which replace bad hosts. ``fit``: continue with fewer hosts if some are lost, but
    with at least ``least_nodes``.
    """

    system: str
    name: str
    recipe: str
    out: str
    overrides: tuple[str, ...]
    nodes: int
    ranks: int
    gpu: bool
    minutes: int | None
    warning: int = 5
    restarts: int = 3
    partition: str | None = None
    account: str | None = None
    exclude: tuple[str, ...] = ()
    image: str = "trilith:latest"
    claim: str | None = None
    spares: int = 0
    fit: bool = False
    least_nodes: int | None = None

    @property
    def words(self) -> list[str]:
        """Return what each rank runs."""
        return ["trilith", "train", self.recipe, *self.overrides, *(["--fit"] if self.fit else [])]


def operand(path: str) -> str:
    """Return the same path as a word of a command, which takes a word that begins with - for an option."""
    return f"./{path}" if path.startswith("-") else path


def job_of(
    recipe: Recipe,
    file: str,
    overrides: Sequence[str],
    system: str,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    name: str | None = None,
    **options: Any,
) -> Job:
    """Derive the job from the recipe's layout; ``None``, false and an empty list are not given.

    ``BadInput`` if the ranks do not fill the hosts evenly, and for an option that the system's file cannot
    express.
    """
    of_system = SYSTEMS[system].options
    set_options = {option: value for option, value in options.items() if value or type(value) in (int, str)}
    for option in [option for option in set_options if option not in of_system]:
        able = " or ".join(name for name, other in SYSTEMS.items() if option in other.options)
        raise BadInput("launch", f"--{option.replace('_', '-')}", expected=able, found=system)
    world = recipe.layout.world
    ranks = ranks_per_node or (min(world, 8) if nodes is None else -(-world // nodes))
    nodes = nodes or -(-world // ranks)
    if nodes * ranks != world:
        raise BadInput(
            "launch", "--nodes, --ranks-per-node",
            expected=f"numbers whose product is {world}, the ranks of {file} ({recipe.layout})",
            found=f"{nodes} x {ranks}",
            todo=nearest_divisors("--nodes", world, nodes),
        )  # fmt: skip
    job = Job(
        system=system,
        name=_name(Path(file).name.removesuffix(".toml") if name is None else name, system),
        recipe=operand(file),
        out=operand(recipe.out),
        # On a node whose GPUs are lost, auto would go on with the CPU.
        overrides=(*overrides, *(["device=cuda"] if recipe.device == "auto" else [])),
        nodes=nodes,
        ranks=ranks,
        gpu=recipe.device != "cpu",
        **{"minutes": SYSTEMS[system].minutes, **set_options},
    )
    _check_limits(job)
    return job


def _name(name: str, system: str) -> str:
    """Return the job's name; Kubernetes takes a letter, then small letters, digits and hyphens."""
    if not name or any(not (letter.isalnum() or letter in "-_.") for letter in name):
        raise BadInput("launch", "--name", expected="letters, digits, - _ and .", found=repr(name))
    if system == "slurm":
        return name
    name = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:40].strip("-")


def _check_limits(job: Job) -> None:
    fits = job.minutes is None or job.warning < job.minutes
    require(fits, "launch", "--warning", f"fewer minutes than the limit of {job.minutes}", job.warning)
    if (least := job.least_nodes) is not None and not (job.fit and least <= job.nodes):
        expected = f"at most {job.nodes}, the job's nodes" if job.fit else "--fit with it"
        raise BadInput("launch", "--least-nodes", expected=expected, found=least)
    for option, (what, form) in _NAMES.items() if job.system != "slurm" else ():
        value = getattr(job, option)
        for name in [value] if isinstance(value, str) else value or ():
            expected = f"one {what}'s name, as Kubernetes knows it"
            require(re.fullmatch(form, name), "launch", f"--{option}", expected, repr(name))


#: One node's name a line; the Slurm script of ``trilith launch`` reads it.
EXCLUDED_NODES = "excluded-nodes"


def exclude_nodes(folder: Path, names: Iterable[str]) -> Path:
    """Add node names to the list in ``folder``, each once, and return the list's path; old lines stay."""
    path = folder / EXCLUDED_NODES
    excluded = read_text(path).splitlines() if path.exists() else []
    lines = [*excluded, *(name for name in dict.fromkeys(names) if name not in excluded)]
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return path
