"""The config fields of Llama's relatives whose blocks with a window are rotated otherwise than the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import RotaryEmbedding
from ..parallel_state import BadInput
from .base.rope_config import read_rope
from .layer_types import FULL, SLIDING, LayerTypesConfig


class LayerRopesConfig(LayerTypesConfig):
    """The fields of window and rotation: ``rope_theta`` and ``rope_scaling`` are those of blocks without a
    window, ``rope_local_base_freq`` is the theta of the others, which have no scaling.

    Transformers 5 writes both as ``rope_parameters``, an object for each type of block.
    """

    #: The theta of blocks with a window, if nothing is stated; ``None``: ``rope_theta``.
    LOCAL_THETA: ClassVar[float | None] = None

    rope_local_base_freq: float = Field(gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        given = raw.get("rope_parameters")
        local: Mapping[str, Any] = {}
        if isinstance(given, dict):
            whole, window = (given.get(kind) or {} for kind in (FULL, SLIDING))
            others = set(given) - {FULL, SLIDING}
            if others or not isinstance(window, dict) or not isinstance(whole, dict):
                expected = f"an object each for {FULL} and {SLIDING}"
                raise BadInput(where, "rope_parameters", expected=expected, found=repr(given)[:80])
            raw = {**raw, "rope_parameters": whole or None}
            local = read_rope({"rope_parameters": window}, where)
        fields = super().read(raw, where)
        if local.get("rope_scaling") is not None:
            expected = "'default': only blocks without a window stretch their positions"
            found = repr(local["rope_scaling"].rope_type)
            raise BadInput(where, f"rope_parameters.{SLIDING}.rope_type", expected=expected, found=found)
        both = raw.get("rope_local_base_freq"), local.get("rope_theta")
        stated = [one for one in both if one is not None]
        if len(stated) == 2 and stated[0] != stated[1]:
            name, expected = f"rope_parameters.{SLIDING}.rope_theta", f"rope_local_base_freq={stated[0]}"
            raise BadInput(where, name, expected=expected, found=stated[1])
        default = cls.LOCAL_THETA or fields.get("rope_theta", cls.model_fields["rope_theta"].default)
        fields["rope_local_base_freq"] = stated[0] if stated else default
        return fields

    def to_hf(self) -> dict[str, Any]:
        """Return both forms: transformers 4 reads the keys, transformers 5 the object for each type."""
        said = super().to_hf()
        scaling = {"rope_type": "default"} if said["rope_scaling"] is None else {**said["rope_scaling"]}
        whole = scaling | {"rope_theta": self.rope_theta}
        window = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
        return {**said, "rope_parameters": {FULL: whole, SLIDING: window}}

    def rotations(self) -> dict[str, RotaryEmbedding]:
        """Make both rotations, by the names of the types of blocks."""
        scaling = self.rope_scaling.model_dump() if self.rope_scaling else None
        return {
            FULL: RotaryEmbedding(self.rotary_dim, self.rope_theta, scaling),
            SLIDING: RotaryEmbedding(self.rotary_dim, self.rope_local_base_freq),
        }
