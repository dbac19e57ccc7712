"""Tell torch of a device that exists in Python only, and of a process group that sends nothing.

It cannot be taken back, so do it in a process of its own.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from ..parallel_state.engine import accelerator

#: The device's name, as in ``torch.device("simulated:0")``.
NAME = "simulated"

#: The process group's backend, for tensors on the host and on the device.
GROUP = "simulated_group"

#: Called where the host waits for all of a stream or an event; the device that is entered notes it.
WAITING: list[Callable[[], object]] = []


_LIBRARY = torch.library.Library("aten", "IMPL")


def _unreached(*args: Any) -> Tensor:
    # The device answers before torch looks for this kernel, which stands for there being one.
    raise RuntimeError("a tensor of the simulated device outside SimulatedDevice")


def _wait() -> None:
    for note in WAITING:
        note()


class Stream:
    """Stand for a queue of work on the device, and for a mark in it (an event): operators take no time."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.device, self.device_index, self.stream_id = torch.device(NAME, 0), 0, 0
        self.device_type = 20  # ``c10::DeviceType::PrivateUse1``

    def wait(self, other: object = None) -> None: ...

    record = wait_stream = wait_event = wait

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        _wait()


class Module(_DummyBackendModule):
    """Be the module that torch would keep as ``torch.simulated``."""

    Stream = Event = Stream

    def set_device(self, device: object) -> None: ...

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def __init__(self) -> None:
        self._streams: list[Any] = []

    def current_stream(self, device: object = None) -> Any:
        return self._streams[-1] if self._streams else Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._streams.append(stream or self.current_stream())
        try:
            yield
        finally:
            self._streams.pop()

    def synchronize(self, device: object = None) -> None:
        _wait()

    def max_memory_allocated(self, device: object = None) -> int:
        return 1 << 30

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return 9, 0

    @property
    def default_generators(self) -> list[torch.Generator]:
        return [torch.Generator()]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def register() -> None:
    """Make torch know the device and the process group's backend, once in this process."""
    warnings.filterwarnings("ignore", message=".*privateuse.*")
    module = Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    instead: list[tuple[object, str, Callable[..., object]]] = [
        (FakeTensor, "tolist", lambda self: self.cpu().tolist()),  # the base class reads number by number
        (torch.accelerator, "current_stream", module.current_stream),  # torch would ask a driver
        (torch.Tensor, "pin_memory", lambda self: self.clone()),  # pages are pinned for a driver
        (FakeTensor, "record_stream", lambda self, stream: None),  # it takes torch's own streams only
    ]
    for owner, name, replacement in instead:
        setattr(owner, name, replacement)
    # One kernel on CPUs and GPUs, which torch composes on a device that registers none.
    _LIBRARY.impl("silu_backward", _unreached, "PrivateUse1")
    accelerator.WITHOUT_NUMBERS.add(NAME)
    dist.Backend.register_backend(GROUP, _create_fake_pg, extended_api=True, devices=["cpu", NAME])


def start_group(rank: int, world: int) -> None:
    """Start a process group in which every other rank is imagined: collectives give what they were given."""
    register()
    # DTensor keeps the shapes of a rank's pieces by their mesh, and takes equal meshes of two ranks for one.
    _clear_sharding_prop_cache()
    dist.init_process_group(GROUP, store=FakeStore(), rank=rank, world_size=world)


def copy_from_host_in_sight() -> None:
    """Let ``torch.tensor(..., device=...)`` in this thread make a tensor on the host and then copy it, with
    an operator for each, so that the copy is seen.
    """
    torch._C._set_only_lift_cpu_tensors(True)
