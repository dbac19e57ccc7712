"""The section of a recipe that a model with experts may have."""

from __future__ import annotations

from pydantic import Field

from .section import Section


class ExpertsSection(Section):
    """Load balancing of mixture-of-experts models; see docs/experts.md."""

    balance: float | None = Field(
        default=None,
        ge=0,
        description="factor of the load-balancing loss, a mean over rows and routers; default: "
        "router_aux_loss_coef "
        "of the model's config if its output_router_logits is true, else 0",
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="factor of the routers' z-loss, a mean over rows and routers"
    )
    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="step by which a router's bias rises for an expert with fewer tokens than the mean, "
        "and falls "
        "for one with more; only for models whose routers have biases, without adapters",
    )
