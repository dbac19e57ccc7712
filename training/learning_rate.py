"""Compute the learning rate of each step as a pure function of the step: a resume restores nothing.

Warm-up is linear, (step + 1) / warmup of the peak, so that the first step already learns; transformers'
begins at zero and is one step behind. After the warm-up the curves are those of transformers'
``get_*_schedule``, number for number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..recipes.checks import decay_steps
from ..recipes.recipe import Recipe
from ..system import counted

#: Without a warm-up to take it from, the time scale of the inverse square root, as in transformers.
_TIMESCALE = 10_000

#: A curve falls from 1 at progress 0 to 0 at progress 1.
CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Compute the learning rate of each step; ``rate(step)`` counts steps from 0.

    ``kind``
        ``constant``: the peak. ``linear`` and ``cosine``: down to the minimum at step ``total`` (Loshchilov
        and Hutter 2017). ``wsd``, warm-up, stable, decay: the peak until the last ``decay`` steps, then down
        in the given ``shape`` (Hu et al. 2024; ``1-sqrt``: Hägele et al. 2024). ``inverse_sqrt``: the peak
        times the square root of warmup / step (Vaswani et al. 2017), at least the minimum; it has no end.
    ``minimum``
        the last rate as a share of the peak; ``constant`` has none.
    """

    kind: str
    peak: float
    total: int
    warmup: int = 0
    minimum: float = 0.0
    decay: int = 0
    shape: str = "1-sqrt"

    def rate(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * self._share(step)

    def _share(self, step: int) -> float:
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse_sqrt":
            scale = self.warmup or _TIMESCALE
            return max(self.minimum, math.sqrt(scale / (step - self.warmup + scale)))
        if self.kind == "wsd":
            start, curve = self.total - self.decay, CURVES[self.shape]
        else:
            start, curve = self.warmup, CURVES[self.kind]
        progress = min(1.0, max(0, step - start) / max(1, self.total - start))
        return self.minimum + (1 - self.minimum) * curve(progress)


def scaled_rate(lr: float, rule: str | None, *, batch: int, reference: int | None) -> tuple[float, str]:
    """Return the peak learning rate for a global batch of ``batch`` samples, and a line that explains it.

    ``lr`` is a good peak for ``reference`` samples in a step. The rule ``linear`` multiplies ``lr`` by
    ``batch / reference`` (Goyal et al. 2017); ``sqrt`` multiplies it by the square root of this ratio
    (Krizhevsky 2014; for Adam, Malladi et al. 2022). Without a rule, returns ``lr`` and an empty line.
    """
    if rule is None or reference is None:
        return lr, ""
    ratio = batch / reference
    peak = lr * (math.sqrt(ratio) if rule == "sqrt" else ratio)
    factor = f"sqrt({batch} / {reference})" if rule == "sqrt" else f"{batch} / {reference}"
    return peak, f"learning rate {peak:.6g} = {lr:g} x {factor}, for a batch of {counted(batch, 'sample')}"


def schedule_of(recipe: Recipe) -> tuple[Schedule, str]:
    """Return the run's learning rates, and a line on how the peak follows from the batch, if it does."""
    section = recipe.optimizer
    peak, scaling_note = scaled_rate(
        section.lr, section.scale_lr, batch=recipe.data.global_batch, reference=section.reference_batch
    )
    schedule = Schedule(
        section.schedule,
        peak,
        recipe.steps,
        warmup=section.warmup,
        minimum=section.minimum_ratio,
        decay=decay_steps(section, recipe.steps),
        shape=section.decay_shape,
    )
    return schedule, scaling_note
