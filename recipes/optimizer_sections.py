"""Define the sections of a recipe about the update: the optimizer, its groups, spikes, the loss's scale."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from .section import Betas, Section


class ParameterGroup(Section):
    """Set options for the parameters whose name matches; the first group that matches applies."""

    match: str = Field(
        min_length=1,
        description="regular expression to search for in a parameter's Hugging Face name and in its name "
        "here",
    )
    lr_scale: float = Field(default=1.0, ge=0, description="factor of the learning rate of these parameters")
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="weight decay of these parameters, vectors included; default: optimizer.weight_decay, "
        "for matrices only",
    )
    freeze: bool = Field(
        default=False, description="leave these parameters as they are: no gradient, no moments"
    )


class SpikeSection(Section):
    """Skip steps whose loss or gradient norm is far above that of recent steps."""

    deviations: float = Field(
        default=6.0,
        gt=0,
        description="number of standard deviations above the mean of recent steps from which a step is "
        "skipped",
    )
    window: int = Field(
        default=128,
        ge=4,
        le=2**20,
        description="number of recent steps to compare with; nothing is skipped before half of them were "
        "taken",
    )


class LossScaleSection(Section):
    """Set the factor of the loss under float16, against underflow; all factors are powers of two."""

    initial: float = Field(default=2.0**16, gt=0, le=2.0**64, description="factor at the first step")
    growth_interval: int = Field(
        default=2000,
        ge=0,
        description="number of steps without overflow after which the factor doubles; 0: never",
    )
    minimum: float = Field(
        default=1.0, gt=0, description="smallest factor; an overflow at this factor stops the run"
    )
    maximum: float = Field(default=2.0**24, gt=0, le=2.0**64, description="largest factor")


class OptimizerSection(Section):
    """Set AdamW and its learning-rate schedule."""

    lr: float = Field(default=3e-4, gt=0, description="peak learning rate")
    betas: Betas = Field(default=(0.9, 0.95), description="AdamW's beta 1 and beta 2")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(
        default=0.1, ge=0, description="AdamW's weight decay of matrices; biases and norms have none"
    )
    clip: float = Field(
        default=1.0,
        ge=0,
        description='largest global gradient norm; larger ones are scaled to it; 0 or "none": no clipping',
    )
    schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = Field(
        default="cosine", description="shape of the learning-rate schedule after the warm-up"
    )
    warmup: int = Field(
        default=0, ge=0, description="number of steps in which the learning rate rises linearly to lr"
    )
    minimum_ratio: float = Field(
        default=0.1, ge=0, le=1, description="last learning rate as a share of lr; not used by constant"
    )
    decay: int | None = Field(
        default=None,
        ge=1,
        description="number of steps of the wsd schedule's final decay; default: a tenth of the run",
    )
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = Field(
        default="1-sqrt", description="shape of the wsd schedule's final decay"
    )
    scale_lr: Literal["sqrt", "linear"] | None = Field(
        default=None,
        description="how lr grows with data.global_batch / reference_batch; default: it does not",
    )
    reference_batch: int | None = Field(
        default=None, ge=1, description="global batch size for which lr was tuned"
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="label smoothing: share of the target that is spread over the vocabulary",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="factor of the squared log-sum-exp of a token's logits, which is added to its loss and "
        "keeps the logits small; PaLM: 1e-4",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        default=(),
        strict=False,
        description="groups of parameters with another learning rate or weight decay, or frozen",
    )
    skip_spikes: SpikeSection | None = Field(
        default=None, description="skip steps whose loss or gradient norm leaps; {} for the defaults"
    )

    @field_validator("clip", mode="before")
    @classmethod
    def _none_is_zero(cls, value: object) -> object:
        return 0.0 if value == "none" else value
