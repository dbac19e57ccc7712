"""Run operators on a device that is not there, and notice what a real one would refuse or wait for.

A tensor on the device has a shape and no numbers (torch's ``FakeTensor``); tensors on the host are real. Then
mixing both is an error, and where the host asks the device for a number, somebody must say which: each such
place is a ``Wait``, with its reason. Large tensors of the host, which offload keeps there, are never written
to: they read as zeros, and take no page of the real machine.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..parallel_state.engine import accelerator, is_dtensor, map_tensors, tensors_in
from ..parallel_state.engine.autograd_and_compiler import UncompiledMode
from .backend import NAME, WAITING, FakeTensorMode, copy_from_host_in_sight
from .live_bytes import DEVICE, device_of
from .operators import facts_of, remembered
from .waits import Kind, Locals, Wait, Waits, waiting_place

#: From so many elements on, a tensor of the host is never written to. Its memory shares no page with others.
LARGE = 2**24
#: One for the process, as is the device: torch refuses to mix fake tensors of two modes.
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Mixed(AssertionError):
    """Report an operator that is given tensors, or a generator, of the host and of the device."""


class NewWait(AssertionError):
    """Report a place that is not on the list and at which the host waits for the device."""


class SimulatedDevice(UncompiledMode):
    """Be the device while it is entered. Raises ``Mixed``, and ``NewWait`` for what is not in ``waits``; with
    ``strict=False`` only the first, and what is read at another place is zero.

    ``waited`` counts the waits by place and kind.
    """

    def __init__(self, waits: Waits, *, strict: bool = True) -> None:
        super().__init__()
        self._strict = strict
        self._waits = {(wait.place, wait.kind): wait for wait in waits}
        self.waited: Counter[tuple[str, Kind]] = Counter()

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
        if func is DEVICE:
            return device_of(args[0])
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        copy_from_host_in_sight()  # autograd computes in a thread of its own
        call = _Call(func, args, dict(kwargs or {}))
        if (without := _WITHOUT_DRIVER.get(call.name)) is not None:
            return without(call)
        call.kwargs.pop("pin_memory", None)  # pages are pinned for a driver, and there is none
        if not call.concerns_device:
            return _on_host(func, call)
        if (handler := _HANDLERS.get(call.name)) is not None:
            out = handler(self, call)
            if out is not NotImplemented:
                return out
        if call.host and accelerator.is_host(NAME):  # it stands for the host, where nothing can be mixed
            if call.name.endswith("_") and args[0] is call.host[0]:
                return args[0]
            args, call.kwargs = self._here((args, call.kwargs))
        else:
            call.check_places()
        return remembered(func, args, call.kwargs, _FAKE)

    def _on_device(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _FAKE:
            return func(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        """Return nested lists, tuples and dicts with the tensors of the host on the device."""

        def place(tensor: Tensor) -> Tensor:
            on_host = tensor.device.type == "cpu" and tensor.ndim > 0
            return self._on_device(torch.empty_like, tensor, device=NAME) if on_host else tensor

        return map_tensors(value, place)

    def _upload(self, non_blocking: bool) -> None:
        if not non_blocking:
            self._wait("upload")

    def _wait(self, kind: Kind) -> tuple[Wait | None, FrameType | None]:
        place, frame = waiting_place()
        self.waited[place, kind] += 1
        if (place, kind) not in self._waits:
            if not self._strict:
                return None, frame
            line = f"line {frame.f_lineno}: " if frame is not None else ""
            raise NewWait(f"{place}: {line}{kind}: the host waits for the device; not on the list of waits")
        return self._waits[place, kind], frame

    def _wait_inside(self) -> None:
        self._wait("inside")

    def _read(self, tensor: Tensor) -> Tensor:
        wait, frame = self._wait("read")
        if wait is None or wait.gives is None:
            if tensor.dtype == torch.bool and wait is not None:
                return torch.ones(tensor.shape, dtype=tensor.dtype)
            return _zeros(tensor.shape, tensor.dtype)
        numbers = torch.as_tensor(wait.gives(tensor, Locals(frame)), dtype=tensor.dtype)
        if numbers.shape != tensor.shape:
            shape, expected = [*tensor.shape], [*numbers.shape]
            raise NewWait(f"{wait.place}: reads numbers of shape {shape}, expected {expected} as on the list")
        return numbers


class _Call:
    """Hold an operator's call: its tensors, those on the device and on the host, the device it asks for."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs, self.name = args, kwargs, facts_of(func).name
        self.given = list(tensors_in((args, kwargs)))
        places = [(x, device_of(x).type) for x in self.given]
        self.here, self.host = ([x for x, place in places if place == kind] for kind in (NAME, "cpu"))
        device = kwargs.get("device")
        self.wanted = None if device is None else torch.device(device).type

    @property
    def concerns_device(self) -> bool:
        return self.wanted != "meta" and (bool(self.here) or self.wanted == NAME)

    def check_places(self) -> None:
        """Raise ``Mixed`` for a tensor of the host with dims, or a generator of the host."""
        generator = self.kwargs.get("generator")
        if generator is not None and generator.device.type != NAME:
            where = f"a generator of {generator.device}, in {waiting_place()[0]}"
            raise Mixed(f"{self.name} on the device with {where}")
        if any(tensor.ndim for tensor in self.host):
            shapes = ", ".join(f"{[*tensor.shape]} on {tensor.device}" for tensor in self.given)
            raise Mixed(f"{self.name} of {shapes}, in {waiting_place()[0]}")


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if (numel := shape.numel()) < LARGE:
        return torch.zeros(shape, dtype=dtype)
    # Of torch.empty some would be memory that was used before, with its numbers.
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _on_host(func: Any, call: _Call) -> Any:
    """Call an operator of the host; what it would write to a large tensor is left out. A collective, whose
    other ranks are imagined, writes nothing.
    """
    if func.is_view or func.namespace == "c10d" or all(tensor.numel() < LARGE for tensor in call.host):
        return func(*call.args, **call.kwargs)
    if any(map(is_dtensor, call.given)):
        return NotImplemented  # so that it is called with what this rank stores
    if func._schema.is_mutable:
        changed = call.kwargs.get("out", call.args[0])
        if all(tensor.numel() < LARGE for tensor in tensors_in(changed)):
            return func(*call.args, **call.kwargs)
        return changed if func._schema.returns else None
    args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: tensor.to("meta"))
    shapes = tensors_in(func(*args, **kwargs | ({"device": "meta"} if "device" in kwargs else {})))
    if all(copies.numel() < LARGE for copies in shapes):
        return func(*call.args, **call.kwargs)
    copies = [_zeros(x.shape, x.dtype).as_strided(x.shape, x.stride()) for x in shapes]
    return copies if "[]" in str(func._schema.returns[0].type) else copies[0]


