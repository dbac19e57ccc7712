"""Define config fields for families whose blocks with a window have another rotation than the other
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import RotaryEmbedding
from ..parallel_state import BadInput
from .base.config import names, without
from .base.rope_config import RopeScaling, read_scaling, write_scaling
from .layer_types import FULL, SLIDING, LayerTypesConfig


class LayerRopesConfig(LayerTypesConfig):
    """List the fields of windows and of rotations.

    ``rope_theta`` and ``rope_scaling`` hold for blocks without a window, ``rope_local_base_freq`` and
    ``rope_local_scaling`` for blocks with one. Transformers 5 writes ``rope_parameters``, an object for each
    type of block. The older keys have no scaling under a window, so ``rope_local_scaling`` is no key.
    """

    #: The theta of blocks with a window, if nothing is stated; ``None``: ``rope_theta``.
    LOCAL_THETA: ClassVar[float | None] = None
    OWN_NAMES: ClassVar[Mapping[str, str]] = {f"rope_parameters.{SLIDING}": "rope_local_scaling"}
    NOT_KEYS: ClassVar[frozenset[str]] = names("rope_local_scaling")

    rope_local_base_freq: float = Field(gt=0)
    rope_local_scaling: RopeScaling | None = None

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
            local = window
        fields = super().read(raw, where)
        most = {"max_position_embeddings": raw.get("max_position_embeddings")}
        fields["rope_local_scaling"] = read_scaling(local, most, where, f"rope_parameters.{SLIDING}")
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
        said = without(super().to_hf(), "rope_local_scaling")
        both = {
            kind: (write_scaling(scaling) or {"rope_type": "default"}) | {"rope_theta": theta}
            for kind, (theta, scaling) in self.by_type.items()
        }
        return {**said, "rope_parameters": both}

    @property
    def scalings(self) -> dict[str, RopeScaling | None]:
        return {f"rope_parameters.{kind}": scaling for kind, (_, scaling) in self.by_type.items()}

    @property
    def by_type(self) -> dict[str, tuple[float, RopeScaling | None]]:
        """Return theta and scaling by the names of the types of blocks."""
        window = self.rope_local_base_freq, self.rope_local_scaling
        return {FULL: (self.rope_theta, self.rope_scaling), SLIDING: window}

    def rotations(self) -> dict[str, RotaryEmbedding]:
        """Make both rotations, by the names of the types of blocks."""
        return {
            kind: RotaryEmbedding(self.rotary_dim, theta, scaling.model_dump() if scaling else None)
            for kind, (theta, scaling) in self.by_type.items()
        }
