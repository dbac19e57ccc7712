"""Compare what a foreign checkpoint states about its model with the config that the user gives."""

from __future__ import annotations

import math
from pathlib import Path

from ...models import ModelConfig
from ...parallel_state import BadInput
from .checkpoint import ForeignCheckpoint

#: Relative difference of two numbers that are the same in fp32.
_SAME = 1e-6


def check_stated(checkpoint: ForeignCheckpoint, config: ModelConfig, where: Path) -> None:
    """Refuse a config that disagrees with a fact in the checkpoint; the message names both places.

    A fact about an attribute that this family's config does not have is not compared. A checkpoint that
    states nothing gets a line for the user: names and shapes alone do not show, for example, a wrong number
    of heads.
    """
    if not checkpoint.stated:
        checkpoint.skipped.append(
            "it states nothing about the model, so only names and shapes are compared with the config: "
            "a wrong number of attention heads, for example, is not noticed"
        )
    for name, stated in checkpoint.stated.items():
        if not hasattr(config, name):
            continue
        ours = getattr(config, name)
        if name == "rope_scaling" and not isinstance(stated.value, bool):
            ours = "no scaling" if ours is None else (ours.rope_type, ours.factor)
        if not _same(stated.value, ours):
            raise BadInput(
                where,
                name,
                expected=f"{stated.text}, as {stated.where} says",
                found=ours,
                todo="The config is of another model than the checkpoint",
            )


def _same(a: object, b: object) -> bool:
    if isinstance(a, range | frozenset):
        return b in a
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool):  # something is there or not, such as a scaled rope
        return a == bool(b)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=_SAME)
    return a == b
