"""Define the messages between the parent and a worker."""

import importlib
import os
import struct
import sys
from dataclasses import dataclass

import torch.distributed as dist

from .pickling import FunctionName

#: A template writes to a rank's life line: first the process id, at the end the exit code.
LIFE = struct.Struct("i")
#: Worker to parent: waiting for a call.
READY = "ready"
#: Parent to worker: all ranks have answered, or one has failed; destroy the process group.
LEAVE = "leave"


@dataclass(frozen=True)
class Setting:
    """Parent to a new worker: the environment, folder and import path to take over, and what kind it is."""

    environment: dict[str, str]
    folder: str
    path: tuple[str, ...]
    fresh: bool

    def apply(self) -> None:
        """Take it over."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        importlib.invalidate_caches()  # files have come into being since the template started
        dist.set_debug_level_from_env()


@dataclass(frozen=True)
class Call:
    """Parent to worker: run this.

    ``arguments`` is packed apart: it may need the function's module to be unpacked. ``port`` is the parent's
    store on 127.0.0.1, ``prefix`` this call's own corner of it. Without ``process_group`` the function starts
    its own, from torchrun's environment variables.
    """

    function: FunctionName
    arguments: bytes
    rank: int
    world: int
    port: int
    prefix: str
    timeout: float
    process_group: bool = True


@dataclass(frozen=True)
class Raised:
    """Worker to parent, in the place of the packed result: what was raised, and when on the monotonic clock,
    which all processes share.
    """

    seconds: float
    summary: str
    traceback: str
    cause: bytes | None
