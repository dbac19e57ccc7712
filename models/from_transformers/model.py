"""Define the model that transformers' code computes in our layout, or a pipeline stage of it, and its family:
all of it follows from transformers' config.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from inspect import signature
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...layers import AttentionInputs, KeyValueCache, PinnedBackend, Stage
from ...parallel_state import OWN, BadInput, Layout, ParallelState, Piece, alone_or, declarations, initialize
from ..base.causal_lm import CausalLM
from ..base.config import ModelConfig
from ..base.family import Family
from ..base.hugging_face_names import Link
from .attention import carrier, of_whole_rows
from .config import AXES, AdoptedConfig, adopted_types, first_place, proved, refusals
from .cut import Cutter
from .files import file_links, left_out, module_pieces
from .layers import StageEnd, StandIn, around_blocks, without_sequence
from .probe import UNSEEN, on_meta, probed


class Adopted(CausalLM):
    """Run transformers' code of a model type; its modules and parameters keep their names.

    ``forward`` is that of ``CausalLM``. Embedding, output layer and linears are ours, cut over the tensor
    ranks; attention is ours where the family has proved that it is the model's (``probe``).
    """

    in_pieces = False
    rotary: dict[str, Any]
    #: transformers' model, whose modules are also this one's.
    hf: Any
    blocks: nn.ModuleList

    def __init__(
        self, cfg: AdoptedConfig, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> None:
        nn.Module.__init__(self)
        target = torch.empty(0).device
        self.config, self.state = cfg, alone_or(state)
        self.stage = Stage.of(cfg.num_hidden_layers, split=split, state=state)
        self.whole = without_sequence(self.state)
        self.shown = shown = probed(cfg)
        hf = on_meta(cfg, ours=self.can_cache)
        with torch.device("meta"):
            self.fused = Cutter(hf, cfg, shown, self.stage, state).fused
        blocks = hf.get_submodule(shown.blocks) if shown.blocks else nn.ModuleList()
        self.__dict__.update(hf=hf, blocks=blocks)  # whose modules are this one's, under their names
        outside = around_blocks(hf, shown).keys() - shown.exit if self.stage.first else ()
        self.before_blocks = sorted(path for path in outside if not shown.blocks.startswith(f"{path}."))
        self.rotary, self.attentions, self.mtp = {}, (), nn.ModuleDict()
        for name, child in hf.named_children():
            self.add_module(name, child)
        if target.type != "meta":
            self.to_empty(device=target)
            for parameter in self.parameters():  # such as start from weights alone
                parameter.detach().fill_(float("nan") if parameter.is_floating_point() else -1)
            drawn = {name for name, declaration in declarations(self).items() if declaration.initial != OWN}
            initialize(self, int(torch.randint(2**62, (), device="cpu")), among=drawn, state=self.state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        device = next((parameter.device for parameter in self.parameters()), None)
        for module in self.modules():  # buffers that no file holds
            for name, numbers in vars(module).get("constants", {}).items():
                module._buffers[name] = numbers.to(device or numbers.device)
        return self

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        stage, self.hf.training = stage or self.stage, self.training
        assert ahead is None, "no multi-token prediction"
        named: dict[str, Any] = {"use_cache": False}
        length = x.shape[1] * (1 if stage.first or not self.state.sequence else self.state.tensor.size)
        like = x.new_empty((len(x), length, 0), dtype=torch.float32)
        inputs = AttentionInputs(positions, cache, like=like, state=self.whole)
        if self.can_cache:
            named["attention_mask"] = carrier(inputs, len(x))
        elif cache is not None or inputs.documents is not None:
            what = "one document a row" if cache is None else "no cache of keys"
            kind, why = self.config.model_type, self.shown.no_context
            raise BadInput(kind, "positions", expected=what, found="others", todo=why)
        if "position_ids" in signature(self.hf.forward).parameters:
            named["position_ids"] = torch.atleast_2d(inputs.places) + first_place(self.hf.config)
        if stage.first:
            named["input_ids"] = x
        else:
            # The first own block is given x in the place of what the model makes of these.
            width = self.hf.get_input_embeddings().embedding_dim
            named["inputs_embeds"] = x.new_zeros(len(x), length, width)
        with ExitStack() as places:
            if not self.can_cache:
                places.enter_context(of_whole_rows())
            for modules, stand_ins in [*self._stand_ins(stage, x)]:
                places.enter_context(patch.dict(modules, stand_ins))
            try:
                logits: Tensor = self.hf(**named).logits
            except StageEnd as end:
                hidden: Tensor = end.args[0]
                return hidden
        return logits if cache is None else logits[:, -1:]

    def _stand_ins(self, stage: Stage, x: Tensor) -> Iterator[tuple[dict[str, Any], dict[str, nn.Module]]]:
        """Yield what stands in the places of modules while one stage runs on ``x``, by their parents' own."""
        before, after = stage.blocks[0] - 1, stage.blocks[-1] + 1
        yield self.blocks._modules, {
            str(number): StandIn(
                block, outputs=self.shown.outputs,
                received=x if number == before else None, ends=number == after,
            )
            for number, block in enumerate(self.blocks)
            if number in (before, after, *self.stage.blocks) and number not in stage.blocks
        }  # fmt: skip
        for path in () if stage.first else self.before_blocks:  # as on ranks that lack the first stage
            parent, _, name = path.rpartition(".")
            yield self.hf.get_submodule(parent)._modules, {name: StandIn(self.hf.get_submodule(path))}

    def check_attention(self, backend: PinnedBackend) -> None:
        if backend != "auto" and not self.can_cache:
            kind, why = self.config.model_type, self.shown.no_context
            raise BadInput(kind, "attention_backend", expected="auto", found=backend, todo=why)

    def pin_attention(self, backend: PinnedBackend) -> None:
        self.check_attention(backend)
        for module in self.modules():
            vars(module)["trilith_backend"] = backend

    @property
    def can_cache(self) -> bool:
        return not self.shown.no_context

    @property
    def layers(self) -> dict[str, nn.Module]:  # type: ignore[override]  # read-only: the blocks are hf's
        """Return this rank's blocks by their numbers."""
        places = self.blocks._modules
        return {str(number): places[str(number)] for number in self.stage.blocks if str(number) in places}

    @property
    def head_name(self) -> str:
        weight = self.hf.get_output_embeddings().weight
        return next(name for name, parameter in self.named_parameters() if parameter is weight)

    def uses(self, stage: Stage) -> list[nn.Module]:
        inner = {module for block in self.layers.values() for module in block.modules()}
        ends = [module for module in self.modules() if module not in inner and [*module.parameters(False)]]
        return [*self.blocks_of(stage), *(ends if stage.first or stage.last else ())]


