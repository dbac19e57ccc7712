"""Translate the length of Megatron's run, and how its learning rate rises and falls."""

from __future__ import annotations

from .translation import Given, Translation

#: Our name of each of Megatron's shapes.
_SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}


def _span(given: Given, name: str, batch: int, *, by_samples: bool) -> int | None:
    """Return ``<name>_iters``, or ``<name>_samples`` in steps; the run and its spans must count alike."""
    iters, samples = given.whole(f"{name}_iters"), given.whole(f"{name}_samples")
    if iters and samples:
        if iters != samples // batch:  # Megatron stores both
            raise given.bad(
                f"{name}_samples", f"{name}_iters={iters} x {batch} rows, or one of them", samples
            )
    elif (samples and not by_samples) or (iters and by_samples):
        unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
        raise given.bad(f"{name}_{other}", f"{name}_{unit} beside train_{unit}", samples or iters)
    return iters or (samples // batch if samples else iters)


def steps_and_schedule(given: Given, found: Translation, batch: int) -> None:
    """Set the number of steps, of ``batch`` rows each, and the learning rate over them."""
    by_samples = bool(given.whole("train_samples"))
    steps = _span(given, "train", batch, by_samples=by_samples)
    decay = _span(given, "lr_decay", batch, by_samples=by_samples) or steps
    warmup = _span(given, "lr_warmup", batch, by_samples=by_samples)
    last = _span(given, "lr_wsd_decay", batch, by_samples=by_samples)
    fraction = given.number("lr_warmup_fraction")
    style = given.text("lr_decay_style") or "linear"
    if style not in _SCHEDULES:
        raise given.bad("lr_decay_style", " or ".join(_SCHEDULES), style)
    if fraction is not None and warmup:
        raise given.bad("lr_warmup_fraction", "this or a number of iterations or samples", "both")
    if steps is None:
        found.blank("steps", "how many updates")
    elif decay is not None and decay > steps and style != "constant":
        found.set("steps", decay, "the rate falls over these")
        found.set("stop_after", steps)
    else:
        found.set("steps", steps, f"{given.raw['train_samples']} samples" if by_samples else "")
        if decay is not None and decay < steps and style != "constant":
            why = f"the rate is lowest after {steps} steps, the last one"
            found.miss("lr_decay_samples" if by_samples else "lr_decay_iters", decay, why)
    found.set("optimizer.schedule", _SCHEDULES[style])
    if fraction and decay:
        found.set("optimizer.warmup", round(fraction * decay), f"{fraction:g} of the steps")
    elif fraction:
        found.miss("lr_warmup_fraction", fraction, "a share of steps that are not said; set optimizer.warmup")
    else:
        found.set("optimizer.warmup", warmup or 0)
    if start := given.number("lr_warmup_init", 0.0):
        found.miss("lr_warmup_init", start, "the warm-up begins near 0")
    _rates(given, found, style, last)


def _rates(given: Given, found: Translation, style: str, last: int | None) -> None:
    rate, least = given.number("lr"), given.number("min_lr", 0.0) or 0.0
    if rate is None:
        found.miss("lr", None, "the file does not say it; set optimizer.lr")
    else:
        if least > rate:
            raise given.bad("min_lr", f"at most lr={rate:g}", least)
        found.set("optimizer.lr", rate)
    if rate and style != "constant":
        found.set("optimizer.minimum_ratio", least / rate, f"min_lr = {least:g}")
    if style == "WSD":
        if last:
            found.set("optimizer.decay", last)
        shape = given.text("lr_wsd_decay_style") or "exponential"
        found.set("optimizer.decay_shape", {"minus_sqrt": "1-sqrt"}.get(shape, shape))
        if shape == "exponential":
            found.set("optimizer.decay_shape", "1-sqrt")
            found.miss("lr_wsd_decay_style", shape, "taken as 1-sqrt; linear and cosine are there too")
