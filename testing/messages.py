"""What the parent and a worker say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from .transport import FunctionName


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
class Returned:
    """Worker to parent: the packed result."""

    result: bytes


@dataclass(frozen=True)
class Raised:
    """Worker to parent: what was raised, and when on the monotonic clock, which all processes share."""

    seconds: float
    summary: str
    traceback: str
    cause: bytes | None


@dataclass(frozen=True)
class Leave:
    """Parent to worker: all ranks have answered, or one has failed; destroy the process group."""


@dataclass(frozen=True)
class Ready:
    """Worker to parent: waiting for a call."""
