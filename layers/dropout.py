"""Dropout whose masks agree where tensor ranks hold the same activations and differ where these are split.

The masks follow torch's global generators. Seed those alike on the ranks of one tensor group, and by (seed,
step, data and context rank, stage) across them, as the training loop does: a resumed run then draws the same
masks, with no state to save. The masks depend on the layout (a rank draws for the part it holds), so runs
with dropout are reproducible within one layout and only statistically alike across layouts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import ParallelState, alone_or
from ..parallel_state.engine import accelerator


class Dropout(nn.Module):
    """Apply ``nn.Dropout`` between blocks: to whole activations, or to this rank's tokens (sequence)."""

    def __init__(self, p: float, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.p, self.state = p, alone_or(state)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with dropout, of the same shape."""
        if not self.training or self.p == 0.0:
            return x
        with own_random(self.state, split=self.state.sequence):
            return F.dropout(x, self.p, training=True)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def own_random(state: ParallelState, *, split: bool) -> AbstractContextManager[None]:
    """Let each tensor rank draw from a random stream of its own inside this context, if ``split``.

    Afterwards all ranks continue with the common stream. The seed of the own streams is drawn from the common
    one, so nothing has to be saved, and a recomputation repeats it.
    """
    return _own(state) if split and state.tensor.size > 1 else nullcontext()


@contextmanager
def _own(state: ParallelState) -> Iterator[None]:
    seed = int(torch.randint(2**62, (), device="cpu"))
    with accelerator.fork_random(state.device):
        torch.manual_seed(seed + state.tensor.index)
        yield
