"""Describe a job of a recipe: its hosts, its ranks on each host, and what the scheduler must know."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..parallel_state import BadInput
from ..recipes.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """Hold the values that a file for a scheduler states.

    ``nodes``: number of hosts. ``ranks``: number of ranks on each host. ``minutes``: the scheduler's time
    limit. ``warning``: how many minutes before the limit the run is asked to save. ``restarts``: how often a
    failed job is started again. ``exclude``: hosts that are not used. ``image``: the container image.
    ``spares``: hosts in addition to ``nodes``, which replace bad hosts. ``fit``: continue with fewer hosts if
    some are lost, but with at least ``least``.
    """

    name: str
    recipe: str
    out: str
    overrides: tuple[str, ...]
    nodes: int
    ranks: int
    gpu: bool
    minutes: int
    warning: int
    restarts: int
    partition: str | None = None
    account: str | None = None
    exclude: tuple[str, ...] = ()
    image: str = "trilith:latest"
    spares: int = 0
    fit: bool = False
    least: int = 1

    @property
    def command(self) -> str:
        """Return what each rank runs, quoted for a shell."""
        return shlex.join(self.words)

    @property
    def words(self) -> list[str]:
        """Return the words that each rank runs."""
        return ["trilith", "train", self.recipe, *self.overrides, *(["--fit"] if self.fit else [])]

    @property
    def time(self) -> str:
        """Return the limit as hours, minutes and seconds."""
        return f"{self.minutes // 60:02d}:{self.minutes % 60:02d}:00"


def job_of(
    recipe: Recipe,
    file: str,
    overrides: Sequence[str],
    *,
    nodes: int | None,
    ranks_per_node: int | None,
    minutes: int,
    warning: int,
    restarts: int,
    name: str | None,
    partition: str | None,
    account: str | None,
    exclude: Sequence[str],
    image: str,
    spares: int,
    fit: bool,
    least: int | None,
) -> Job:
    """Derive the job from the recipe's layout; ``BadInput`` if its ranks do not fill the hosts evenly."""
    world = recipe.layout.world
    if nodes is None and ranks_per_node is None:
        ranks_per_node = min(world, 8)
    if nodes is None:
        assert ranks_per_node is not None
        nodes = -(-world // ranks_per_node)
    if ranks_per_node is None:
        ranks_per_node = -(-world // nodes)
    if nodes * ranks_per_node != world:
        raise BadInput(
            file, "layout", expected=f"{nodes * ranks_per_node} ranks for {nodes} nodes x {ranks_per_node}",
            found=f"{recipe.layout}, {world} ranks",
            todo="Give --nodes and --ranks-per-node whose product is the layout's number of ranks",
        )  # fmt: skip
    if warning >= minutes:
        raise BadInput(
            "launch", "--warning", expected=f"fewer minutes than the limit of {minutes}", found=warning
        )
    if least is not None and not (fit and least <= nodes):
        expected = f"at most {nodes}, the job's nodes" if fit else "--fit with it"
        raise BadInput("launch", "--least-nodes", expected=expected, found=least)
    found = name or Path(file).name.removesuffix(".toml")
    wrong = not found or any(not (one.isalnum() or one in "-_.") for one in found)
    if wrong:
        raise BadInput("launch", "--name", expected="letters, digits, - _ and .", found=repr(found))
    return Job(
        name=found,
        recipe=file,
        out=recipe.out,
        overrides=tuple(overrides),
        nodes=nodes,
        ranks=ranks_per_node,
        gpu=recipe.device == "cuda",
        minutes=minutes,
        warning=warning,
        restarts=restarts,
        partition=partition,
        account=account,
        exclude=tuple(exclude),
        image=image,
        spares=spares,
        fit=fit,
        least=(least or 1) if fit else nodes,
    )
