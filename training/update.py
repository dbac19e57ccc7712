"""Turn a step's gradients into new weights, or skip the step: unscale, clip, decide, update."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layers import Balance, Balancing
from ..parallel_state import GradientClipping, NotTrained, ParallelState, refuse_untrained, state_of
from ..recipes.section import LossScaleSection, SpikeSection
from ..system import counted
from .step_sums import StepResult

#: So many overflows in a row stop a run: from the usual 2^16, or Megatron's 2^32, the scale is then below 1.
MOST_OVERFLOWS = 40


class LossScale:
    """Hold a power of two that halves when a gradient overflows and doubles after a number of good steps.

    It depends only on numbers that are equal on every rank, so ranks need not agree on it. A power of two
    changes no bit of a gradient that neither overflows nor underflows. Without it fp16 gradients partly
    underflow to zero. Near its limit a layout may skip a step that another takes, as torch's and Megatron's:
    a rank's fp16 product is over its own tokens (context, sequence) or features (tensor), and the sum over
    ranks is in ``reduce``. ``section``: the recipe's numbers. Source: Micikevicius et al. 2018, section 3.2;
    the numbers are torch's ``GradScaler``'s.
    """

    def __init__(self, section: LossScaleSection | None = None) -> None:
        self.section = section or LossScaleSection()
        self.value, self.good, self.overflows = self.section.initial, 0, 0

    def overflowed(self) -> bool:
        """Halve the scale; return ``False`` if it is at its minimum, so that scaling is not to blame.

        ``NotTrained`` after ``MOST_OVERFLOWS`` in a row.
        """
        self.overflows += 1
        if self.overflows >= MOST_OVERFLOWS:
            raise NotTrained(
                f"{counted(self.overflows, 'step')} in a row were skipped, down to a loss scale of "
                f"{self.value:g}: gradients overflow at each; set a smaller loss_scale.initial"
            )
        lower = self.value / 2
        if lower < self.section.minimum:
            return False
        self.value, self.good = lower, 0
        return True

    def went_well(self) -> None:
        """Note a step whose gradients were finite."""
        self.good, self.overflows = self.good + 1, 0
        if self.section.growth_interval and self.good >= self.section.growth_interval:
            self.value, self.good = min(self.value * 2, self.section.maximum), 0

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"value": self.value, "good": self.good}

    def restore(self, memory: dict[str, Any]) -> None:
        """Restore what ``remember`` returned, within bounds that may have changed since."""
        value, self.good = float(memory["value"]), int(memory["good"])
        self.value = min(max(value, self.section.minimum), self.section.maximum)


class Spikes:
    """Hold a window of the last steps' losses and gradient norms, and tell whether a step is a spike.

    A spike is a loss or norm more than ``deviations`` standard deviations above the window's mean. No step is
    a spike before half a window has been seen. A spike enters the window like any step: a higher level that
    stays is soon normal, so a run cannot skip steps for ever. Source: OLMo-core's ``SkipStepOptimizer``.
    """

    def __init__(self, section: SpikeSection) -> None:
        self.section = section
        self.losses: deque[float] = deque(maxlen=section.window)
        self.norms: deque[float] = deque(maxlen=section.window)

    def is_one(self, loss: float, norm: float) -> bool:
        """Tell whether a step with this loss and gradient norm should not update; it is not noted yet."""
        if len(self.losses) < max(2, self.section.window // 2):
            return False
        return self._leaps(loss, self.losses) or self._leaps(norm, self.norms)

    def note(self, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def _leaps(self, value: float, recent: deque[float]) -> bool:
        return value > statistics.fmean(recent) + self.section.deviations * statistics.stdev(recent)

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint; JSON keeps every bit of a float."""
        return {"losses": [*self.losses], "norms": [*self.norms]}

    def restore(self, memory: dict[str, Any]) -> None:
        for recent, saved in ((self.losses, memory["losses"]), (self.norms, memory["norms"])):
            recent.clear()
            recent.extend(float(value) for value in saved)


@dataclass(frozen=True, slots=True)
class Updated:
    """Report on a step: loss, gradient norm before clipping and, if nothing was updated, the reason.

    ``fatal``: nothing was updated, and another step would not help; gradients are kept, to find the cause.
    ``balance``: the balance of the experts, if the model has some. ``loss_scale``: of this step's loss, with
    float16.
    """

    loss: float
    grad_norm: float
    skipped: str | None = None
    fatal: bool = False
    balance: Balance | None = None
    loss_scale: float | None = None


