"""Define the family of a model type that the zoo lacks: all of it follows from transformers' config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...parallel_state import BadInput, Box, Layout
from ..base.config import ModelConfig
from ..base.family import Family, making
from ..base.hugging_face_names import Link
from .config import AdoptedConfig
from .files import file_links
from .meta import on_meta
from .model import Adopted
from .probe import probed


@dataclass(frozen=True)
class TransformersFamily(Family):
    """Be the family of a type whose blocks transformers computes."""

    #: Whether to take axes that no test has proved for the type.
    trusted: bool = False

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse axes that the model cannot be cut over, each with the reason."""
        assert isinstance(config, AdoptedConfig)
        config.check_layout(layout)
        shown = probed(config)
        reasons = {
            "pipeline": (layout.pipeline, shown.no_pipeline),
            "context": (layout.context, shown.no_context),
            "expert": (layout.expert, "the experts of adopted models are not spread over ranks"),
            "sequence": (1 + layout.sequence, "not built for adopted models"),
        }
        for axis, (size, why) in reasons.items():
            if size > 1 and why:
                found = size if axis != "sequence" else True
                raise BadInput("layout", axis, expected=f"1 for {self.model_type}", found=found, todo=why)

    def links(self, config: ModelConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
        """Return the links between trilith's tensors and those of files, and the shapes of the latter."""
        links = _file_links(self, config)
        shapes: dict[str, tuple[int, ...]] = {}
        for link in links:
            known = shapes.get(link.hf, (0,) * len(link.hf_box.stop))
            shapes[link.hf] = tuple(map(max, known, link.hf_box.stop))
        return links, shapes

    def held_links(self, config: ModelConfig) -> list[Link]:
        """Return the links between trilith's tensors and those of transformers' modules."""
        model = self.on_meta(config)
        (stated,) = self.declarations(config)
        links: list[Link] = []
        part_of = {ours: hf for hf, (parts, _) in model.fused.items() for ours in parts}
        for name, declaration in stated.items():
            whole, hf = Box.whole(declaration.shape), part_of.get(name, name)
            start = [0] * len(declaration.shape)
            if hf != name:
                parts, dim = model.fused[hf]
                before = parts[: parts.index(name)]
                start[dim] = sum(stated[part].shape[dim] for part in before)
            links.append(Link(name, whole, hf, whole.shift(tuple(start))))
        return links


@lru_cache(maxsize=16)
def _file_links(family: TransformersFamily, config: AdoptedConfig) -> list[Link]:
    """Return the links to the tensors of files, the embedding's first."""
    with making(torch.bfloat16, "cpu"):
        made = on_meta(config, attention=None)
    links = file_links(made.model, family.held_links(config), family.model_type)
    embedding = made.model.get_input_embeddings().weight
    first = next(name for name, parameter in made.model.named_parameters() if parameter is embedding)
    return sorted(links, key=lambda link: link.ours != first)


@lru_cache
def adopted_types() -> dict[str, str]:
    """Return the causal types of the installed transformers, and the class of each."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in named.items()}


@lru_cache
def family_of_type(kind: str) -> Family | None:
    """Return the family of a type that transformers has a causal model of, else ``None``."""
    architecture = adopted_types().get(kind)
    if architecture is None:
        return None
    return TransformersFamily(kind, architecture, AdoptedConfig, Adopted, ())
