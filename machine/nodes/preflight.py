"""Compare the nodes of a job: a process on each says what its node has, the first rank judges."""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...parallel_state import BadInput, launched
from ...runs.rendezvous import open_store
from ...system import counted, quiet_libraries
from ..doctor.disk import measure_folder
from ..facts import Finding, driver, gpus, versions
from .judge import Preflight, judge
from .links import Link, measure_links

#: Seconds that a node may take to come, with its disk measured; and all links of a node, with broken ones.
_COME, _LINKS = timedelta(seconds=120), timedelta(seconds=600)
_LEAVE = timedelta(seconds=5)


def node_card(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what this node says of itself, in a form that JSON can hold: its name, Slurm's or else the
    host's, the facts in which all nodes should be alike, and its folders.
    """
    facts, gpu_facts = versions(), gpus()
    names = gpu_facts["names"]
    facts["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    return {
        "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "facts": facts | ({"NCCL": gpu_facts["nccl"], "driver": driver()} if names else {}),
        "folders": {str(folder): asdict(measure_folder(folder)) for folder in folders},
    }


@quiet_libraries()
def preflight(
    folders: Sequence[Path] = (), *, gbits: float | None = None, come: timedelta = _COME
) -> Preflight | None:
    """Compare the nodes on which this is called; returns the result on the first rank, ``None`` elsewhere.

    One process of each node takes part, the one with the lowest rank. ``folders``: those of the run, the same
    on each node; the working directory if none is given. ``gbits``: the rate that links should have, in 10^9
    bits a second. ``come``: how long a node is waited for; one that does not come is named and the others are
    still compared. Raises ``BadInput`` if nobody started this process on several nodes.
    """
    process = launched()
    if process is None:
        raise BadInput(
            "doctor", "--nodes", expected="a process on each node, started by torchrun or srun",
            found="none of their variables",
            todo="For instance: srun --ntasks-per-node=1 trilith doctor --nodes FOLDER",
        )  # fmt: skip
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"trilith/nodes/{attempt}", open_store(process, come))
    store.set(f"card/{process.rank}", json.dumps(node_card(folders or [Path.cwd()])))
    if process.rank == 0:
        _admit(store, process.world, come)
    store.wait(["members"], 2 * come)
    members: list[int] = json.loads(store.get("members"))
    if process.rank in members:
        number = members.index(process.rank)
        links = [asdict(link) for link in measure_links(store, number, len(members))]
        store.set(f"links/{number}", json.dumps(links))
    if process.rank:
        store.set(f"left/{process.rank}", "")
        return None
    preflight = _result(store, members, process.world, gbits)
    came = [rank for rank in range(1, process.world) if store.check([f"card/{rank}"])]
    with suppress(RuntimeError):  # the store may be in this process: the others first read from it
        store.wait([f"left/{rank}" for rank in came], _LEAVE)
    return preflight


def _admit(store: dist.Store, world: int, come: timedelta) -> None:
    """Choose who takes part: of those that came in time, the lowest rank of each node."""
    with suppress(RuntimeError):
        store.wait([f"card/{rank}" for rank in range(world)], come)
    first: dict[str, int] = {}
    for rank in range(world):
        if store.check([f"card/{rank}"]):
            first.setdefault(json.loads(store.get(f"card/{rank}"))["name"], rank)
    store.set("members", json.dumps([*first.values()]))


def _result(store: dist.Store, members: list[int], world: int, gbits: float | None) -> Preflight:
    cards = [json.loads(store.get(f"card/{rank}")) for rank in members]
    with suppress(RuntimeError):
        store.wait([f"links/{number}" for number in range(len(members))], _LINKS)
    links = []
    for number in range(len(members)):
        if store.check([f"links/{number}"]):
            links += [Link(**link) for link in json.loads(store.get(f"links/{number}"))]
        else:
            others = range(number + 1, len(members))
            links += [Link(number, other, error="the node fell silent") for other in others]
    compared = judge(cards, links, gbits=gbits)
    missing = [rank for rank in range(world) if not store.check([f"card/{rank}"])]
    came = f"{counted(len(members), 'node')}: {', '.join(str(card['name']) for card in cards)}"
    if missing:
        came += f"; ranks {', '.join(map(str, missing))} did not come"
    todo = "Look at the nodes that are not named; the scheduler knows them all" if missing else ""
    first = Finding.unless("nodes", "reached", came, todo, "fault")
    return replace(compared, findings=[first, *compared.findings])
