"""Run the forward pass alone, over micro-batches and pipeline stages, without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..data.batch import Batch
from ..layers import Stage
from ..models import CausalLM
from ..parallel_state.engine import is_sharded
from ..pipeline import through_stages
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
        with computing(self.model):
            for part in batch.of_context(self.model.state).split(self.micro_batch):
                self._micro_batch(part, each)
        for module in self.model.modules():
            if is_sharded(module):  # no backward comes that would drop the gathered weights
                module.reshard()

    def _micro_batch(self, part: Batch, each: Callable[[Tensor, Tensor], None]) -> None:
        state, (samples, length) = self.model.state, part.input_ids.shape
        here = length // state.tensor_size if state.sequence else length

        def run(stage: Stage, x: Tensor) -> Tensor:
            out: Tensor = self.model(x, part.positions, stage=stage)
            return out

        out = through_stages(
            self.model,
            part.input_ids,
            run,
            shape=(samples, here, self.model.config.hidden_size),
            dtype=self.dtype,
        )
        if out is not None:
            each(out, part.labels)
