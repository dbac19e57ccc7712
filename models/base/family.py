"""Define what a family offers to other rooms: its config, its model, and its table of Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import (
    KeyValueCache,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    bounded,
    routers,
)
from ...parallel_state import (
    BadInput,
    Declaration,
    Layout,
    ParallelState,
    alone_or,
    declarations,
    local,
    nearest_divisors,
)
from .config import ModelConfig
from .hugging_face_names import Link, Rule, expand
from .multi_token import multi_token_rules


class CausalLM(nn.Module):
    """Compute a decoder-only language model, or the stage of it that lives on this pipeline rank.

    ``forward(x)``: ``x`` is token ids (B, S) on the first stage, and the hidden states of the previous stage
    on the others. It returns hidden states, or on the last stage logits (B, S, padded vocabulary / tensor).
    ``positions``: (B, S), equal on every stage. Where they restart at 0 a new document starts, and no token
    sees another document's tokens. ``None``: each row is one document, 0 to S - 1.

    With ``head_in_loss`` the last stage returns normalised hidden states, and the loss uses ``head_weight``.
    With a ``cache`` the tokens follow the cached ones, positions are required, and the logits are those of
    the last token only: (B, 1, padded / tensor). With several context ranks, ids, hidden states and positions
    are this rank's chunks (``cut_sequence``), and S is their number of tokens. ``stage``: which of
    ``self.stage.parts`` to run, if this rank holds several.

    ``ahead``: (B, M, S), the ids that follow each token, for M blocks of multi-token prediction. The last
    stage then returns what predicts the next token, and after it along the batch what each block predicts.
    """

    #: What built the model; its checkpoints are this family's.
    family: Family
    config: ModelConfig
    stage: Stage
    state: ParallelState
    layers: nn.ModuleDict
    embed: VocabParallelEmbedding
    norm: nn.Module
    head: VocabParallelHead
    #: Blocks of multi-token prediction by their numbers, on the last stage, if the model has them.
    mtp: nn.ModuleDict
    head_in_loss = False
    #: What ``pipeline.Stages`` is told: the sample that is ``x`` on the first stage, and that each forward
    #: uses all parameters of its stage.
    first_input = "input_ids"
    trains_all = True

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Return logits on the last stage, hidden states on the others."""
        raise AssertionError("each family has its own")

    @property
    def entry(self) -> list[nn.Module]:
        """Return the modules before the first block."""
        raise AssertionError("each family has its own")

    @property
    def logit_cap(self) -> float | None:
        """Return the bound of the logits (see ``layers.bounded``), a number because the loss needs its
        derivative.
        """
        return None

    @property
    def rope_changes_at(self) -> set[int]:
        """Return the numbers of tokens above which all of a document's tokens are rotated otherwise."""
        return set()

    @property
    def logit_scale(self) -> float:
        """Return the factor of the logits, before their bound (Cohere, Granite)."""
        return 1.0

    def blocks_of(self, stage: Stage) -> Iterator[nn.Module]:
        """Yield the blocks of one stage, in order."""
        assert not stage.pieces, "of several stages one runs at a time: say which"
        return (self.layers[str(number)] for number in stage.blocks)

    def uses(self, stage: Stage) -> list[nn.Module]:
        """Return the modules that one stage of this rank computes with, but for those without parameters."""
        # A V's first rank also holds the last stage, which alone predicts further tokens.
        others = {"layers"} if stage.last else {"layers", "mtp"}
        ends = [module for name, module in self.named_children() if name not in others]
        return [*self.blocks_of(stage), *(ends if stage.first or stage.last else ())]

    def hidden_shape(self, tokens_BS: Tensor) -> tuple[int, int, int]:
        """Return the shape of the hidden states that a stage sends for these ids, on one rank."""
        rows, length = tokens_BS.shape
        pieces = self.state.tensor_size if self.state.sequence else 1
        return rows, length // pieces, self.config.hidden_size

    def numbered_blocks(self) -> dict[int, nn.Module]:
        """Return all blocks on this rank by their numbers, those of multi-token prediction among them."""
        found = {int(number): block for number, block in self.layers.items()}
        return found | {int(number): one.get_submodule("block") for number, one in self.mtp.items()}

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Compute the logits from normalised hidden states; with ``head_in_loss`` stop before the output
        layer.
        """
        if self.logit_scale != 1:  # here, so that a loss that computes the logits needs no other rule
            x_BSD = x_BSD * self.logit_scale
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
        """Return this rank's rows of the output layer, (padded / tensor, D); the gradient flows to the
        parameter.
        """
        return local(self.embed.weight if self.config.tie_word_embeddings else self.head.weight)

    @property
    def head_bias(self) -> Tensor | None:
        """Return this rank's part of the output layer's bias, (padded / tensor,), if it has one."""
        bias = None if self.config.tie_word_embeddings else self.head.bias
        return None if bias is None else local(bias)


@dataclass(frozen=True)
class Family:
    """Describe one architecture; ``model_type`` and ``architecture`` are Hugging Face's names."""

    model_type: str
    architecture: str
    config: type[ModelConfig]
    model: type[CausalLM]
    rules: Sequence[Rule]
    #: HF tensors that may exist and are not parameters (buffers of old versions): patterns with ``{i}``.
    ignorable: tuple[str, ...] = ()
    #: Prefix of Hugging Face names, with ``{i}``, in the blocks that a config counts as ``further_blocks``
    #: (such as GLM-4.5's multi-token prediction); their tensors are not read.
    further: str = ""
    #: HF's name of a tied output layer, if a checkpoint stores it as well.
    tied_head: str = "lm_head.weight"
    #: The module in which transformers holds a block's stacks of experts, if it has some.
    experts_module: str = "model.layers.{i}.mlp.experts"
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
        """Return the model, or this rank's stage of it, on ``device`` (meta: without memory).

        Raises ``BadInput`` for a layout that cannot cut it.
        """
        layout = alone_or(state).layout
        self.check_layout(config, layout)
        with making(dtype, device):
            model = self.model(config, split=split, state=state)
        model.family = self
        return model

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse axes that do not divide what they cut; building a layer may refuse more."""
        config.check_layout(layout)
        if layout.expert > 1:
            _check_experts(self.on_meta(config), layout)

    def on_meta(self, config: ModelConfig) -> CausalLM:
        """Return the whole model of one device, without memory. It is shared: leave it as it is."""
        return self.stages_on_meta(config)[0]

    def stages_on_meta(
        self, config: ModelConfig, layout: Layout | None = None, *, split: Sequence[int] | None = None
    ) -> list[CausalLM]:
        """Return the model of each stage's first rank, without memory; needs no process group. Shared."""
        return _stages_on_meta(self, config, layout or Layout(), None if split is None else tuple(split))

    def declarations(
        self, config: ModelConfig, layout: Layout | None = None, *, split: Sequence[int] | None = None
    ) -> list[dict[str, Declaration]]:
        """Return the declarations of each pipeline stage."""
        return _declarations(self, config, layout or Layout(), None if split is None else tuple(split))

    def declared(self, model: nn.Module) -> dict[str, Declaration]:
        """Return the declarations of a model or stage that are this family's to load, save and exchange."""
        return declarations(model)

    def links(self, config: ModelConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
        """Return the links between trilith's and Hugging Face's tensors, and the shapes of Hugging Face's
        tensors.
        """
        (stated,) = self.declarations(config)
        shapes = {name: declaration.shape for name, declaration in stated.items()}
        further = multi_token_rules(self.rules, tied=config.tie_word_embeddings)
        return expand(
            *(self.rules, shapes, config.num_hidden_layers, config),
            further=further,
            further_blocks=config.mtp_blocks,
        )

    def links_of_all(self, config: ModelConfig) -> list[Link]:
        """Return the links of every tensor that the built model holds."""
        return self.links(config)[0]

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Return a config.json for a model that did not come from Hugging Face."""
        return {"model_type": self.model_type, "architectures": [self.architecture], **config.to_hf()}

    def from_hf(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Return the config of this family from the dict of a config.json."""
        return self.config.from_hf(raw, where)


def _check_experts(whole: CausalLM, layout: Layout) -> None:
    """Refuse an expert axis that does not divide the experts of a model, or a model that has none."""
    experts = gcd(*(router.num_experts for _, router in routers(whole)))
    if not experts or experts % layout.expert:
        both = gcd(experts, layout.expert_pool) if experts else 1
        raise BadInput(
            "layout",
            "expert",
            expected=f"a divisor of {experts} experts" if experts else "1: this model has no experts",
            found=layout.expert,
            todo=nearest_divisors("expert", both, layout.expert),
        )


@contextmanager
def making(dtype: torch.dtype, device: str | torch.device) -> Iterator[None]:
    """Within the block, tensors are made in ``dtype`` on ``device`` where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@lru_cache(maxsize=16)
def _stages_on_meta(
    family: Family, config: ModelConfig, layout: Layout, split: tuple[int, ...] | None
) -> list[CausalLM]:
    states = (ParallelState.stand_in(layout, layout.first_rank(stage)) for stage in range(layout.pipeline))
    return [family.build(config, split=split, state=state) for state in states]


@lru_cache(maxsize=64)
def _declarations(
    family: Family, config: ModelConfig, layout: Layout, split: tuple[int, ...] | None
) -> list[dict[str, Declaration]]:
    return [family.declared(model) for model in _stages_on_meta(family, config, layout, split)]
