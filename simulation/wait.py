"""Describe the places in the code at which the host waits for a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from torch import Tensor

#: ``read``: a number or a tensor comes to the host. ``upload``: a tensor of the host's pageable memory goes
#: to the device, which CUDA ends with a wait for the stream. ``inside``: an operator reads by itself.
Kind = Literal["read", "upload", "inside"]

#: How often a wait may happen: in each step; there for each micro-batch of each stage of a rank, for each
#: block that this computes (again in its backward, too), or for each parameter; or never in a later step.
Per = Literal["step", "micro-batch", "block", "parameter", "outside"]


class Locals:
    """Look up a local variable in the function that waits, or else in those that called it."""

    def __init__(self, frame: FrameType | None) -> None:
        self._frame = frame

    def __getitem__(self, name: str) -> Any:
        frame = self._frame
        while frame is not None and name not in frame.f_locals:
            frame = frame.f_back
        if frame is None:
            raise KeyError(name)
        return frame.f_locals[name]


@dataclass(frozen=True)
class Wait:
    """Describe a place in the code at which the host waits for the device.

    ``place``: file and qualified name of the function. ``most``: how often at most in each of ``per``.
    ``gives``: what is read there, from the tensor and local variables; by default zeros, and
    true for a condition.
    """

    place: str
    kind: Kind
    most: int
    per: Per
    reason: str
    gives: Callable[[Tensor, Locals], Any] | None = None


Waits = Sequence[Wait]
