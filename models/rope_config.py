"""Rotary settings of a config.json: rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..parallel_state import BadInput

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RopeScaling(BaseModel):
    """How positions are stretched beyond those of pretraining; see ``layers.rotary``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        forms.append((raw.get("rope_theta"), _scaling(old or {}, where, "rope_scaling")))
    if new is not None:
        forms.append((new.get("rope_theta", raw.get("rope_theta")), _scaling(new, where, "rope_parameters")))
    if len(forms) == 2 and _differ(forms[0], forms[1]):
        expected = f"what rope_theta and rope_scaling say: {forms[0]}"
        raise BadInput(where, "rope_parameters", expected=expected, found=forms[1])
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


def _scaling(found: Mapping[str, Any], where: str, key: str) -> RopeScaling | None:
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise BadInput(where, f"{key}.rope_type", expected="default, linear or llama3", found=repr(kind))
    wanted = ("factor", *_LLAMA3) if kind == "llama3" else ("factor",)
    for name in wanted:
        value = found.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise BadInput(where, f"{key}.{name}", expected="a number above 0", found=repr(value))
    return RopeScaling(rope_type=kind, **{name: found[name] for name in wanted})
