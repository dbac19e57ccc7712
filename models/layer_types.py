"""Config fields of families in which some blocks see a window of tokens, which may have its own rotation."""

from typing import Any, ClassVar

from ..parallel_state import BadInput
from ..system import literal
from .base.keys import MOST_BLOCKS, Factor, Whole, key, names
from .base.rope_config import RopeScaling, read_scaling
from .llama import LlamaConfig

SLIDING, FULL = "sliding_attention", "full_attention"


class LayerTypesConfig(LlamaConfig):
    """Llama's fields, the window, and which blocks have it; ``sliding_window`` null: none has."""

    #: Unless ``layer_types`` says otherwise, every how many blocks one has no window.
    PATTERN: ClassVar[int] = 2
    READ: ClassVar[frozenset[str]] = names("sliding_window_pattern")

    sliding_window: Whole | None = 4096
    layer_types: tuple[str, ...] = ()

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        pattern, blocks = fields.get("sliding_window_pattern"), fields.get("num_hidden_layers")
        has_types = fields.get("layer_types") is not None
        if not has_types and isinstance(pattern, int) and isinstance(blocks, int) and pattern > 0:
            numbers = range(1, min(blocks, MOST_BLOCKS) + 1)
            fields["layer_types"] = tuple(SLIDING if number % pattern else FULL for number in numbers)
        return super().prepare(fields, where)

    def check_layer_types(self, layer_types: object, where: str) -> None:
        kinds, blocks = self.layer_types, self.num_hidden_layers
        fits = not kinds or (len(kinds) == blocks and set(kinds) <= {SLIDING, FULL})
        self.require(fits, where, "layer_types", f"{SLIDING} or {FULL} for each of {blocks} blocks", [*kinds])

    def kind(self, number: int) -> str:
        """Return transformers' name for the attention of block ``number``."""
        if self.layer_types:
            return self.layer_types[number]
        return SLIDING if (number + 1) % self.PATTERN else FULL

    def window(self, number: int) -> int | None:
        return self.sliding_window if self.kind(number) == SLIDING else None

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "layer_types": [*self.layer_types] or None}


class LayerRopesConfig(LayerTypesConfig):
    """List the fields of windows and of rotations.

    ``rope_theta`` and ``rope_scaling`` hold for blocks without a window, ``rope_local_base_freq`` and
    ``rope_local_scaling`` for blocks with one. Transformers 5 writes ``rope_parameters``, an object for each
    type of block. The older keys have no scaling under a window, so ``rope_local_scaling`` is no key.
    """

    #: The theta of blocks with a window, if nothing is stated; ``None``: ``rope_theta``.
    LOCAL_THETA: ClassVar[float | None] = None

    rope_local_base_freq: Factor
    rope_local_scaling: RopeScaling | None = key(f"rope_parameters.{SLIDING}", default=None)

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        ropes, local = fields.get("rope_parameters"), dict[str, Any]()
        if isinstance(ropes, dict):
            whole, local = (ropes.get(kind) or {} for kind in (FULL, SLIDING))
            if not (ropes.keys() <= {FULL, SLIDING} and isinstance(whole, dict) and isinstance(local, dict)):
                expected = f"an object each for {FULL} and {SLIDING}"
                raise BadInput(where, "rope_parameters", expected=expected, found=literal(ropes))
            fields = {**fields, "rope_parameters": whole or None}
        most = {"max_position_embeddings": fields.get("max_position_embeddings")}
        fields = super().prepare(fields, where)
        fields["rope_local_scaling"] = read_scaling(local, most, where, f"rope_parameters.{SLIDING}")
        both = fields.get("rope_local_base_freq"), local.get("rope_theta")
        thetas = [theta for theta in both if theta is not None]
        if len(thetas) == 2 and thetas[0] != thetas[1]:
            name, expected = f"rope_parameters.{SLIDING}.rope_theta", f"rope_local_base_freq={thetas[0]}"
            raise BadInput(where, name, expected=expected, found=thetas[1])
        theta = cls.LOCAL_THETA or fields.get("rope_theta") or cls.default("rope_theta")
        fields["rope_local_base_freq"] = thetas[0] if thetas else theta
        return fields

    def rotation(self, number: int) -> str | None:
        return self.kind(number)

    def to_hf(self) -> dict[str, Any]:
        """Return both forms: transformers 4 reads the keys, transformers 5 the object for each type."""
        config = super().to_hf()
        del config[self.spelled("rope_local_scaling")]
        default = {"rope_type": "default"}
        both = {
            kind: (scaling.model_dump(mode="json") if scaling else default) | {"rope_theta": theta}
            for kind, (theta, scaling) in self.by_type.items()
        }
        return {**config, "rope_parameters": both}

    @property
    def by_type(self) -> dict[str, tuple[float, RopeScaling | None]]:
        """Return theta and scaling by the names of the types of blocks."""
        window = self.rope_local_base_freq, self.rope_local_scaling
        return {FULL: (self.rope_theta, self.rope_scaling), SLIDING: window}
