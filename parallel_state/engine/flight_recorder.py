"""Ask torch's flight recorder which collectives this rank has called, and which of them have ended."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

#: Where NCCL's own watchdog writes when a collective times out: a path that a rank's number follows.
_DUMP_PLACE = "TORCH_FR_DUMP_TEMP_FILE"


def group_ranks() -> dict[str, list[int]]:
    """Return the ranks of each process group by the group's name; gloo's records do not have them."""
    names = dist.distributed_c10d._pg_names
    return {name: dist.get_process_group_ranks(group) for group, name in names.items()}


def recorded_collectives() -> dict[str, str]:
    """Return torch's records as JSON texts by backend: ``gloo``, and ``nccl`` where it is built in."""
    made = torch._C._distributed_c10d
    kinds = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {name: getattr(made, call)(True, False) for name, call in kinds.items() if hasattr(made, call)}


@contextmanager
def dump_on_timeout(prefix: str) -> Iterator[None]:
    """Let NCCL's watchdog, which ends the process when a collective times out, first write its records to
    ``prefix`` and the rank's number. The block begins before the process group is made. What the user has set
    stays.
    """
    stated = {_DUMP_PLACE: prefix, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    ours = stated.keys() - os.environ.keys()
    os.environ.update({name: stated[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
