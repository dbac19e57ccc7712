"""Start process groups: choose this rank's device and the backends, and check what somebody else started."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..system.errors import BadInput
from ..system.freed_blocks import return_large_blocks
from ..system.process_end import abandon_threads
from .engine import accelerator
from .engine.collectives import abort_groups
from .engine.gloo_all_gather import gather_safely
from .launchers import launched, local_rank

#: How long a rank waits for a peer before it counts as failed, unless told otherwise.
TIMEOUT = timedelta(minutes=10)

#: The same for what ranks agree on about files: writing or checking a big one takes longer than any step.
FILES_TIMEOUT = timedelta(hours=1)

#: Device -> torch's backends; files and flags are agreed on the CPU wherever the model computes.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

#: How the names of groups begin that stand in for others.
STAND_IN = "stand-in: "


@dataclass(frozen=True)
class StandInGroup:
    """Stand for the process group of one axis where there are no processes: collectives of tensors without
    numbers (torch's fake ones) ask a group for nothing else.
    """

    axis: str
    ranks: int
    index: int = 0

    @property
    def group_name(self) -> str:
        """Return the name that a collective of numbers does not find, and refuses with."""
        return f"{STAND_IN}{self.axis}"

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.index


def own_device(device: str | torch.device) -> torch.device:
    """Return the device of this rank, which becomes the current one of the process.

    Of an accelerator without an index, such as "cuda", it is the device with the rank's number on its host
    (LOCAL_RANK, or the variable of another launcher); if nobody states one, the current device. A process
    that computes on the CPU returns large blocks of memory when they are freed. Raises ``BadInput`` for a
    device that this machine lacks.
    """
    device = torch.device(device)
    module = accelerator.module_of(device)
    if module is None:
        return_large_blocks()
        return device
    index: int | None = device.index
    count: int = module.device_count()
    if index is None:
        index = local_rank()
    if index is None:
        index = module.current_device()
    if index >= count:
        raise BadInput(
            "ParallelState.start", "device", expected=f"one of the {count} devices of this machine, from 0",
            found=f"{device.type}:{index}",
            todo=f'Start fewer ranks here, or say which device is this rank\'s: device="{device.type}:0"',
        )  # fmt: skip
    module.set_device(index)
    return torch.device(device.type, index)


def init_process_group(device: torch.device, timeout: timedelta, **meeting: Any) -> None:
    """Start torch's default group for a rank's own device. ``meeting``: store, rank and world size; without
    them they are read from torchrun's variables.

    An accelerator's backend connects here, on the device that it is given, and not in the midst of a step.
    """
    eager: Mapping[str, Any] = {} if device.index is None else {"device_id": device}
    dist.init_process_group(BACKENDS[device.type], timeout=timeout, **eager, **meeting)


def start_process_group(device: torch.device, timeout: timedelta) -> None:
    """Start torch's default group from a launcher's variables; ``BadInput`` without them or a backend."""
    if device.type not in BACKENDS:
        raise BadInput("ParallelState.start", "device", expected=" or ".join(BACKENDS), found=device.type)
    process = launched()
    if process is None:
        todo = "Start with torchrun, or call torch.distributed.init_process_group first"
        expected = "torchrun's variables or a running process group"
        raise BadInput("environment", "RANK", expected=expected, found="neither", todo=todo)
    os.environ.update(process.variables)  # torch reads no other launcher's
    init_process_group(device, timeout)


def abandon_process_group(device: torch.device) -> None:
    """End the group after a failure. One rank may start another; among several, peers may be dead.

    Destroying an accelerator's group waits for them, and if it stays, its watchdog kills this process while
    the error is reported. gloo's collectives end with an error by themselves, in threads of its own: they may
    do so until the process ends (``system.process_end``).
    """
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
        return
    abandon_threads()
    if accelerator.is_accelerator(device):
        abort_groups()


def check_backends(device: torch.device) -> None:
    """Raise ``BadInput`` unless the running group sends tensors of the host and of ``device``."""
    running = dist.get_backend_config()
    missing = [kind for kind in ("cpu", device.type) if kind not in _backends()]
    if missing:
        line = BACKENDS.get(device.type, f"cpu:gloo,{running}")
        raise BadInput(
            "ParallelState.start", "process group", expected=f"a backend for {' and '.join(missing)}",
            found=running, todo=f'Start it by torch.distributed.init_process_group("{line}")',
        )  # fmt: skip


def identity(device: torch.device) -> str | None:
    """Return the device's name in the world if its backend takes one rank a device, unlike gloo."""
    uuid = accelerator.uuid(device)
    several = uuid is None or _backends()[device.type] == "gloo"
    return None if several else f"{uuid} of {socket.gethostname()}"


def agree(rank_device: str | None) -> None:
    """Give all ranks rank 0's seed of torch's generator, unless they already have one seed, because they draw
    parts of one tensor from it. ``mine``: this rank's device; if two ranks have it, all raise ``BadInput``.
    """
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, (torch.initial_seed(), rank_device))
    seeds, devices = zip(*facts, strict=True)
    for rank, device in enumerate(devices):
        if device is not None and (first := devices.index(device)) < rank:
            raise BadInput(
                "ParallelState.start", "device", expected="a device of its own for each rank",
                found=f"{device} for the ranks {first} and {rank}",
                todo='With LOCAL_RANK set, device="cuda" takes the GPU of that number',
            )  # fmt: skip
    if len(set(seeds)) > 1:
        torch.manual_seed(seeds[0])


def _backends() -> dict[str, str]:
    """Return the backend of each type of device in the running group."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def new_group(ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Make a new group; only its members take part.

    Every rank makes as many groups, in the same order: torch names such a group by its ranks and by how many
    there are, and NCCL splits its communicator once for each.
    """
    gather_safely()
    group: dist.ProcessGroup = dist.new_group(
        [*ranks], timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group
