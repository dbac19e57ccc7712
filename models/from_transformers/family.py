"""Define the family of a model type that the zoo lacks: all of it follows from transformers' config."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...parallel_state import BadInput, Box, Layout, Piece
from ..base.config import ModelConfig
from ..base.family import Family, making
from ..base.hugging_face_names import Link, shapes_of
from .config import AdoptedConfig, adopted_types
from .files import file_links
from .meta import on_meta
from .model import Adopted
from .probe import probed
from .proved import AXES, NO_EXPERTS, check_version, why_not, why_refused


@dataclass(frozen=True)
class TransformersFamily(Family):
    """Be the family of a type whose blocks transformers computes."""

    #: Whether to take axes that no test has proved for the type.
    trusted: bool = False

    @property
    def adopted(self) -> bool:
        """Tell yes."""
        return True

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse axes that the model cannot be cut over, or that no test has proved, each with the reason."""
        assert isinstance(config, AdoptedConfig)
        config.check_layout(layout)
        shown, sizes = probed(config), {axis: getattr(layout, axis) for axis in AXES}
        reasons = {
            "pipeline": shown.no_pipeline,
            "context": shown.no_context,
            "expert": NO_EXPERTS,
            "sequence": shown.no_context or shown.no_pipeline,
        }
        for axis, size in sizes.items():
            if int(size) <= (axis != "sequence"):
                continue
            why = reasons.get(axis, "") or ("" if self.trusted else why_not(self.model_type, axis))
            if why:
                expected = f"{'false' if axis == 'sequence' else 1} for {self.model_type}"
                raise BadInput("layout", axis, expected=expected, found=size, todo=why)

    def from_hf(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Return the config; ``BadInput`` for a type that tests have shown not to be transformers' own."""
        check_version(self.model_type)
        if not self.trusted and (why := why_refused(self.model_type)):
            expected = "a type whose model can be trained as it is in transformers"
            raise BadInput(where, "model_type", expected=expected, found=self.model_type, todo=why)
        return super().from_hf(raw, where)

    def links(self, config: ModelConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
        """Return the links between trilith's tensors and those of files, and the shapes of the latter."""
        links = _file_links(self, config)
        return links, shapes_of(links)

    def held_links(self, config: ModelConfig) -> list[Link]:
        """Return the links between trilith's tensors and those of transformers' modules."""
        model: Any = self.on_meta(config)
        (stated,) = self.declarations(config)
        links: list[Link] = []
        tied = getattr(model.hf, "all_tied_weights_keys", None) or {}
        for name, declaration in stated.items():
            hf, dim, number = model.fused.get(name, (tied.get(name, name), 0, 0))
            start = (number * size if axis == dim else 0 for axis, size in enumerate(declaration.shape))
            links.append(Link(name, Piece.plain(Box.whole(declaration.shape), hf, tuple(start))))
        return links


@lru_cache(maxsize=16)
def _file_links(family: TransformersFamily, config: AdoptedConfig) -> list[Link]:
    """Return the links to the tensors of files, the embedding's first."""
    with making(torch.bfloat16, "cpu"):
        model = on_meta(config, attention=None)
    links = file_links(model, family.held_links(config), family.model_type)
    embedding = model.get_input_embeddings().weight
    first = next(name for name, parameter in model.named_parameters() if parameter is embedding)
    return sorted(links, key=lambda link: link.ours != first)


@lru_cache
def family_of_type(kind: str) -> Family | None:
    """Return the family of a type that transformers has a model of that makes text, else ``None``."""
    architecture = adopted_types().get(kind)
    if architecture is None:
        return None
    return TransformersFamily(kind, architecture, AdoptedConfig, Adopted, ())
