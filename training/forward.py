"""Run the forward pass alone, over micro-batches and pipeline stages, without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..data.batch import Batch
from ..models import CausalLM
from ..parallel_state.engine import is_sharded
from ..pipeline import Stages
from .compute_weights import computing


class ForwardOnly:
    """Compute the loss's input as a training step would, without gradients: ``forward(batch, each=...)``.

    It does not use torch's schedules: those fix the number of micro-batches, and training would have to set
    them up again. ``micro_batch`` is in samples; ``dtype`` is that of the activations. The model has been
    through ``shard_over_data`` and may be in training or evaluation mode. Collective over all ranks, which
    must have equally many samples.
    """

    def __init__(self, model: CausalLM, *, micro_batch: int, dtype: torch.dtype) -> None:
        self.model, self.micro_batch, self.dtype = model, micro_batch, dtype

    @torch.no_grad()
    def __call__(
        self, batch: Batch, *, each: Callable[[Tensor, Tensor], None] = lambda given, labels: None
    ) -> None:
        """Run the samples of this data rank, whole rows.

        On the last stage ``each(given, labels)`` is called for each micro-batch, with the output of
        ``CausalLM``.
        """
        stages = Stages(self.model, self.model.state, dtype=self.dtype)
        with computing(self.model):
            for part in batch.of_context(self.model.state).split(self.micro_batch):
                samples = part.samples()
                stages.fit(samples)
                output = stages.forward(samples)
                if output is not None:
                    each(output, part.labels)
        for module in self.model.modules():
            if is_sharded(module):  # no backward comes that would drop the gathered weights
                module.reshard()
