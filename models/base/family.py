"""What a family offers to the rooms above: its config, its model, its table of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import KeyValueCache, Stage, VocabParallelEmbedding, VocabParallelHead, bounded
from ...parallel_state import Declaration, Layout, ParallelState, alone_or, declarations, local
from .config import ModelConfig
from .names import Link, Rule, expand


class CausalLM(nn.Module):
    """A decoder-only language model, or the stage of it that lives on this pipeline rank.

    ``forward(x)``: token ids (B, S) on the first stage, hidden states from the stage before on the others;
    gives hidden states, or on the last stage logits (B, S, padded vocabulary / tensor). ``positions`` (B, S),
    alike on every stage: where they restart at 0 a new document starts, and no token sees another document's.
    ``None``: each row is one document, 0 to S - 1. With ``head_in_loss`` the last stage gives normalised
    hidden states, and the loss takes ``head_weight``. With a ``cache`` the tokens follow those that it holds,
    their positions must be given, and the logits are the last token's alone: (B, 1, padded / tensor). Over
    several context ranks ids, hidden states and positions are this rank's chunks (``cut_sequence``), S their
    tokens. ``stage``: which one of ``self.stage.parts`` runs, where this rank holds several.
    """

    config: ModelConfig
    stage: Stage
    state: ParallelState
    layers: nn.ModuleDict
    embed: VocabParallelEmbedding
    norm: nn.Module
    head: VocabParallelHead
    head_in_loss = False

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
    ) -> Tensor:
        raise AssertionError("each family has its own")

    @property
    def logit_cap(self) -> float | None:
        """The bound of the logits, see ``layers.bounded``; a number, since the loss needs its derivative."""
        return None

    def blocks_of(self, stage: Stage) -> Iterator[nn.Module]:
        """The blocks of one stage, in order."""
        assert not stage.pieces, "of several stages one runs at a time: say which"
        return (self.layers[str(number)] for number in stage.blocks)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """From the last block to the logits, or as far as ``head_in_loss`` wants it."""
        x_BSD = self.norm(x_BSD)
        if self.head_in_loss:
            if torch.is_grad_enabled() and not x_BSD.requires_grad:
                # Nothing before the head is trained. FSDP waits for a gradient of what the model gives, and
                # without one would never sum the head's over the data ranks.
                x_BSD = x_BSD.detach().requires_grad_()
            return x_BSD
        logits: Tensor = self.embed.project(x_BSD) if self.config.tie_word_embeddings else self.head(x_BSD)
        return logits if self.logit_cap is None else bounded(logits, self.logit_cap)

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the output layer, (padded / tensor, D); the gradient flows to the parameter."""
        return local(self.embed.weight if self.config.tie_word_embeddings else self.head.weight)


@dataclass(frozen=True)
class Family:
    """One architecture. ``model_type`` and ``architecture`` are Hugging Face's names."""

    model_type: str
    architecture: str
    config: type[ModelConfig]
    model: type[CausalLM]
    rules: Sequence[Rule]
    #: HF tensors that may be there and are not parameters (buffers of old versions): pattern with ``{i}``.
    ignorable: tuple[str, ...] = ()
    #: What precedes the names in blocks that a config counts as ``further_blocks``, with ``{i}``.
    further: str = ""
    #: Where HF also stores a tied output layer, if a checkpoint repeats it.
    tied_head: str = "lm_head.weight"
    #: Checkpoints of the bare model lack it (the first GPT-2's do); what we write has it.
    optional_prefix: str = ""

    def build(
        self,
        config: ModelConfig,
        *,
        split: Sequence[int] | None = None,
        state: ParallelState | None = None,
        device: str | torch.device = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> CausalLM:
        """The model, or this rank's stage of it, on ``device`` (meta: no memory).

        Raises ``BadInput`` for a layout that cannot cut it.
        """
        config.check_layout(alone_or(state).layout)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return self.model(config, split=split, state=state)
        finally:
            torch.set_default_dtype(before)

    def declarations(
        self, config: ModelConfig, layout: Layout | None = None, *, split: Sequence[int] | None = None
    ) -> list[dict[str, Declaration]]:
        """The declarations of each pipeline stage, from models on the meta device; no process group."""
        return _declarations(self, config, layout or Layout(), None if split is None else tuple(split))

    def links(self, config: ModelConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
        """Ties between our tensors and HF's, and the shapes of HF's tensors."""
        (stated,) = self.declarations(config)
        shapes = {name: declaration.shape for name, declaration in stated.items()}
        return expand(self.rules, shapes, config.num_hidden_layers)

    def links_of_all(self, config: ModelConfig) -> list[Link]:
        """Ties of every tensor that the built model holds."""
        return self.links(config)[0]

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """A config.json for a model that was born here."""
        return {"model_type": self.model_type, "architectures": [self.architecture], **config.to_hf()}

    def from_hf(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        return self.config.from_hf(raw, where)


@cache
def _declarations(
    family: Family, config: ModelConfig, layout: Layout, split: tuple[int, ...] | None
) -> list[dict[str, Declaration]]:
    states = [ParallelState.stand_in(layout, layout.first_rank(stage)) for stage in range(layout.pipeline)]
    return [declarations(family.build(config, split=split, state=state)) for state in states]
