"""Rotary settings of a config.json: rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...parallel_state import BadInput

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_KNOWN = {"rope_type", "type", "rope_theta", "factor"}
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RopeScaling(BaseModel):
    """State how positions are stretched beyond those of pretraining; see ``layers.rotary``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    rope_type: Literal["linear", "llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    original_max_position_embeddings: int | None = Field(default=None, gt=0)


def read_rope(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` from either form; refuses forms that disagree and unknown types."""
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise BadInput(where, key, expected="an object or null", found=repr(value)[:80])
    forms = []
    if old is not None or "rope_theta" in raw:
        theta = (old or {}).get("rope_theta", raw.get("rope_theta"))
        forms.append((theta, _scaling(old or {}, where, "rope_scaling")))
    if new is not None:
        forms.append((new.get("rope_theta", raw.get("rope_theta")), _scaling(new, where, "rope_parameters")))
    if len(forms) == 2 and _differ(forms[0], forms[1]):
        expected = f"what rope_theta and rope_scaling say: {_said(*forms[0])}"
        raise BadInput(where, "rope_parameters", expected=expected, found=_said(*forms[1]))
    if not forms:
        return {}
    theta, scaling = forms[-1]
    fields: dict[str, Any] = {"rope_scaling": scaling}
    if theta is not None:
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise BadInput(where, "rope_theta", expected="a number above 0", found=repr(theta))
        fields["rope_theta"] = float(theta)
    return fields


def write_rope(fields: dict[str, Any], scaling: RopeScaling | None) -> dict[str, Any]:
    """The form that both transformers 4 and 5 read: ``rope_theta`` beside ``rope_scaling``."""
    return {**fields, "rope_scaling": scaling.model_dump(exclude_none=True) if scaling else None}


def _differ(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    """A theta or scaling that the old form leaves out is no contradiction."""
    return (old[0] is not None and old[0] != new[0]) or (old[1] is not None and old[1] != new[1])


def _said(theta: object, scaling: RopeScaling | None) -> str:
    return f"theta {theta}, {scaling.model_dump(exclude_none=True) if scaling else 'no scaling'}"


def _scaling(found: Mapping[str, Any], where: str, key: str) -> RopeScaling | None:
    kind = found.get("rope_type", found.get("type"))
    if "type" in found and found["type"] != kind:
        raise BadInput(
            where, f"{key}.type", expected=f"{kind!r}, as rope_type says", found=repr(found["type"])
        )
    for name in sorted(set(found) - _KNOWN - set(_LLAMA3)):
        expected = "absent: it changes the rotation and is not supported"
        raise BadInput(where, f"{key}.{name}", expected=expected, found=repr(found[name])[:80])
    if kind == "default" or (kind is None and set(found) <= {"rope_theta"}):
        return None
    if kind not in ("linear", "llama3"):
        raise BadInput(where, f"{key}.rope_type", expected="default, linear or llama3", found=repr(kind))
    wanted = ("factor", *_LLAMA3) if kind == "llama3" else ("factor",)
    for name in wanted:
        value = found.get(name)
        kinds = int if name == "original_max_position_embeddings" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < float("inf"):
            expected = "a whole number above 0" if kinds is int else "a number above 0"
            raise BadInput(where, f"{key}.{name}", expected=expected, found=repr(value))
    if kind == "llama3" and not found["low_freq_factor"] < found["high_freq_factor"]:
        expected = f"less than high_freq_factor={found['high_freq_factor']}"
        raise BadInput(where, f"{key}.low_freq_factor", expected=expected, found=found["low_freq_factor"])
    return RopeScaling(rope_type=kind, **{name: found[name] for name in wanted})
