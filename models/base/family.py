"""Define what a family offers to other rooms: its config, its model, and its table of Hugging Face names."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from torch import nn

from ...layers import routers
from ...parallel_state import (
    Declaration,
    Layout,
    ParallelState,
    Piece,
    alone_or,
    declarations,
    nearest_divisors,
    refuse_layout,
)
from .causal_lm import CausalLM
from .config import ModelConfig
from .hugging_face_names import Link, Rule, expand
from .names import multi_token_rules


@dataclass(frozen=True)
class Family:
    """Describe one architecture; ``model_type`` and ``architecture`` are Hugging Face's names."""

    model_type: str
    architecture: str
    config: type[ModelConfig]
    model: type[CausalLM]
    rules: Sequence[Rule]
    #: HF tensors of old files that are not parameters (masks), beside those of any family: with ``{i}``.
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
    #: Whether transformers' code computes the models: no block of them is called by itself.
    adopted: bool = False

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

    def untrained(self, config: ModelConfig) -> frozenset[str]:
        """Return the names of parameters that are kept as they are, such as those of an image encoder beside
        a decoder: they have no moments.
        """
        parameters = self.on_meta(config).named_parameters()
        return frozenset(name for name, parameter in parameters if not parameter.requires_grad)

    def links(self, config: ModelConfig) -> tuple[Sequence[Link], Mapping[str, tuple[int, ...]]]:
        """Return the links between trilith's and Hugging Face's tensors, and the shapes of Hugging Face's
        tensors: the embedding first, which a tied output layer repeats. Both are shared: leave them as they
        are.
        """
        return _links(self, config)

    def links_of_all(self, config: ModelConfig) -> Sequence[Link]:
        """Return the links of every tensor that the built model holds."""
        return self.links(config)[0]

    def module_pieces(self, config: ModelConfig) -> dict[str, list[Piece[str]]]:
        """Return where files with other names, those of transformers' modules, hold each tensor: nowhere."""
        return {}

    def left_out(self, config: ModelConfig, names: Collection[str]) -> set[str]:
        """Return those of these names of no parameter in files that transformers does not read either: of
        blocks that predict further tokens.
        """
        first, count = config.num_hidden_layers, config.further_blocks if self.further else 0
        prefixes = tuple(self.further.format(i=number) for number in range(first, first + count))
        return {name for name in names if name.startswith(prefixes)}

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
        expected = f"a divisor of {experts} experts" if experts else "1: this model has no experts"
        refuse_layout("expert", expected, layout.expert, nearest_divisors("expert", both, layout.expert))


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


@lru_cache(maxsize=16)
def _links(family: Family, config: ModelConfig) -> tuple[Sequence[Link], Mapping[str, tuple[int, ...]]]:
    (declared,) = family.declarations(config)
    shapes = {name: declaration.shape for name, declaration in declared.items()}
    further = multi_token_rules(family.rules, tied=config.tie_word_embeddings)
    return expand(
        *(family.rules, shapes, config.num_hidden_layers, config),
        further=further,
        further_blocks=config.mtp_blocks,
    )
