"""The section of a recipe that a model with experts may have."""

from __future__ import annotations

from pydantic import Field

from .section import Section


class ExpertsSection(Section):
    """What keeps the experts of a model evenly used; docs/experts.md."""

    balance: float | None = Field(
        default=None,
        ge=0,
        description="factor of the balance loss, a mean over rows and routers; default: the model config's "
        "router_aux_loss_coef if its output_router_logits is true, else 0",
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="factor of the routers' z-loss, a mean over rows and routers"
    )
    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="how far, each step, a router's bias moves up for an expert with fewer tokens than the "
        "mean, and down for one with more; of models whose routers have biases, trained without adapters",
    )