@dataclass(frozen=True)
class TransformersFamily(Family):
    """Be the family of a type whose blocks transformers computes."""

    #: Whether to take axes that no test has proved for the type.
    trusted: bool = False
    adopted: bool = True

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse axes that the model cannot be cut over, or that no test has proved, each with the reason."""
        assert isinstance(config, AdoptedConfig)
        config.check_layout(layout)
        probe, unproved = probed(config), {} if self.trusted else refusals(self.model_type)
        reasons = {"pipeline": probe.no_pipeline, "context": probe.no_context, "expert": AXES["expert"]}
        reasons["sequence"] = probe.no_context or probe.no_pipeline
        if probe.unseen and not self.trusted and not unproved.get("pipeline", "").startswith(UNSEEN):
            reasons["tensor"] = probe.unseen  # where proofs have seen which gradients are a rank's part
        for axis in AXES:
            size, alone = getattr(layout, axis), getattr(Layout(), axis)
            why = reasons.get(axis) or unproved.get(axis)
            if size != alone and why:
                expected = f"{alone} for {self.model_type}".lower()
                raise BadInput("layout", axis, expected=expected, found=size, todo=why)
        if layout.tensor > 1:  # here, where parameters have their whole names
            for name, declaration in self.declarations(config)[0].items():
                declaration.check(layout, name)

    def from_hf(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Return the config; ``BadInput`` for a type that tests have shown not to be transformers' own, and
        for a transformers that is older than the one that they have proved types with.
        """
        kind, needed, installed = self.model_type, proved()["transformers"], version("transformers")
        have, least = ([*map(int, re.findall(r"\d+", text)[:2])] for text in (installed, needed))
        if have < least:
            expected, todo = f"at least {needed} for {kind}", "pip install -U transformers"
            raise BadInput("transformers", "version", expected=expected, found=installed, todo=todo)
        if not self.trusted and (why := refusals(kind).get("")):
            expected = "a type whose model can be trained as it is in transformers"
            raise BadInput(where, "model_type", expected=expected, found=kind, todo=why)
        return super().from_hf(raw, where)

    def links(self, config: ModelConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
        return file_links(self, config)

    def module_pieces(self, config: ModelConfig) -> dict[str, list[Piece[str]]]:
        assert isinstance(config, AdoptedConfig)
        return module_pieces(self, config)

    def left_out(self, config: ModelConfig, names: Collection[str]) -> set[str]:
        assert isinstance(config, AdoptedConfig)
        return left_out(config, names) if names else set()


@lru_cache
def family_of_type(kind: str) -> Family | None:
    """Return the family of a type that transformers has a model of that makes text, else ``None``."""
    architecture = adopted_types().get(kind)
    return TransformersFamily(kind, architecture, AdoptedConfig, Adopted, ()) if architecture else None
