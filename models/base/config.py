"""Define what families' configs share: Hugging Face's names, strict types, refusal of unsupported fields."""

import math
import warnings
from collections.abc import Mapping
from inspect import get_annotations
from types import NoneType
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...layers import ACTIVATIONS, RotaryEmbedding
from ...parallel_state import (
    BadInput,
    Layout,
    Normal,
    from_validation,
    nearest_divisors,
    nearest_multiples,
    refuse_layout,
)
from ...system import literal, visible
from .keys import DENIED, INERT, LARGEST_NUMBER, MOST_BLOCKS, Count, Fixed, Whole, Width, check_file

#: What to do about a value that transformers' code may compute, and the family's own does not.
OTHER_WAY = "If transformers computes it, so does `trilith convert --implementation transformers`"


class ModelConfig(BaseModel):
    """List the fields of a config.json that a family computes with, under transformers' common names.

    A null in a file is a value where the field's type has ``None``, and elsewhere as if it were absent.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        defer_build=True,  # of some fifty classes a command needs one
    )

    #: Keys that the family has no choice in, and the values that say what it does anyway. Any other value is
    #: refused. A class that has such a key as a field takes it off the list of those that it inherits from.
    FIXED: ClassVar[Fixed] = {}
    #: Keys that ``prepare`` and ``check`` read besides those of fields; those of parents count, too.
    READ: ClassVar[frozenset[str]] = frozenset()
    #: Whether ``to_hf`` says that no token pads: a vocabulary may lack transformers' default, or use it.
    UNPADDED: ClassVar[bool] = False

    #: Whether a loss may compute the logits itself, in chunks.
    head_is_last: ClassVar[bool] = True

    # Of these each class makes its own, from what it and its parents state.
    #: The keys of each field, and the field of each key that has another name.
    KEYS: ClassVar[Mapping[str, list[str]]] = {}
    OWN_NAMES: ClassVar[Mapping[str, str]] = {}
    #: All keys without a choice. They are no fields of the config, even where a parent has one.
    HARMLESS: ClassVar[Fixed] = {}
    #: Fields whose names are no keys of the family's config.json.
    NOT_KEYS: ClassVar[frozenset[str]] = frozenset()

    vocab_size: Count
    hidden_size: Annotated[int, Field(gt=0, le=2**20)]
    intermediate_size: Width
    num_hidden_layers: Annotated[int, Field(gt=0, le=2**12)]
    num_attention_heads: Annotated[int, Field(gt=0, le=2**16)]
    max_position_embeddings: Whole
    tie_word_embeddings: bool = False
    initializer_range: float = Field(default=0.02, ge=0, le=10)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        keys: dict[str, list[str]] = {}
        fixed: dict[str, tuple[object, ...]] = {}
        for base in reversed(cls.__mro__):
            if not issubclass(base, ModelConfig):
                continue
            for name in (name for name in get_annotations(base) if name in base.model_fields):
                extra = base.model_fields[name].json_schema_extra
                own: Any = extra["keys"] if isinstance(extra, dict) else keys.get(name, [name])
                keys[name] = own
                for spelling in (name, *keys[name]):
                    fixed.pop(spelling, None)
            fixed |= base.__dict__.get("FIXED", {})
        cls.KEYS, cls.HARMLESS = keys, fixed
        cls.OWN_NAMES = {key: name for name, own in keys.items() for key in own if key != name}
        cls.NOT_KEYS = frozenset(name for name, own in keys.items() if name not in own)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the dict of a config.json. Raises ``BadInput`` with the key, the value expected and the value
        found.

        An unknown key gives a warning only, unless it is known to change the forward pass.
        """
        check_file(raw, where)
        raw = cls._without_unread(raw)
        repeated = {key: raw[key] for key in sorted(cls.NOT_KEYS & raw.keys())}
        for key in sorted(cls.HARMLESS.keys() & raw.keys() - repeated.keys()):
            value, legal = raw[key], cls.HARMLESS[key]
            if value is not None and not any(type(value) is type(x) and value == x for x in legal):
                expected = f"{' or '.join(map(literal, legal)) or 'absent'}: this family has no other"
                raise BadInput(where, key, expected=expected, found=literal(value), todo=OTHER_WAY)
        raw = {key: raw[key] for key in raw if key not in cls.HARMLESS and key not in repeated}
        fields = cls._values(cls.prepare(cls._by_field(raw, where), where), where)
        for key in cls.unknown_keys(raw):
            if key not in DENIED:
                unknown = f"{visible(key[:80])}={literal(raw[key])}"
                warnings.warn(f"{where}: {unknown} is unknown and ignored", stacklevel=2)
            elif raw[key] not in (None, False, [], {}):
                expected = "absent: it changes the model and is not supported"
                raise BadInput(where, key, expected=expected, found=literal(raw[key]))
        for key, value in fields.items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise BadInput(where, cls.spelled(key), expected="a finite number", found=value)
            if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
                expected, actual = f"at most {LARGEST_NUMBER}", f"{value:.3e}"
                raise BadInput(where, cls.spelled(key), expected=expected, found=actual)
        try:
            config = cls(**fields)
        except ValidationError as error:
            raise from_validation(where, error, spelled=lambda key: cls.spelled(key or "config")) from None
        for key, value in repeated.items():
            config._check_repeated(key, value, where)
        config.check_count(where)
        config.check(raw, where)
        return config

    @classmethod
    def _by_field(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return what the dict says under the names of our fields, and what is no field's as it is."""
        fields: dict[str, Any] = {}
        for key, value in raw.items():
            name = cls.OWN_NAMES.get(key, key)
            earlier = fields.get(name)
            if earlier is not None and value is not None and earlier != value:
                expected = f"{literal(earlier)}, as {name} has under its other name"
                raise BadInput(where, key, expected=expected, found=literal(value))
            fields[name] = earlier if value is None else value
        return fields

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the values of fields from those of a file; a family extends it if its files' form differs.

        ``fields`` has every key of the file that is no field's as well, and every null.
        """
        return fields

    @classmethod
    def _values(cls, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return what stands for a field: no null but where its type has ``None``, and no list.

        ``BadInput`` for a null that is no default of ours, because transformers takes it for false.
        """
        values = {}
        for name, field in cls.model_fields.items():
            value = fields.get(name)
            if name in fields and value is None and field.default is True:
                todo = "Write which: transformers takes null for false, and a file without the key for true"
                raise BadInput(where, cls.spelled(name), expected="true or false", found="null", todo=todo)
            if isinstance(value, list) and get_origin(field.annotation) is tuple:
                value = tuple(value)
            if value is not None or (name in fields and NoneType in get_args(field.annotation)):
                values[name] = value
        return values

    @classmethod
    def default(cls, name: str) -> Any:
        """Return what a field is where nothing states it; ``None`` if it must be stated."""
        field = cls.model_fields[name]
        return None if field.is_required() else field.default

    def _check_repeated(self, key: str, value: object, where: str) -> None:
        """Refuse a key that is not read and says something else than the family's own key."""
        current = getattr(self, key)
        if value is not None and value != current:
            expected = f"absent or {literal(current)}, as {self.spelled(key)} says"
            todo = f"transformers does not read this key: state it as {self.spelled(key)}"
            raise BadInput(where, key, expected=expected, found=literal(value), todo=todo)

    def check_count(self, where: str) -> None:
        """Refuse more blocks than could be listed."""
        fits = self.num_hidden_layers <= MOST_BLOCKS
        self.require(fits, where, "num_hidden_layers", f"at most {MOST_BLOCKS}")

    @classmethod
    def read_keys(cls) -> set[str]:
        """Return the keys that ``prepare`` and ``check`` use in addition to those of the fields."""
        return {key for base in cls.__mro__ for key in base.__dict__.get("READ", ())}

    @classmethod
    def unknown_keys(cls, raw: Mapping[str, Any]) -> list[str]:
        """Return the keys that the family neither reads nor knows to have no effect."""
        read = {*cls.model_fields, *cls.OWN_NAMES, *cls.HARMLESS, *cls.read_keys()}
        return sorted(raw.keys() - read - INERT)

    @classmethod
    def spelled(cls, name: str) -> str:
        """Return the name of a field in this family's config.json."""
        return cls.KEYS.get(name, [name])[0]

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        """Refuse numbers that do not fit together, and keys of the config.json that are not true of this
        model.
        """
        act = getattr(self, "hidden_act", "relu")
        self.require(act in ACTIVATIONS, where, "hidden_act", f"one of {', '.join(ACTIVATIONS)}")

    def require(self, holds: object, where: str, key: str, expected: str, found: object = ...) -> None:
        """Refuse the value of a field, or what was ``found`` under another key, unless ``holds``."""
        if not holds:
            value = getattr(self, key) if found is ... else found
            shown = value if isinstance(value, int | float) else literal(value)
            raise BadInput(where, self.spelled(key), expected=expected, found=shown)

    def window(self, number: int) -> int | None:
        """Return how many tokens a token of block ``number`` sees; ``None``: all before it."""
        window: int | None = getattr(self, "sliding_window", None)
        return window

    def has_experts(self, number: int) -> bool:
        """Tell whether block ``number`` has experts, or one net."""
        return False

    def rotation(self, number: int) -> str | None:
        """Return the name of the rotation in block ``number``, if its heads are rotated."""
        return None

    def rotations(self) -> dict[str, RotaryEmbedding]:
        """Make the rotations, by the names that attention layers ask for."""
        return {}

    @property
    def initial(self) -> Normal:
        """Return how the weights of matrices start."""
        return Normal(self.initializer_range)

    @property
    def embedding_width(self) -> int:
        """Return how many numbers the embedding of a token has, and the output layer takes."""
        return self.hidden_size

    @property
    def further_blocks(self) -> int:
        """Return the number of blocks that a checkpoint may hold after the last one and that are not
        modelled here.
        """
        return 0

    @property
    def mtp_blocks(self) -> int:
        """Return the number of blocks after the last one that the model has, to predict further tokens."""
        return 0

    @property
    def mtp_numbers(self) -> range:
        """Return the numbers of these blocks."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.mtp_blocks)

    @property
    def tensor_units(self) -> dict[str, int]:
        """Return the numbers that the tensor axis must divide, by names for users."""
        return {
            self.spelled("num_attention_heads"): self.num_attention_heads,
            self.spelled("intermediate_size"): self.intermediate_size,
        }

    def check_layout(self, layout: Layout) -> None:
        """Refuse axes that do not divide what they cut, naming the nearest that do."""
        units = self.tensor_units
        common = math.gcd(*units.values())
        for key, number in units.items():
            if number % layout.tensor:
                others = nearest_multiples(f"{key} on tensor={layout.tensor}", layout.tensor, number)
                todo = f"{nearest_divisors('tensor', common, layout.tensor)}. {others}"
                refuse_layout("tensor", f"a divisor of {key}={number}", layout.tensor, todo)
        layout.check_blocks(self.num_hidden_layers)

    @classmethod
    def _without_unread(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out what means nothing in a config by ``to_hf``, which at first wrote every field."""
        if not set(cls.model_fields) <= set(raw):
            return raw
        unread = {key for key in cls.HARMLESS if key in cls.model_fields and raw[key] is False}
        return {key: value for key, value in raw.items() if key not in unread}

    def to_hf(self) -> dict[str, Any]:
        """Return the dict of a config.json for a model that did not come from Hugging Face."""
        values = self.model_dump(mode="json").items()
        config = {self.spelled(key): value for key, value in values if key not in self.HARMLESS}
        return config | ({"pad_token_id": None} if self.UNPADDED else {})
