"""Let modules compute without numbers, as on the device that is planned for."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..layers import uncounted
from ..parallel_state import BadInput, engine
from .micro_batch import MicroBatch
from .traced import without_numbers

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@contextmanager
def shapes_only(modules: Sequence[nn.Module], batch: MicroBatch) -> Iterator[None]:
    """Let modules compute without numbers inside this context, in the micro-batch's dtype.

    Raises ``BadInput`` for one whose parameters FSDP has cut: it would gather them.
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
        stack.enter_context(without_numbers(modules, DTYPES[batch.compute], gpu=batch.gpu))
        yield


def device_of(batch: MicroBatch) -> str:
    """Return the device of tensors without numbers: torch's "meta" stands for a GPU."""
    return "meta" if batch.gpu else "cpu"


def empty(shape: Sequence[int], batch: MicroBatch) -> Tensor:
    """Return activations of this shape."""
    return torch.empty(shape, dtype=DTYPES[batch.compute], device=device_of(batch))


def ids_of(batch: MicroBatch) -> Tensor:
    """Return token ids, or labels, (rows, length)."""
    return torch.zeros((batch.rows, batch.length), dtype=torch.int64, device=device_of(batch))
