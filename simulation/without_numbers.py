"""Let modules compute without numbers, as on the device that is planned for."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..layers import uncounted
from ..parallel_state import BadInput, engine, local
from ..parallel_state.engine.autograd_and_compiler import without_compiler
from .kernels import gpu_kernels
from .micro_batch import MicroBatch
from .waits import read_in_trace

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_tolist = Tensor.tolist


@contextmanager
def shapes_only(modules: Sequence[nn.Module], batch: MicroBatch) -> Iterator[None]:
    """Give modules parameters and buffers without numbers inside this context, parameters in the dtype of the
    micro-batch, and let code choose as on its device and call its kernels.

    All of a trace, and what it is given, must be made inside. Raises ``BadInput`` for a module whose
    parameters FSDP has cut: it would gather them.
    """
    with ExitStack() as stack:
        for module in modules:
            if engine.fsdp_modules(module):
                raise BadInput(
                    "plan", type(module).__name__, expected="a module before shard_over_data",
                    found="one that FSDP has cut",
                    todo="Plan one built under torch.device('meta') with ParallelState.stand_in(layout)",
                )  # fmt: skip
            stack.enter_context(uncounted(module))
        if batch.gpu:
            stack.enter_context(without_compiler())
            stack.enter_context(gpu_kernels())
            stack.enter_context(mock.patch.object(Tensor, "tolist", _numbers))
        else:
            from ..parallel_state.engine.fake_tensors import FakeTensor, FakeTensorMode

            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(without_compiler())  # which that has imported
            stack.enter_context(mock.patch.object(FakeTensor, "tolist", read_in_trace))
        fakes: dict[int, Tensor] = {}
        for module in {id(inner): inner for outer in modules for inner in outer.modules()}.values():
            places: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for place in places:
                for name, tensor in place.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _fake(tensor, batch)
                    stack.callback(place.__setitem__, name, tensor)
                    place[name] = fakes[id(tensor)]
        yield


def _fake(tensor: Tensor, batch: MicroBatch) -> Tensor:
    shape = local(tensor).shape
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        fake = torch.empty(shape, dtype=tensor.dtype, device=device_of(batch))
        return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    return nn.Parameter(empty(shape, batch), requires_grad=tensor.requires_grad)


def _numbers(tensor: Tensor) -> Any:
    return read_in_trace(tensor) if tensor.is_meta else _tolist(tensor)


def device_of(batch: MicroBatch) -> str:
    """Return the device of tensors without numbers: torch's "meta" stands for a GPU."""
    return "meta" if batch.gpu else "cpu"


def empty(shape: Sequence[int], batch: MicroBatch) -> Tensor:
    """Return activations of this shape."""
    return torch.empty(shape, dtype=DTYPES[batch.compute], device=device_of(batch))


def ids_of(batch: MicroBatch) -> Tensor:
    """Return token ids, or labels, (rows, length)."""
    return torch.zeros((batch.rows, batch.length), dtype=torch.int64, device=device_of(batch))
