"""Rotary settings of a config.json: rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""

from collections.abc import Mapping
from math import inf
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer

from ...parallel_state import BadInput, from_validation
from ...system import literal

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
Kind = Literal["linear", "llama3", "yarn", "longrope", "dynamic", "proportional"]

_LISTS = ("short_factor", "long_factor")
_STRETCHED = ("factor", "original_max_position_embeddings")
#: The fields that a type needs, and those that it may have.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": _STRETCHED,
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": _STRETCHED,
    "longrope": (*_STRETCHED, *_LISTS),
    "proportional": ("factor", "partial_rotary_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    "longrope": ("attention_factor",),
}
#: Older names of types.
_ALIASES = {"su": "longrope"}


class RopeScaling(BaseModel):
    """State how positions are stretched beyond those of pretraining; see ``layers.rope``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    rope_type: Kind
    factor: float = Field(gt=0)
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    beta_fast: float | None = Field(default=None, gt=0)
    beta_slow: float | None = Field(default=None, gt=0)
    mscale: float | None = Field(default=None, ge=0)
    mscale_all_dim: float | None = Field(default=None, ge=0)
    attention_factor: float | None = Field(default=None, gt=0)
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)

    @model_serializer(mode="wrap")
    def _stated(self, handler: Any) -> dict[str, Any]:
        return {key: entry for key, entry in handler(self).items() if entry is not None}


def read_rope(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read ``rope_theta`` and ``rope_scaling`` from either form; refuse unknown types and contradictions."""
    forms = []
    for key in ("rope_scaling", "rope_parameters"):
        section = raw.get(key)
        if section is not None and not isinstance(section, dict):
            raise BadInput(where, key, expected="an object or null", found=literal(section))
        if section is not None or (key == "rope_scaling" and "rope_theta" in raw):
            theta = (section or {}).get("rope_theta", raw.get("rope_theta"))
            forms.append((theta, read_scaling(section or {}, raw, where, key)))
    # A theta or scaling that the old form omits contradicts nothing.
    if len(forms) == 2 and any(old not in (None, new) for old, new in zip(*forms, strict=True)):
        expected = f"what rope_theta and rope_scaling say: {_said(*forms[0])}"
        raise BadInput(where, "rope_parameters", expected=expected, found=_said(*forms[1]))
    if not forms:
        return {}
    theta, scaling = forms[-1]
    fields: dict[str, Any] = {"rope_scaling": scaling}
    if theta is not None:
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise BadInput(where, "rope_theta", expected="a number above 0", found=literal(theta))
        fields["rope_theta"] = float(theta)
    return fields


def check_factors(scaling: RopeScaling | None, pairs: int, where: str, name: str) -> None:
    """Refuse lists of factors (longrope) that have not one for each of the ``pairs`` that are rotated."""
    for key in _LISTS:
        factors = getattr(scaling, key, None)
        if factors is not None and len(factors) != pairs:
            expected = f"{pairs} numbers, one for each pair that is rotated"
            raise BadInput(where, f"{name}.{key}", expected=expected, found=len(factors))


def without_share(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in table.items() if key != "partial_rotary_factor"}


def take_share(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], object]:
    """Take the share of each head that is rotated out of a config; transformers 5 has it among the
    ``rope_parameters``. Returns the config without it, and the share or ``None``.
    """
    rest, share = without_share(raw), raw.get("partial_rotary_factor")
    for key in ("rope_scaling", "rope_parameters"):
        inner = raw.get(key)
        if isinstance(inner, dict) and inner.get("rope_type") == "proportional":
            # Its share is of the pairs that turn, in an encoding of the whole head.
            if share is not None:
                expected, name = "absent beside a proportional rope", "partial_rotary_factor"
                raise BadInput(where, name, expected=expected, found=literal(share))
        elif isinstance(inner, dict) and "partial_rotary_factor" in inner:
            rest[key], inner_share = without_share(inner), inner["partial_rotary_factor"]
            if share is not None and inner_share != share:
                name = f"{key}.partial_rotary_factor"
                raise BadInput(
                    where, name, expected=f"{literal(share)}, as elsewhere", found=literal(inner_share)
                )
            share = inner_share
    return rest, share


def _said(theta: object, scaling: RopeScaling | None) -> str:
    return f"theta {theta}, {scaling.model_dump() if scaling else 'no scaling'}"


def read_scaling(
    section: Mapping[str, Any], raw: Mapping[str, Any], where: str, key: str
) -> RopeScaling | None:
    """Read one object of rotary settings; ``raw`` is the config around it, ``key`` its name there."""
    kind = section.get("rope_type", section.get("type"))
    if kind == "default" and section.get("type") == "linear" and section.get("factor") == 1:
        return None  # what transformers 5 makes of Gemma 3's first configs
    if section.get("type", kind) != kind:
        expected, other = f"{literal(kind)}, as rope_type says", literal(section["type"])
        raise BadInput(where, f"{key}.type", expected=expected, found=other)
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    keys = {"rope_type", "type", "rope_theta", *_NEEDED["llama3"]}
    if isinstance(kind, str):
        keys |= {*_NEEDED.get(kind, ()), *_OPTIONAL.get(kind, ())}
    for name in sorted(set(section) - keys):
        expected = "absent: it changes the rotation and is not supported"
        raise BadInput(where, f"{key}.{name}", expected=expected, found=literal(section[name]))
    if kind == "default" or (kind is None and set(section) <= {"rope_theta"}):
        return None
    if kind not in get_args(Kind):
        expected = f"default, {', '.join(get_args(Kind))}"
        raise BadInput(where, f"{key}.rope_type", expected=expected, found=literal(kind))
    fields = _with_lengths({**section}, raw, kind)
    for name in _NEEDED[kind]:
        value: Any = fields.get(name)
        listed, whole = name in _LISTS, name == "original_max_position_embeddings"
        if listed:
            fits, expected = isinstance(value, list | tuple) and bool(value), "a list of numbers"
        else:
            is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            fits, expected = is_number and 0 < value < inf, f"a {'whole ' * whole}number above 0"
        if not fits:
            raise BadInput(where, f"{key}.{name}", expected=expected, found=literal(value))
        fields[name] = tuple(value) if listed else value
    if kind == "llama3" and not fields["low_freq_factor"] < fields["high_freq_factor"]:
        expected = f"less than high_freq_factor={section['high_freq_factor']}"
        raise BadInput(where, f"{key}.low_freq_factor", expected=expected, found=section["low_freq_factor"])
    names = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    try:
        return RopeScaling.model_validate({"rope_type": kind, **{name: fields.get(name) for name in names}})
    except ValidationError as error:
        raise from_validation(where, error, spelled=lambda name: f"{key}.{name}") from None


def _with_lengths(fields: dict[str, Any], raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Fill in the length of pretraining and the factor where the config around them says them."""
    most: Any = raw.get("max_position_embeddings")
    if kind == "proportional":
        fields = {"factor": 1.0, "partial_rotary_factor": 1.0} | fields
    if kind == "dynamic":  # as transformers has it, whatever is stated
        fields["original_max_position_embeddings"] = most
    elif kind in ("yarn", "longrope"):
        original_length: Any = raw.get(
            "original_max_position_embeddings", fields.get("original_max_position_embeddings")
        )
        original: Any = most if original_length is None else original_length
        fields["original_max_position_embeddings"] = original
        lengths = isinstance(most, int) and isinstance(original, int) and original > 0
        if fields.get("factor") is None and lengths:
            fields["factor"] = most / original
    return fields
