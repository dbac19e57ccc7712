"""Turn a step's gradients into new weights, or skip the step: unscale, clip, decide, update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layers import Balance, Balancing
from ..models import CausalLM
from ..parallel_state import clip_gradients
from .loss_scale import LossScale
from .spikes import Spikes


@dataclass(frozen=True, slots=True)
class Updated:
    """Report on a step: the gradient norm before clipping and, if nothing was updated, the reason.

    ``fatal``: nothing was updated, and another step would not help; gradients are kept, to find the cause.
    ``balance``: the balance of the experts, if the model has some.
    """

    grad_norm: float
    skipped: str | None = None
    fatal: bool = False
    balance: Balance | None = None


class Update:
    """Update the weights. Collective, and alike on every rank: either all of them update or none does.

    Without ``loss_scale`` a loss or gradient that is not finite on any rank is fatal; with it the step is
    skipped and the scale halves, down to its minimum. With ``spikes`` a step that leaps is skipped too. A
    skipped step moves no parameter and no moment; the schedule goes on by the number of the step.
    """

    def __init__(
        self,
        model: CausalLM,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float,
        loss_scale: LossScale | None = None,
        spikes: Spikes | None = None,
        balancing: Balancing | None = None,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.loss_scale, self.spikes, self.balancing = loss_scale, spikes, balancing
        #: Steps that updated; those that did not, by reason.
        self.made, self.skips = 0, {"overflow": 0, "spike": 0}

    @property
    def scale(self) -> float:
        """Return the factor of the current step's loss."""
        return self.loss_scale.value if self.loss_scale else 1.0

    @property
    def skipped(self) -> int:
        return sum(self.skips.values())

    def __call__(self, loss: Tensor) -> Updated:
        """Clip, decide and update. ``loss``: unscaled; ``.grad``: gradients of ``scale`` times the loss."""
        norm = clip_gradients(self.model, self.clip, loss_scale=self.scale, state=self.model.state)
        finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
        reason = None
        if not finite:
            if self.loss_scale is None or not self.loss_scale.overflowed():
                return Updated(float(norm), fatal=True)
            reason = "overflow"
        else:
            if self.loss_scale is not None:
                self.loss_scale.went_well()
            reason = "spike" if self._is_spike(float(loss), float(norm)) else None
        if reason is None:
            self.optimizer.step()
            self.made += 1
        else:
            self.skips[reason] += 1
        self.optimizer.zero_grad(set_to_none=True)
        balance = None if self.balancing is None else self.balancing.after_step(updated=reason is None)
        return Updated(float(norm), reason, balance=balance)

    def _is_spike(self, loss: float, norm: float) -> bool:
        """Return whether the step is a spike; ranks agree on it, because their sums may round differently."""
        if self.spikes is None:
            return False
        found = torch.tensor(self.spikes.is_one(loss, norm), dtype=torch.int32)
        self.spikes.note(loss, norm)
        if self.model.state.layout.world > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint; with it and the moments a run continues bit for bit."""
        memory: dict[str, Any] = {"updates": self.made, "skipped": dict(self.skips)}
        if self.loss_scale is not None:
            memory["loss_scale"] = self.loss_scale.remember()
        if self.spikes is not None:
            memory["spikes"] = self.spikes.remember()
        return memory

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Restore what ``remember`` returned; parts that the run did not have then start afresh."""
        self.made = int(memory.get("updates", 0))
        self.skips |= memory.get("skipped", {})
        if self.loss_scale is not None and "loss_scale" in memory:
            self.loss_scale.restore(memory["loss_scale"])
        if self.spikes is not None and "spikes" in memory:
            self.spikes.restore(memory["spikes"])