class Update:
    """Update the weights. Collective, and alike on every rank: either all of them update or none does.

    Without ``loss_scale`` a loss or gradient that is not finite on any rank is fatal; with it the step is
    skipped and the scale halves, down to its minimum. With ``spikes`` a step that leaps is skipped too. A
    skipped step moves no parameter and no moment; the schedule goes on by the number of the step. Without
    ``state`` it is the model's.

    The host waits for the device once, after the update: a fused optimizer is given the decision as a tensor.
    It waits before the update for ``spikes``, and for an optimizer that is not fused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float,
        loss_scale: LossScale | None = None,
        spikes: Spikes | None = None,
        balancing: Balancing | None = None,
        state: ParallelState | None = None,
    ) -> None:
        self.state = state_of(model, state)
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.loss_scale, self.spikes, self.balancing = loss_scale, spikes, balancing
        self._clipping: GradientClipping | None = None
        #: Steps that updated; those that did not, by reason.
        self.made, self.skips = 0, {"overflow": 0, "spike": 0}

    @property
    def scale(self) -> float:
        """Return the factor of the current step's loss."""
        return self.loss_scale.value if self.loss_scale else 1.0

    @property
    def skipped(self) -> int:
        return sum(self.skips.values())

    def __call__(self, result: StepResult) -> Updated:
        """Clip, decide and update. ``result``: of ``Step.launch`` with ``scale``, whose gradients are there.

        Raises, on every rank and before anything changes, what ``Step.refuse`` raises.
        """
        if self._clipping is None:
            self._clipping = GradientClipping(self.model, self.state, where="update")
        scale = self.scale
        norm = self._clipping.clip(self.clip, loss_scale=scale)
        numbers = (result.loss.view(1), norm.view(1), result.checks)
        measured = [number.to(norm.device).double() for number in numbers]
        unfit = _unfit(*torch.cat(measured).unbind())
        waits = self.spikes is not None or not all(
            group.get("fused") for group in self.optimizer.param_groups
        )
        if not waits:
            self._step(unless=unfit)
        tallies = norm.new_zeros(0) if self.balancing is None else self.balancing.summed().to(norm.device)
        read = torch.cat([*measured, unfit.double().view(1), tallies.double()])
        mean, size, *rest = read.tolist()
        end = len(result.checks)
        checks, was_unfit, tallied = rest[:end], rest[end], rest[end + 1 :]
        result.refuse_faults(checks)
        trained, missing = checks[:2]
        finite = math.isfinite(mean) and math.isfinite(size)
        if missing or (was_unfit and finite):
            refuse_untrained(self.model, mean, (trained, missing), unused=result.unused, state=self.state)
            waits = True  # some gradient is not zero, but all are too small to be squared
        reason = None
        if not finite:
            if self.loss_scale is None or not self.loss_scale.overflowed():
                return Updated(mean, size, fatal=True)
            reason = "overflow"
        else:
            if self.loss_scale is not None:
                self.loss_scale.went_well()
            reason = "spike" if self._is_spike(mean, size) else None
        if reason is None:
            if waits:
                self._step()
            self.made += 1
        else:
            self.skips[reason] += 1
        self.optimizer.zero_grad(set_to_none=True)
        balance = None
        if self.balancing is not None:
            sums = torch.tensor(tallied, dtype=torch.float64)
            balance = self.balancing.after_step(updated=reason is None, sums=sums)
        loss_scale = scale if self.loss_scale else None
        return Updated(mean, size, reason, balance=balance, loss_scale=loss_scale)

    def _step(self, *, unless: Tensor | None = None) -> None:
        """Step the optimizer; where ``unless`` is true the device leaves everything as it is."""
        if unless is not None:
            self.optimizer.__dict__["found_inf"] = unless.float()  # where torch's GradScaler leaves it
        try:
            self.optimizer.step()
        finally:
            self.optimizer.__dict__.pop("found_inf", None)

    def _is_spike(self, loss: float, norm: float) -> bool:
        """Return whether the step is a spike; ranks agree on it, because their sums may round differently."""
        if self.spikes is None:
            return False
        spike = torch.tensor(self.spikes.is_one(loss, norm), dtype=torch.int32)
        self.spikes.note(loss, norm)
        if self.state.layout.world > 1:
            dist.all_reduce(spike, op=dist.ReduceOp.MAX)
        return bool(spike)

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint; with it and the moments a run continues bit for bit."""
        parts = {name: part.remember() for name, part in self._with_memory()}
        return {"updates": self.made, "skipped": dict(self.skips), **parts}

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Restore what ``remember`` returned; parts that the run did not have then start afresh."""
        self.made = int(memory.get("updates", 0))
        self.skips |= memory.get("skipped", {})
        for name, part in self._with_memory():
            if name in memory:
                part.restore(memory[name])

    def _with_memory(self) -> list[tuple[str, LossScale | Spikes]]:
        parts = (("loss_scale", self.loss_scale), ("spikes", self.spikes))
        return [(name, part) for name, part in parts if part is not None]


def _unfit(loss: Tensor, norm: Tensor, trained: Tensor, *wrong: Tensor) -> Tensor:
    """Tell, on the device, whether the step may not update: a number is not finite, a parameter is not
    trained, or the loss is ``wrong``. Gradients may be zero only if the loss is.
    """
    vanished = (norm == 0) & (loss != 0) & (trained > 0)
    return ~(loss.isfinite() & norm.isfinite()) | (torch.stack(wrong) > 0).any() | vanished
