"""Run operators on a device that is not there, and notice what a real one would refuse or wait for.

A tensor on the device has a shape and no numbers (torch's ``FakeTensor``); tensors on the host are real. Then
mixing both is an error, and where the host asks the device for a number, somebody must say which: each such
place is a ``Wait``, with its reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from ...parallel_state.engine import TorchDispatchMode
from ..operators import tensors_in
from .backend import NAME, WAITING, FakeTensorMode, copy_from_host_in_sight

_HOUSE, _HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent
#: Beginnings of the names of operators that make a tensor and start no kernel.
_ALLOCATE = ("aten::empty", "aten::new_empty")

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


class Mixed(RuntimeError):
    """Report an operator that is given tensors, or a generator, of the host and of the device."""


class NewWait(RuntimeError):
    """Report a place that is not on the list and at which the host waits for the device."""


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


class SimulatedDevice(TorchDispatchMode):
    """Be the device while it is entered. Raises ``Mixed``, and ``NewWait`` for what is not in ``waits``.

    ``waited`` counts the waits by place and kind, ``kernels`` the operators that would start a kernel, by
    name; ``moved`` are the bytes that these read and write.
    """

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._waits = {(one.place, one.kind): one for one in waits}
        self.clear()

    def clear(self) -> None:
        """Count from zero again."""
        self.waited: Counter[tuple[str, Kind]] = Counter()
        self.kernels: Counter[str] = Counter()
        self.moved = 0

    def __enter__(self) -> SimulatedDevice:
        copy_from_host_in_sight()
        WAITING.append(self._wait_inside)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        WAITING.remove(self._wait_inside)
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copy_from_host_in_sight()  # autograd computes in a thread of its own
        kwargs, name = kwargs or {}, func.name().split(".")[0]
        given = list(tensors_in((args, kwargs)))
        here = [one for one in given if one.device.type == NAME]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted).type
        if name == "aten::is_pinned":  # pages are pinned for a driver, and there is none
            return False
        if name == "aten::_pin_memory":
            return args[0].clone()
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if name.startswith("prim::") or wanted == "meta" or not (here or wanted == NAME):
            return func(*args, **kwargs)
        host = [one for one in given if one.device.type == "cpu"]
        if (generator := kwargs.get("generator")) is not None and generator.device.type != NAME:
            raise Mixed(f"{name} on the device with a generator of {generator.device}, in {_place()[0]}")
        if name == "aten::_local_scalar_dense":
            return self._read(here[0]).item()
        if name == "aten::_to_copy" and here and wanted not in (None, NAME):
            dtype = kwargs.get("dtype") or here[0].dtype
            if kwargs.get("non_blocking"):  # into pinned memory; who uses it waits for an event
                return torch.zeros(here[0].shape, dtype=dtype)
            return self._read(here[0]).to(dtype)
        if name == "aten::_to_copy" and host:
            self._upload(kwargs.get("non_blocking", False))
            return self._on_device(torch.empty_like, host[0], dtype=kwargs.get("dtype"), device=wanted)
        if name == "aten::copy_" and host:
            if host[0] is args[0]:
                return args[0].copy_(self._read(args[1]))
            self._upload(kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return args[0]
        if any(one.ndim for one in host):
            shapes = ", ".join(f"{[*one.shape]} on {one.device}" for one in given)
            raise Mixed(f"{name} of {shapes}, in {_place()[0]}")
        if name == "aten::bincount":
            self._wait_inside()
            size, device = kwargs.get("minlength", args[-1]), here[0].device
            return self._on_device(torch.empty, size, dtype=torch.int64, device=device)
        if name == "aten::equal":
            return bool(self._read(torch.empty((), dtype=torch.bool, device="meta")))
        made = self._on_device(func, *args, **kwargs)
        if not func.is_view and not name.startswith(_ALLOCATE):
            self.kernels[name] += 1
            self.moved += sum(one.nbytes for one in (*given, *tensors_in(made)))
        return made

    def _on_device(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._fake:
            return func(*args, **kwargs)

    def _upload(self, non_blocking: bool) -> None:
        if not non_blocking:
            self._wait("upload")

    def _wait(self, kind: Kind) -> tuple[Wait, FrameType]:
        place, frame = _place()
        self.waited[place, kind] += 1
        if (place, kind) not in self._waits:
            line = f"line {frame.f_lineno}: " if frame is not None else ""
            raise NewWait(f"{place}: {line}{kind}: the host waits for the device; not on the list of waits")
        assert frame is not None
        return self._waits[place, kind], frame

    def _wait_inside(self) -> None:
        self._wait("inside")

    def _read(self, tensor: Tensor) -> Tensor:
        wait, frame = self._wait("read")
        if wait.gives is None:
            fill = torch.ones if tensor.dtype == torch.bool else torch.zeros
            return fill(tensor.shape, dtype=tensor.dtype)
        given = torch.as_tensor(wait.gives(tensor, Locals(frame)), dtype=tensor.dtype)
        if given.shape != tensor.shape:
            found, expected = [*tensor.shape], [*given.shape]
            raise NewWait(f"{wait.place}: reads numbers of shape {found}, expected {expected} as on the list")
        return given


def _place() -> tuple[str, FrameType | None]:
    """Return the innermost function of ours that runs, as ``file: Class.method``, and its frame; or, where
    autograd's own thread runs nothing of ours, that of torch's distributed package.
    """
    frame: FrameType | None = sys._getframe(1)
    of_torch: tuple[str, FrameType] | None = None
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname.partition(".<locals>")[0]
        ours = path.is_relative_to(_HOUSE) and not path.is_relative_to(_HERE)
        if ours and not name.endswith("__torch_dispatch__"):  # a mode, which stands between torch and torch
            return f"{path.relative_to(_HOUSE)}: {name}", frame
        if of_torch is None and path.is_relative_to(_TORCH / "distributed"):
            of_torch = f"torch/{path.relative_to(_TORCH)}: {name}", frame
        frame = frame.f_back
    return of_torch or ("torch", None)
