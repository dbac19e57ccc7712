"""Compute the FLOPs of a training run, the share of the hardware's peak that it uses, its time and its price.

Sources: Kaplan et al. 2020 (six FLOPs for each parameter and token); Narayanan et al. 2021, appendix
(recomputation); Chowdhery et al. 2022, appendix B (MFU and HFU).
"""

from __future__ import annotations

HOUR = 3600.0
DAY = 24 * HOUR


def training_flops(parameters: float, tokens: float) -> float:
    """Return ``6 N D``: 2 FLOPs for each parameter and token forward, and 4 backward.

    Attention's scores are not among them. ``parameters``: those that one token meets.
    """
    return 6 * parameters * tokens


def flops_of_token(
    matrix_parameters: float,
    layers: int,
    attention_width: float,
    sequence_length: int,
    *,
    causal: bool = True,
) -> float:
    """Return the FLOPs of a token, forward and backward, in a transformer of which every weight is trained.

    ``matrix_parameters``: the numbers in matrices that a token is multiplied with: the output layer is one of
    them, the embedding table is not. ``attention_width``: query heads x their width. The scores and their sum
    over the values take ``12 * layers * attention_width * sequence_length``, half of that where only the
    causal half is counted.
    """
    attention = 12 * layers * attention_width * sequence_length
    return 6 * matrix_parameters + attention * (0.5 if causal else 1.0)


def with_recomputation(flops: float) -> float:
    """Return the FLOPs that the hardware carries out if every block's forward is computed twice: 8 for 6."""
    return flops * 4 / 3


def tokens_per_second(
    flops_per_token: float, *, devices: int, peak_flops_per_second: float, mfu: float
) -> float:
    """Return how many tokens a second all devices together train on at this MFU."""
    return devices * peak_flops_per_second * mfu / flops_per_token


def training_seconds(flops: float, *, devices: int, peak_flops_per_second: float, mfu: float) -> float:
    """Return the seconds in which the devices carry out the FLOPs of a run at this MFU."""
    return flops / (devices * peak_flops_per_second * mfu)


def device_hours(seconds: float, devices: int) -> float:
    """Return the GPU-hours of a run."""
    return seconds * devices / HOUR


def price(hours: float, price_per_hour: float) -> float:
    """Return the price of this many GPU-hours, in the currency of ``price_per_hour``."""
    return hours * price_per_hour


def kilowatt_hours(hours: float, watts: float) -> float:
    """Return the energy of so many GPU-hours at a device's ``watts``; cooling and hosts not included."""
    return hours * watts / 1000