def _copy(device: SimulatedDevice, call: _Call) -> Any:
    """Copy to the host, or to the device; a copy within the device is a kernel."""
    if call.here and call.wanted not in (None, NAME):
        dtype = call.kwargs.get("dtype") or call.here[0].dtype
        if call.kwargs.get("non_blocking"):  # into pinned memory; who uses it waits for an event
            return _zeros(call.here[0].shape, dtype)
        return device._read(call.here[0]).to(dtype)
    if not call.host:
        return NotImplemented
    dtype = call.kwargs.get("dtype")
    if call.host[0].ndim and accelerator.is_host(NAME):  # it stays there, and its numbers known
        return call.host[0] if dtype is None else call.host[0].to(dtype)
    device._upload(call.kwargs.get("non_blocking", False))
    return device._on_device(torch.empty_like, call.host[0], dtype=dtype, device=call.wanted)


def _copy_into(device: SimulatedDevice, call: _Call) -> Any:
    if not call.host:
        return NotImplemented
    into = call.args[0]
    if call.host[0] is into:
        numbers = device._read(call.args[1])
        return into if into.numel() >= LARGE else into.copy_(numbers)
    device._upload(call.kwargs.get("non_blocking", len(call.args) > 2 and call.args[2]))
    return into


def _count_each(device: SimulatedDevice, call: _Call) -> Any:
    """Make as many counts as it says: how many there are depends on numbers, so that the operator waits."""
    call.check_places()
    device._wait_inside()
    size, place = call.kwargs.get("minlength", call.args[-1]), call.here[0].device
    return device._on_device(torch.empty, size, dtype=torch.int64, device=place)


def _are_equal(device: SimulatedDevice, call: _Call) -> bool:
    call.check_places()
    return bool(device._read(torch.empty((), dtype=torch.bool, device="meta")))


#: Operators that a machine without a driver cannot do.
_WITHOUT_DRIVER: dict[str, Callable[[_Call], Any]] = {
    "aten::is_pinned": lambda call: False,
    "aten::_pin_memory": lambda call: call.args[0].clone(),
}
#: Operators that move numbers between host and device, or whose result depends on numbers.
_HANDLERS: dict[str, Callable[[SimulatedDevice, _Call], Any]] = {
    "aten::_local_scalar_dense": lambda device, call: device._read(call.here[0]).item(),
    "aten::_to_copy": _copy,
    "aten::copy_": _copy_into,
    "aten::bincount": _count_each,
    "aten::equal": _are_equal,
    # Torch's own stand-in makes a second tensor of it.
    "_c10d_functional::wait_tensor": lambda device, call: call.args[0],
}
