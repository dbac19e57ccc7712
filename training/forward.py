"""The forward pass alone, over micro-batches and through the stages of a pipeline, without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ..models import CausalLM
from .batch import Batch


class ForwardOnly:
    """``forward(batch, each=...)`` computes what the loss takes, as a training step would, and no gradient.

    Not through torch's schedules: those fix the number of micro-batches and set themselves up anew where
    training follows. ``micro_batch`` is in samples; ``dtype`` is that of the activations. The model has been
    through ``shard_over_data`` and may be in training or evaluation mode. Collective over all ranks, which
    must have equally many samples.
    """

    def __init__(self, model: CausalLM, *, micro_batch: int, dtype: torch.dtype) -> None:
        self.model, self.micro_batch, self.dtype = model, micro_batch, dtype

    @torch.no_grad()
    def __call__(
        self, batch: Batch, *, each: Callable[[Tensor, Tensor], None] = lambda given, labels: None
    ) -> None:
        """The samples of this data rank. On the last stage ``each(given, labels)`` is called for each
        micro-batch, with what ``CausalLM`` gives.
        """
        for part in batch.split(self.micro_batch):
            self._micro_batch(part, each)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # no backward comes that would drop the gathered weights
                module.reshard()

    def _micro_batch(self, part: Batch, each: Callable[[Tensor, Tensor], None]) -> None:
        stage = self.model.stage
        x = part.input_ids if stage.first else self._received(*part.input_ids.shape)
        out = self.model(x, part.positions)
        if stage.last:
            each(out, part.labels)
        else:
            self._exchange(dist.isend, out.contiguous(), +1)

    def _received(self, samples: int, length: int) -> Tensor:
        """The hidden states that the stage before sends."""
        state = self.model.state
        here = length // state.tensor_size if state.sequence else length
        shape = (samples, here, self.model.config.hidden_size)
        hidden = torch.empty(shape, dtype=self.dtype, device=state.device)
        self._exchange(dist.irecv, hidden, -1)
        return hidden

    def _exchange(self, way: Callable[..., object], x: Tensor, step: int) -> None:
        """With a neighbour in the pipeline; batched, as the schedules do it, so that NCCL needs no second
        connection.
        """
        state = self.model.state
        peer = state.at.pipeline + step
        for work in dist.batch_isend_irecv([dist.P2POp(way, x, group=state.pipeline_group, group_peer=peer)]):
            work.wait()
