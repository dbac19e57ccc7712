"""Say what a kind of device can do: the one place where code asks, instead of asking for a device's name.

An accelerator is any device beside the host's CPU: a GPU, and the simulated device of the tests, which is one
in everything but numbers. Arguments: a device, or its type such as "cuda". Torch's module of an accelerator,
``torch.cuda`` for a GPU, is asked for what depends on the machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Device = torch.device | str

#: Whether tensors without numbers, on torch's "meta" device, stand for those of a GPU (``imagined``).
_IMAGINED = [False]  # which torch.compile can trace, as it cannot a context variable


@contextmanager
def imagined() -> Iterator[None]:
    """Let code take torch's "meta" device for a recent GPU inside this context, while a plan is traced
    without numbers. No module of torch is asked for a device that is not there.
    """
    before, _IMAGINED[0] = _IMAGINED[0], True
    try:
        yield
    finally:
        _IMAGINED[0] = before


#: Types of devices whose tensors have no numbers; one that is made of Python adds itself.
WITHOUT_NUMBERS = {"meta"}


def has_numbers(device: torch.device) -> bool:
    """Return whether tensors on a device have numbers, which code may compare."""
    return device.type not in WITHOUT_NUMBERS


def is_imagined(device: Device = "meta") -> bool:
    """Return whether a device stands for a GPU, see ``imagined``."""
    return _IMAGINED[0] and _type(device) == "meta"


def is_accelerator(device: Device) -> bool:
    """Return whether a device computes while the host goes on, so that reading a number waits for it."""
    return _type(device) not in ("cpu", "meta") or is_imagined(device)


def is_host(device: Device) -> bool:
    """Return whether a device is the host's CPU, whose numbers are there when an operator returns."""
    return _type(device) == "cpu"


def module_of(device: Device) -> Any:
    """Return torch's module of accelerators whose current one a process chooses; else ``None``."""
    if is_imagined(device) or not is_accelerator(device):
        return None
    module = torch.get_device_module(_type(device))
    return module if hasattr(module, "set_device") else None


def uuid(device: Device) -> str | None:
    """Return the UUID of a GPU; ``None`` if torch knows none."""
    describe = getattr(module_of(device), "get_device_properties", None)
    identity = None if describe is None else getattr(describe(device), "uuid", None)
    return None if identity is None else str(identity)


def capability(device: Device) -> tuple[int, int]:
    """Return the version of a GPU's instructions, such as (9, 0); (0, 0) if the device states none."""
    if is_imagined(device):
        return 9, 0
    ask = getattr(module_of(device), "get_device_capability", None)
    return (0, 0) if ask is None else ask(device)


#: Whether torch's flash attention for GPUs runs there, also that over documents (``varlen``), and
#: FlexAttention has kernels that never write all scores.
has_flash_attention = is_accelerator
#: Whether a product of 16-bit numbers can be given in fp32, without rounding on the way.
has_wide_sums = is_accelerator
#: Whether copies from pinned memory of the host run by themselves.
copies_from_pinned = is_accelerator


def has_grouped_products(device: Device) -> bool:
    """Return whether one kernel multiplies the rows of all groups in bf16, without the host knowing sizes."""
    return capability(device) >= (8, 0)


def has_compiled_losses(device: Device) -> bool:
    """Return whether compiling the loss's arithmetic is worth its time there."""
    return is_accelerator(device) and not is_imagined(device)


@contextmanager
def fork_random(device: torch.device) -> Iterator[None]:
    """Put the global generators of the host and of ``device`` back where they were when the block ends."""
    devices = [device] if module_of(device) is not None else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cpu"):
        yield


def use_in_current_stream(x: Tensor) -> None:
    """Keep the memory of ``x``, which was made in another stream, until this stream's work on it is done."""
    module = module_of(x.device)
    if module is not None:
        x.record_stream(module.current_stream(x.device))


def peak_memory(device: Device) -> int | None:
    """Return the most bytes that tensors have used there so far; ``None`` if the device does not count."""
    ask = getattr(module_of(device), "max_memory_allocated", None)
    return None if ask is None else int(ask(device))


def synchronize(device: Device) -> None:
    """Wait until the device has done all its work."""
    torch.get_device_module(_type(device)).synchronize()


def _type(device: Device) -> str:
    return device if isinstance(device, str) else device.type
