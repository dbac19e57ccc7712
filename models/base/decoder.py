"""Define the part that all decoders share: the modules of a pipeline stage, and a batch's way through them.

B batch  S sequence  D hidden
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import (
    AttentionInputs,
    KeyValueCache,
    RotaryEmbedding,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    attention_kinds,
)
from ...parallel_state import Normal, ParallelState, alone_or
from .blocks import Block
from .family import CausalLM
from .multi_token import MultiTokenPrediction


class Decoder(CausalLM):
    """Stack blocks between an embedding and a norm with an output layer; or hold this rank's stage of that.

    A family defines its ``block`` and overrides the other methods where it differs from Llama.
    """

    def __init__(
        self, cfg: Any, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        self.config, self.state = cfg, alone_or(state)
        self.stage = stage = Stage.of(cfg.num_hidden_layers, split=split, state=state)
        tied = cfg.tie_word_embeddings
        shared = tied or cfg.mtp_blocks > 0  # both ends of a pipeline use the embedding
        if stage.first or (stage.last and shared):
            ends = shared and not (stage.first and stage.last)
            self.embed = VocabParallelEmbedding(
                cfg.vocab_size, cfg.embedding_width, ends=ends, initial=self.initial, state=state
            )
        if stage.first:
            self.add_entry()
        self.rotary: dict[str, RotaryEmbedding] = {**self.make_rotary()}
        self.layers = nn.ModuleDict({str(number): self.block(number) for number in stage.blocks})
        further = cfg.mtp_numbers if stage.last else ()
        self.mtp = nn.ModuleDict({str(number): self.prediction(number) for number in further})
        #: One attention layer of each kind, for what is made once a forward.
        self.attentions = attention_kinds(self.layers)
        if stage.last:
            self.norm = self.make_last_norm()
            if not tied:
                self.head = VocabParallelHead(
                    cfg.embedding_width,
                    cfg.vocab_size,
                    bias=self.biased_head,
                    initial=self.initial,
                    state=state,
                )

    @property
    def rope_changes_at(self) -> set[int]:
        return {one.by_length for one in self.rotary.values() if one.by_length is not None}

    @property
    def initial(self) -> Normal:
        return Normal(self.config.initializer_range)

    #: Whether the output layer has a bias (GPT-J, Phi).
    biased_head = False

    def block(self, number: int) -> Block:
        """Make the block of this number, which counts from 0 over the whole model."""
        raise AssertionError("each family has its own")

    def prediction(self, number: int) -> MultiTokenPrediction:
        """Make the block of multi-token prediction of this number, which counts on after the last block."""
        return MultiTokenPrediction(
            self.config.hidden_size,
            self.block(number),
            norm=self.make_norm,
            initial=self.initial,
            state=self.state,
        )

    def make_norm(self) -> nn.Module:
        """Make a norm over the hidden states."""
        raise AssertionError("each family has its own")

    def make_last_norm(self) -> nn.Module:
        """Make what comes between the last block and the output layer."""
        return self.make_norm()

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        """Make the rotations, by the names that attention layers ask for."""
        return {}

    def add_entry(self) -> None:
        """Add the modules that ``enter`` uses; the first stage alone has them."""

    def enter(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        """Change the embedded tokens before the first block: learned positions, a scale, dropout."""
        return x_BSD

    @property
    def entry(self) -> list[nn.Module]:
        """Return the modules before the first block: the embedding and those that ``add_entry`` made."""
        others = ("rotary", "layers", "norm", "head", "mtp")
        return [module for name, module in self.named_children() if name not in others]

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        stage = stage or self.stage
        x_BSD = self.enter(self.embed(x), positions) if stage.first else x
        inputs = AttentionInputs(
            positions,
            cache,
            like=x_BSD,
            layers=self.attentions,
            rotary=self.rotary,
            state=self.state,
        )
        for block in self.blocks_of(stage):
            x_BSD = block(x_BSD, inputs)
        if not stage.last:
            return x_BSD
        x_BSD = self.norm(inputs.last_wanted(x_BSD))
        return self.logits(x_BSD if ahead is None else self.with_further(x_BSD, ahead, inputs))

    def with_further(self, x_BSD: Tensor, ahead_BMS: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return hidden states and, after them along the batch, those that predict one token further, two
        tokens further, and so on.
        """
        found = [x_BSD]
        for one, ids_BS in zip(self.mtp.values(), ahead_BMS.unbind(1), strict=True):
            x_BSD, normed_BSD = one(x_BSD, self.embed(ids_BS), inputs)
            found.append(normed_BSD)
        return torch.cat(found)
