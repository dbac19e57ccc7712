"""One step's forward and backward: micro-batches, with or without a pipeline; gradients ready to clip."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batch import Batch
from ..layers import chunked_cross_entropy, set_auxiliary_scale, valid_tokens, vocab_parallel_cross_entropy
from ..models import CausalLM
from ..parallel_state import BadInput, finalize_gradients, refuse_untrained, signs_of_training
from ..pipeline.runner import Pipeline, schedule_of_model
from .data_parallel import before_backward


class TrainStep:
    """``step(*batch)`` leaves in ``.grad`` the gradients of the mean loss over the step's tokens.

    The mean is over the valid labels of the *global* batch, whatever the micro-batches and data ranks, so it
    is the same number in every layout. ``micro_batch`` is in samples. The model has been through
    ``shard_over_data``. ``dtype``: of the activations; ``reduce``: of the sums of gradients outside FSDP, if
    not the gradients' own.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        micro_batch: int,
        schedule: str = "1f1b",
        label_smoothing: float = 0.0,
        dtype: torch.dtype = torch.float32,
        loss_chunk: int = 0,
        reduce: torch.dtype | None = None,
    ) -> None:
        self.model, self.state = model, model.state
        self.micro_batch, self.schedule_name = micro_batch, schedule
        self.label_smoothing, self.dtype, self.reduce = label_smoothing, dtype, reduce
        self.loss_chunk, self._scale = loss_chunk, 1.0
        self._schedule: Pipeline | None = None
        self._shape: torch.Size | None = None
        self._tokens = torch.ones(())

    def __call__(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor | None = None, *, scale: float = 1.0
    ) -> Tensor:
        """All (samples of this data rank, S), int64; labels shifted, ``IGNORE`` where they do not count.
        Whole rows: each context rank is given the same and takes its chunks.

        ``positions`` start again at 0 where a document starts; ``None`` is one document a row.

        Returns the loss, the same scalar on every rank. A step with no valid label has loss 0 and zero
        gradients. ``NotTrained``, on every rank, where a trained parameter has no gradient, or all gradients
        are zero and the loss is not. ``scale``, a power of two: the gradients are those of ``scale`` times
        the loss.
        """
        samples, length = input_ids.shape
        self.state.layout.check_length(length, "recipe", "sequence_length")
        if samples % self.micro_batch:
            raise BadInput(
                "recipe",
                "micro_batch",
                expected=f"a divisor of the {samples} samples of a data rank",
                found=self.micro_batch,
            )
        input_ids, labels, positions = Batch(input_ids, labels, positions).of_context(self.state)
        self._tokens, self._scale = self._global_tokens(labels), scale
        set_auxiliary_scale(self.model, scale / (samples * self.state.layout.data))
        if self.state.layout.pipeline > 1:
            losses = self._pipelined(input_ids, labels, positions)
        else:
            losses = self._plain(input_ids, labels, positions)
        loss = self._global_loss(losses)
        finalize_gradients(self.model, reduce=self.reduce, state=self.state)
        return loss

    def loss(self, given: Tensor, labels: Tensor) -> Tensor:
        """A micro-batch's share of the step's mean loss, times the scale, from what the model gives."""
        total = self.total_loss(given, labels, label_smoothing=self.label_smoothing)
        return total / self._tokens * self._scale

    def total_loss(self, given: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The sum over a micro-batch's valid tokens, the same on the ranks of a tensor group.

        ``given``: logits, or with ``head_in_loss`` the hidden states of the last stage.
        """
        size, state = self.model.config.vocab_size, self.state
        if self.model.head_in_loss:
            return chunked_cross_entropy(
                given,
                self.model.head_weight,
                labels,
                size,
                chunk=self.loss_chunk,
                label_smoothing=label_smoothing,
                logit_cap=self.model.logit_cap,
                state=state,
            )
        return vocab_parallel_cross_entropy(
            given, labels, size, label_smoothing=label_smoothing, state=state
        ).sum()

    def _plain(self, input_ids: Tensor, labels: Tensor, positions: Tensor | None) -> list[Tensor]:
        losses = []
        parts = Batch(input_ids, labels, positions).split(self.micro_batch)
        for number, (x, y, at) in enumerate(parts):
            before_backward(self.model, self.state, last=number == len(parts) - 1)
            loss = self.loss(self.model(x, at), y)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _pipelined(self, input_ids: Tensor, labels: Tensor, positions: Tensor | None) -> list[Tensor]:
        if self._schedule is None or input_ids.shape != self._shape:
            self._schedule = schedule_of_model(
                self.model,
                self.loss,
                name=self.schedule_name,
                microbatches=len(input_ids) // self.micro_batch,
                shape=(self.micro_batch, input_ids.shape[1]),
                dtype=self.dtype,
            )
            self._shape = input_ids.shape
        stage = self.model.stage
        arguments = (input_ids,) if stage.first else ()
        # Every stage attends and rotates by position, so every stage is told; the schedule cuts keywords too.
        told: dict[str, Any] = {} if positions is None else {"positions": positions}
        return self._schedule.step(*arguments, target=labels if stage.last else None, **told)[0]

    def _global_tokens(self, labels: Tensor) -> Tensor:
        """Valid labels of the whole step, at least 1; of the ranks that share a data piece one counts."""
        state = self.state
        mine = state.at.tensor == 0 and state.at.pipeline == 0
        count = valid_tokens(labels) * int(mine)
        if state.layout.world > 1:
            dist.all_reduce(count)
        return count.clamp(min=1)

    def _global_loss(self, losses: list[Tensor]) -> Tensor:
        state = self.state
        inner = torch.promote_types(self.dtype, torch.float32)
        total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=inner, device=state.device)
        total = total.to(inner)
        # With the loss goes what tells all ranks that one of them has nothing to train with.
        sums = torch.cat([total.view(1), signs_of_training(self.model).to(total)])
        if state.layout.world > 1:
            sums[0] *= int(state.at.tensor == 0)
            dist.all_reduce(sums)
        loss = sums[0] / self._scale
        refuse_untrained(self.model, float(loss), sums[1:].tolist(), state=state)
        return loss
