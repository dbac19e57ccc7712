"""Run one step's forward and backward: micro-batches, with or without a pipeline; gradients ready to clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batch import Batch
from ..data.multi_token_labels import all_labels, tokens_ahead
from ..layers import (
    chunked_cross_entropy,
    cut_sequence,
    set_auxiliary_scale,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from ..models import CausalLM
from ..parallel_state import BadInput, has_gradients
from ..pipeline import Stages
from .base_step import Step, refuse_stale
from .compute_weights import computing


class TrainStep(Step):
    """Compute the gradients of a step's mean loss: ``step(batch)`` leaves them in ``.grad``.

    The mean is over the valid labels of the *global* batch, whatever the micro-batches and data ranks, so it
    is the same number in every layout. ``micro_batch``: number of samples. With more than one data rank the
    model must have been through ``shard_over_data``. ``dtype``: dtype of the activations. ``reduce``: dtype
    in which gradients are summed outside FSDP; the default is that of the gradients. ``mtp``: factor of the
    mean loss of the model's blocks of multi-token prediction; the loss that is returned does not contain it.
    """

    trains_all = True

    def __init__(
        self,
        model: CausalLM,
        *,
        micro_batch: int,
        schedule: str = "1f1b",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        dtype: torch.dtype = torch.float32,
        loss_chunk: int = 0,
        loss_sums: torch.dtype | None = None,
        compiled_loss: bool = False,
        mtp: float = 0.0,
        reduce: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, model.state, micro_batch=micro_batch, reduce=reduce)
        self.model, self.schedule_name = model, schedule
        self.label_smoothing, self.z_loss, self.dtype = label_smoothing, z_loss, dtype
        self.loss_chunk, self.loss_sums, self._scale = loss_chunk, loss_sums, 1.0
        self.compiled_loss, self.mtp = compiled_loss, mtp
        self._stages: Stages | None = None
        self._shape: torch.Size | None = None
        self._tokens = torch.ones(())
        #: What blocks of multi-token prediction are given, of this rank's batch.
        self._ahead: Tensor | None = None

    def __call__(self, batch: Batch, *, scale: float = 1.0) -> Tensor:
        """Run forward and backward of ``batch``; return the loss, the same scalar on every rank.

        ``batch``: the samples of this data rank, whole rows; each context rank is given the same rows and
        takes its chunks. Leave it on the host, where it is checked before it is copied: checking a batch on
        the device waits for it. ``scale``, a power of two, multiplies the loss before the backward. A step
        with no valid label has loss 0 and zero gradients. Raises ``NotTrained``, on every rank, if a trained
        parameter has no gradient, or if all gradients are zero and the loss is not; and ``BadInput``, on
        every rank, for a batch that one rank cannot use, for data ranks with different numbers of rows, and
        if an earlier step left gradients that are not zero.
        """
        loss, counts = self.launch(batch, scale=scale)
        self.refuse(loss, counts)
        return loss

    def launch(self, batch: Batch, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Do what a call does, without waiting for the device and without raising ``NotTrained``.

        Returns the loss and the counts with which ``Update`` finds out afterwards that a parameter was not
        trained; it then updates none.
        """
        batch, self._scale = self._agree(batch), scale
        set_auxiliary_scale(self.model, scale / (len(batch.input_ids) * self.state.layout.data))
        with computing(self.model):
            if self.state.layout.pipeline > 1:
                losses = self._pipelined(batch)
            else:
                parts = batch.split(self.micro_batch)
                ahead: Sequence[Tensor | None] = [None] * len(parts)
                if self._ahead is not None:
                    ahead = self._ahead.split(self.micro_batch)
                losses = self.accumulate([*zip(parts, ahead, strict=True)], self._loss_of)
        inner = torch.promote_types(self.dtype, torch.float32)
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.state.device)
        sums, counts = self.sum_over_ranks(total.to(inner).view(1))
        self.gradients.finalize(reduce=self.reduce)
        return sums[0] / scale, counts

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's share of the step's mean loss, times the loss scale, from the model's
        output.

        ``targets``: what ``all_labels`` returns. The losses of multi-token prediction, each a mean
        over the tokens of the step, have gradients only: their value is not added.
        """
        scale = self._scale / self._tokens.double()
        labels, scales = targets, [scale]
        if targets.ndim == 3:  # one block's come after the other's along the batch, as in the output
            blocks = targets.shape[1] - 1
            labels, scales = (
                targets.transpose(0, 1).flatten(0, 1),
                [scale] + [scale * (self.mtp / blocks)] * blocks,
            )
        found, *further = self.total_losses(
            output, labels, label_smoothing=self.label_smoothing, z_loss=self.z_loss, scales=scales
        )
        for more in further:
            found = found + (more - more.detach())
        return found

    def total_losses(
        self,
        output: Tensor,
        labels: Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        scales: Sequence[Tensor | None] = (None,),
    ) -> list[Tensor]:
        """Return sums of the loss over a micro-batch's valid tokens, equal on the ranks of a tensor group:
        one for each equal part of the rows, times its own number of ``scales``.

        ``output``: logits, which a backward overwrites, or with ``head_in_loss`` the hidden states of the
        last stage. A scale ``None`` is 1.
        """
        size, state, parts = self.model.config.vocab_size, self.state, len(scales)
        if self.model.head_in_loss:
            return [
                chunked_cross_entropy(
                    hidden,
                    self.model.head_weight,
                    wanted,
                    size,
                    chunk=self.loss_chunk,
                    bias=self.model.head_bias,
                    label_smoothing=label_smoothing,
                    z_loss=z_loss,
                    logit_cap=self.model.logit_cap,
                    scale=scale,
                    sums=self.loss_sums,
                    compiled=self.compiled_loss,
                    state=state,
                )
                for hidden, wanted, scale in zip(
                    _parts(output, parts), _parts(labels, parts), scales, strict=True
                )
            ]
        # All parts at once: autograd would take each part of the logits as overwritten by the others.
        losses = vocab_parallel_cross_entropy(
            output,
            labels,
            size,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            compiled=self.compiled_loss,
            overwrite=True,
            state=state,
        )
        return [
            one.sum() if scale is None else one.sum() * scale.to(one.dtype)
            for one, scale in zip(_parts(losses, parts), scales, strict=True)
        ]

    def _loss_of(self, part: tuple[Batch, Tensor | None]) -> Tensor:
        batch, ahead = part
        ids = None if ahead is None else ahead[:, 0]
        output = self.model(batch.input_ids, batch.positions, ahead=ids)
        return self.loss(output, all_labels(batch.labels, ahead))

    def _pipelined(self, batch: Batch) -> list[Tensor]:
        ids, samples, losses = batch.input_ids, batch.samples(), []
        if self._ahead is not None:
            samples["ahead"] = self._ahead[:, 0]
        if self._stages is None or ids.shape != self._shape:
            self._stages, self._shape = Stages(self.model, self.state, dtype=self.dtype), ids.shape
            self._stages.fit({name: x[: self.micro_batch] for name, x in samples.items()})
        targets = all_labels(batch.labels, self._ahead)

        def loss_of(output: Tensor, start: int) -> Tensor:
            losses.append(self.loss(output, targets[start : start + self.micro_batch]))
            return losses[-1]

        self._stages.train(samples, loss_of, schedule=self.schedule_name, micro_batch=self.micro_batch)
        return [loss.detach() for loss in losses]

    def _agree(self, batch: Batch) -> Batch:
        """Return this context rank's chunks of the batch on the device, and count the labels of the whole
        step, at least 1; of the ranks that share a data piece one counts. Raise ``BadInput`` as ``__call__``
        says. The ranks agree on the host.
        """
        state, world, vocabulary = self.state, self.state.layout.world, self.model.config.vocab_size
        said, refusal = torch.zeros(5, dtype=torch.int64), None
        try:
            if not isinstance(batch, Batch):
                raise BadInput("batch", expected="a Batch", found=type(batch).__name__)
            rows, length = batch.check_form().input_ids.shape
            state.layout.check_length(length, "recipe", "sequence_length")
            self.check_samples(rows)
            count = int(valid_tokens(batch.of_context(state).labels))
            counted = count * (state.counts_here and state.at.pipeline == 0)
            outside, stale = bool(batch.any_outside(vocabulary)), has_gradients(self.model)
            said = torch.tensor([counted, outside, stale, rows, rows**2])
        except BadInput as error:
            refusal, said[1] = error, 1
        if world > 1:
            dist.all_reduce(said)
        _, unfit, stale, total, squares = said.tolist()
        if refusal is not None:
            raise refusal
        if unfit:
            batch.check_ids(vocabulary)
            raise BadInput(
                "batch", expected="one that each rank can use", found="one that another rank refused"
            )
        if total**2 != world * squares:  # the square of the mean is the mean of the squares of equal numbers
            raise BadInput("batch", "rows", expected="as many on each data rank", found=f"{rows} here")
        if stale:
            refuse_stale()
        self._tokens = said[0].clamp(min=1).to(state.device, non_blocking=True)
        if blocks := self.model.config.mtp_blocks:
            ahead = tokens_ahead(batch, blocks).to(state.device, non_blocking=True)
            self._ahead = cut_sequence(ahead, state, dim=3)
        return batch.to(state.device).of_context(state)


def _parts(x: Tensor, count: int) -> Sequence[Tensor]:
    """Return equal parts of the rows; of one part no piece is cut, whose backward would copy its gradient."""
    return x.chunk(count) if count > 1 else (x,)
