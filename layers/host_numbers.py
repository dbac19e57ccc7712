"""Copy the host's numbers to a device without waiting, and remember them: nobody has to fetch them back."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..parallel_state.engine import accelerator
from ..parallel_state.engine.autograd_and_compiler import fake_mode

#: The host's numbers of a tensor, and the tensor's version then: numbers that changed since are not these.
_COPIES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def send(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``, without waiting where it is in pinned memory; ``on_host`` knows the result.

    Nobody may change the numbers of ``x`` afterwards.
    """
    if torch.compiler.is_compiling() or not (
        accelerator.is_host(x.device) and accelerator.is_accelerator(device)
    ):
        return x.to(device, non_blocking=True)
    whole = x.contiguous()
    copy = whole.to(device, non_blocking=True)
    return _remember(copy, whole)


def change_alike(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``change(x)``, a new tensor, which the host knows if it knows ``x``."""
    changed, host_numbers = change(x), on_host(x)
    if host_numbers is None or host_numbers is x or changed is x:
        return changed
    return _remember(changed, change(host_numbers).contiguous())


def _remember(copy: Tensor, numbers: Tensor) -> Tensor:
    if not copy.is_inference():  # such a tensor does not say when it changes
        _COPIES[copy] = numbers, copy._version
    return copy


def on_host(x: Tensor) -> Tensor | None:
    """Return the numbers of ``x`` on the host, if it has them: ``x`` itself, or of what ``send`` made, or of
    a view of that, the host's copy. Otherwise ``None``, also while code is traced.
    """
    if torch.compiler.is_compiling():
        return None
    if accelerator.is_host(x.device):
        return x
    numbers, version = _COPIES.get(x if x._base is None else x._base, (None, None))
    if numbers is None or version != x._version:
        return None
    host_numbers: Tensor = numbers.as_strided(x.shape, x.stride(), x.storage_offset())
    return host_numbers


#: What ``constants`` has copied.
_CONSTANTS: dict[tuple[tuple[float, ...], torch.device, torch.dtype], Tensor] = {}


def constants(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a few numbers that nobody may change, (N,), copied once to each device and dtype.

    In a traced graph they are constants of the graph.
    """
    # A trace counts its own tensors, and ends with them.
    if torch.compiler.is_compiling() or fake_mode() or device.type == "meta":
        return torch.tensor(numbers, dtype=dtype, device=device)
    place = numbers, device, dtype
    if place not in _CONSTANTS:
        with torch.inference_mode(False):  # a backward may need them later
            _CONSTANTS[place] = torch.tensor(numbers, dtype=dtype, device=device)
    return _CONSTANTS[place]
