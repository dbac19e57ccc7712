"""Compute the loss of the next token, and of multi-token prediction, from what a language model gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.batch import Batch, tokens_ahead
from ..layers import chunked_cross_entropy, valid_tokens, vocab_parallel_cross_entropy
from ..parallel_state import require
from .loss import Loss, Scales, Sums, Term
from .samples import Samples

if TYPE_CHECKING:
    from ..models import CausalLM


@dataclass(frozen=True)
class TokenLoss(Loss):
    """Compute the mean over the valid labels of a step; ``prepare`` takes a ``Batch``.

    ``mtp``: factor of the mean loss of the model's blocks of multi-token prediction, which the reported loss
    does not contain. With ``model.head_in_loss`` the logits are made here, ``chunk`` tokens at a time;
    ``sums`` and ``compiled`` are those of ``chunked_cross_entropy``.
    """

    model: CausalLM
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mtp: float = 0.0
    chunk: int = 0
    sums: torch.dtype | None = None
    compiled: bool = False
    #: Whether the blocks of multi-token prediction run.
    runs_mtp: bool = True

    sequence = MappingProxyType({"input_ids": 1, "labels": 1, "positions": 1, "ahead": 2, "ahead_labels": 2})

    @property
    def blocks(self) -> int:
        """Return the number of blocks of multi-token prediction that run."""
        return self.model.config.mtp_blocks if self.runs_mtp else 0

    @cached_property
    def terms(self) -> Mapping[str, Term]:
        terms = {"next_token": Term()}
        return terms | {"mtp": Term(self.mtp / self.blocks, in_total=False)} if self.blocks else terms

    def prepare(self, batch: Batch) -> Samples:
        require(isinstance(batch, Batch), "batch", None, "a Batch", type(batch).__name__)
        length = batch.check_form().input_ids.shape[1]
        self.model.state.layout.check_length(length, "recipe", "sequence_length")
        samples = batch.check_ids(self.model.config.vocab_size).samples()
        if self.blocks:  # from whole rows: what comes may lie in another context rank's chunk
            ahead, labels = tokens_ahead(batch, self.blocks).unbind(1)
            samples |= {"ahead": ahead.contiguous(), "ahead_labels": labels.contiguous()}
        return samples

    def count(self, samples: Samples) -> Mapping[str, Tensor | float]:
        return self.count_labels(valid_tokens(samples["labels"]))

    def count_labels(self, labels: Tensor | float) -> Mapping[str, Tensor | float]:
        return dict.fromkeys(self.terms, labels)

    def __call__(self, output: Tensor, samples: Samples, scales: Scales) -> Sums:
        labels, scale_of_each = [samples["labels"]], [scales["next_token"]]
        if self.blocks:
            labels += samples["ahead_labels"].unbind(1)
            scale_of_each += [scales["mtp"]] * self.blocks
        next_token, *mtp = self._scaled_sums(output, labels, scale_of_each)
        return Sums({"next_token": next_token} | ({"mtp": torch.stack(mtp).sum()} if mtp else {}))

    def for_evaluation(self) -> TokenLoss:
        return replace(self, label_smoothing=0.0, z_loss=0.0, runs_mtp=False)

    def _scaled_sums(
        self, output: Tensor, labels: Sequence[Tensor], scales: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return a sum times its scale for each equal part of the output's rows, equal on the tensor ranks.

        ``output``: logits, which a backward overwrites, or with ``head_in_loss`` hidden states.
        """
        model, parts = self.model, len(labels)
        common: dict[str, Any] = {
            "label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "compiled": self.compiled,
            "state": model.state,
        }  # fmt: skip
        if model.head_in_loss:
            return [
                chunked_cross_entropy(
                    hidden,
                    model.head_weight,
                    labels_BS,
                    model.config.vocab_size,
                    chunk=self.chunk,
                    bias=model.head_bias,
                    logit_cap=model.logit_cap,
                    scale=scale,
                    sums=self.sums,
                    **common,
                )
                for hidden, labels_BS, scale in zip(_parts(output, parts), labels, scales, strict=True)
            ]
        # All parts at once: autograd would take each part of the logits as overwritten by the others.
        losses = vocab_parallel_cross_entropy(
            output,
            torch.cat([*labels]) if parts > 1 else labels[0],
            model.config.vocab_size,
            overwrite=True,
            **common,
        )
        return [
            part.sum() * scale.to(part.dtype)
            for part, scale in zip(_parts(losses, parts), scales, strict=True)
        ]


def _parts(x: Tensor, count: int) -> Sequence[Tensor]:
    """Return equal parts of the rows; of one part no piece is cut, whose backward would copy its gradient."""
    return x.chunk(count) if count > 1 else (x,)
