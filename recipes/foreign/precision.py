"""Translate mixed precision and the scale of the loss, which several trainers configure alike."""

import math

from ..optimizer_sections import LossScaleSection
from .translation import ForeignConfig, RecipeDraft


def half_dtype(config: ForeignConfig, key: str, *, fp16: bool, bf16: bool) -> str | None:
    """Return the data type that mixed precision computes in, if it is on; refuse ``key`` if both are."""
    if fp16 and bf16:
        raise config.bad(key, "fp16 or bf16", "both")
    return "float16" if fp16 else "bfloat16" if bf16 else None


def set_compute(draft: RecipeDraft, dtype: str) -> None:
    """Set the data type of forward and backward."""
    draft.set("compute", dtype, "weights and moments stay in float32")


def set_loss_scale(config: ForeignConfig, draft: RecipeDraft, initial: float, *, static: bool) -> None:
    """Set the loss scale from its first value and from the keys that DeepSpeed and Megatron share."""
    scale = _power_of_two(initial)
    if scale != initial:
        key = config.path("loss_scale" if static else "initial_loss_scale")
        draft.miss(key, initial, "not a power of two; the nearest below is taken")
    draft.set("loss_scale.initial", scale)
    if static:
        draft.set("loss_scale.growth_interval", 0, "a fixed scale; here it still halves at an overflow")
    else:
        draft.set("loss_scale.growth_interval", config.whole("loss_scale_window", 1000))
    draft.set("loss_scale.minimum", min(_power_of_two(config.number("min_loss_scale", 1.0) or 1.0), scale))
    if scale > LossScaleSection().maximum:
        draft.set("loss_scale.maximum", scale)
    if (hysteresis := config.whole("hysteresis", 2)) != 1 and not static:
        draft.miss(config.path("hysteresis"), hysteresis, "the scale halves at the first overflow")


def _power_of_two(scale: float) -> float:
    return 2.0 ** math.floor(math.log2(scale))
