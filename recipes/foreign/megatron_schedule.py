"""Translate the length of Megatron's run, and how its learning rate rises and falls."""

from ...system import counted
from .translation import ForeignConfig, RecipeDraft

#: Our name of each of Megatron's shapes.
_SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
_DECAY_SHAPES = {"minus_sqrt": "1-sqrt", "exponential": "1-sqrt"}


def _span(config: ForeignConfig, name: str, batch: int, *, by_samples: bool) -> int | None:
    """Return ``<name>_iters``, or ``<name>_samples`` in steps; the run and its spans must count alike."""
    iters, samples = config.whole(f"{name}_iters"), config.whole(f"{name}_samples")
    if iters and samples:
        if iters != samples // batch:  # Megatron stores both
            expected = f"{name}_iters={iters} x {counted(batch, 'row')}, or one of them"
            raise config.bad(f"{name}_samples", expected, samples)
    elif (samples and not by_samples) or (iters and by_samples):
        unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
        raise config.bad(f"{name}_{other}", f"{name}_{unit} beside train_{unit}", samples or iters)
    return iters or (samples // batch if samples else iters)


def steps_and_schedule(config: ForeignConfig, draft: RecipeDraft, batch: int) -> None:
    """Set the number of steps, of ``batch`` rows each, and the learning rate over them."""
    samples = config.whole("train_samples")
    by_samples = bool(samples)
    steps = _span(config, "train", batch, by_samples=by_samples)
    decay = _span(config, "lr_decay", batch, by_samples=by_samples) or steps
    warmup = _span(config, "lr_warmup", batch, by_samples=by_samples)
    wsd_decay = _span(config, "lr_wsd_decay", batch, by_samples=by_samples)
    fraction = config.number("lr_warmup_fraction")
    style = config.text("lr_decay_style") or "linear"
    if style not in _SCHEDULES:
        raise config.bad("lr_decay_style", " or ".join(_SCHEDULES), style)
    if fraction is not None and warmup:
        raise config.bad("lr_warmup_fraction", "this or a number of iterations or samples", "both")
    if steps is None:
        draft.blank("steps")
    elif decay is not None and decay > steps and style != "constant":
        draft.set("steps", decay, "the rate falls over these")
        draft.set("stop_after", steps)
    else:
        draft.set("steps", steps, counted(samples, "sample") if samples else "")
        if decay is not None and decay < steps and style != "constant":
            why = f"the rate is lowest after {counted(steps, 'step')}, the last one"
            draft.miss("lr_decay_samples" if by_samples else "lr_decay_iters", decay, why)
    draft.set("optimizer.schedule", _SCHEDULES[style])
    if fraction and decay:
        draft.set("optimizer.warmup", round(fraction * decay), f"{fraction:g} of the steps")
    elif fraction:
        draft.miss("lr_warmup_fraction", fraction, "a share of steps that are not said; set optimizer.warmup")
    else:
        draft.set("optimizer.warmup", warmup or 0)
    if start := config.number("lr_warmup_init", 0.0):
        draft.miss("lr_warmup_init", start, "the warm-up begins near 0")
    _rates(config, draft, style, wsd_decay)


def _rates(config: ForeignConfig, draft: RecipeDraft, style: str, wsd_decay: int | None) -> None:
    rate, minimum = config.number("lr"), config.number("min_lr", 0.0) or 0.0
    if rate is None:
        draft.miss("lr", None, "the file does not say it; set optimizer.lr")
    elif minimum > rate:
        raise config.bad("min_lr", f"at most lr={rate:g}", minimum)
    else:
        draft.set("optimizer.lr", rate)
    if rate and style != "constant":
        draft.set("optimizer.minimum_ratio", minimum / rate, f"min_lr = {minimum:g}")
    if style == "WSD":
        if wsd_decay:
            draft.set("optimizer.decay", wsd_decay)
        shape = config.text("lr_wsd_decay_style") or "exponential"
        draft.set("optimizer.decay_shape", _DECAY_SHAPES.get(shape, shape))
        if shape == "exponential":
            draft.miss("lr_wsd_decay_style", shape, "taken as 1-sqrt; linear and cosine are there too")
