"""Define the sections of a recipe about the update: the optimizer, its groups, spikes, the loss's scale."""

from typing import Literal

from pydantic import Field, field_validator

from .section import Betas, Section


class ParameterGroup(Section):
    """Set options for the parameters whose name matches; the first group that matches applies."""

    match: str = Field(min_length=1)
    """regular expression to search for in a parameter's Hugging Face name and in its name here"""
    lr_scale: float = Field(default=1.0, ge=0)
    """factor of the learning rate of these parameters"""
    weight_decay: float | None = Field(default=None, ge=0)
    """weight decay of these parameters, vectors included; default: optimizer.weight_decay, for matrices
    only"""
    freeze: bool = False
    """leave these parameters as they are: no gradient, no moments"""


class SpikeSection(Section):
    """Skip steps whose loss or gradient norm is far above that of recent steps."""

    deviations: float = Field(default=6.0, gt=0)
    """number of standard deviations above the mean of recent steps from which a step is skipped"""
    window: int = Field(default=128, ge=4, le=2**20)
    """number of recent steps to compare with; nothing is skipped before half of them were taken"""


class LossScaleSection(Section):
    """Set the factor of the loss under float16, against underflow; all factors are powers of two."""

    initial: float = Field(default=2.0**16, gt=0, le=2.0**64)
    """factor at the first step"""
    growth_interval: int = Field(default=2000, ge=0)
    """number of steps without overflow after which the factor doubles; 0: never"""
    minimum: float = Field(default=1.0, gt=0)
    """smallest factor; an overflow at this factor stops the run"""
    maximum: float = Field(default=2.0**24, gt=0, le=2.0**64)
    """largest factor"""


class OptimizerSection(Section):
    """Set AdamW and its learning-rate schedule."""

    lr: float = Field(default=3e-4, gt=0)
    """peak learning rate"""
    betas: Betas = (0.9, 0.95)
    """AdamW's beta 1 and beta 2"""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon"""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's weight decay of matrices; biases and norms have none"""
    clip: float = Field(default=1.0, ge=0)
    """largest global gradient norm; larger ones are scaled to it; 0 or "none": no clipping"""
    schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = "cosine"
    """shape of the learning-rate schedule after the warm-up"""
    warmup: int = Field(default=0, ge=0)
    """number of steps in which the learning rate rises linearly to lr"""
    minimum_ratio: float = Field(default=0.1, ge=0, le=1)
    """last learning rate as a share of lr; not used by constant"""
    decay: int | None = Field(default=None, ge=1)
    """number of steps of the wsd schedule's final decay; default: a tenth of the run"""
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    """shape of the wsd schedule's final decay"""
    scale_lr: Literal["sqrt", "linear"] | None = None
    """how lr grows with data.global_batch / reference_batch; default: it does not"""
    reference_batch: int | None = Field(default=None, ge=1)
    """global batch size for which lr was tuned"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """label smoothing: share of the target that is spread over the vocabulary"""
    z_loss: float = Field(default=0.0, ge=0)
    """factor of the squared log-sum-exp of a token's logits, which is added to its loss and keeps the logits
    small; PaLM: 1e-4"""
    groups: tuple[ParameterGroup, ...] = Field(default=(), strict=False)
    """groups of parameters with another learning rate or weight decay, or frozen"""
    skip_spikes: SpikeSection | None = None
    """skip steps whose loss or gradient norm leaps; {} for the defaults"""

    @field_validator("clip", mode="before")
    @classmethod
    def _none_is_zero(cls, value: object) -> object:
        return 0.0 if value == "none" else value
