"""Explain how long a training run takes, what it costs, and the share of the peak that it uses."""

from __future__ import annotations

from ..formulas.training_time import (
    DAY,
    device_hours,
    flops_of_token,
    kilowatt_hours,
    training_flops,
    training_seconds,
    utilization,
    with_recomputation,
)
from ..formulas.training_time import price as price_of
from .explanation import Explanation
from .published import numbers_of

_SOURCES = ["Kaplan et al. 2020, section 2.1", "Chowdhery et al. 2022, appendix B"]


def explain_training_time(
    parameters: float,
    tokens: float,
    *,
    gpus: int,
    peak: float,
    mfu: float,
    price: float = 0.0,
    watts: float = 0.0,
    model: str | None = None,
) -> Explanation:
    """Explain the FLOPs, days, GPU-hours, price and energy of a run; ``model`` sets ``parameters``."""
    parameters = numbers_of(model, 1).active if model is not None else parameters
    found = Explanation("training time: FLOPs of a run over the FLOPs that the devices carry out")
    found.put_in("P", parameters, "parameters that a token meets", "--parameters")
    found.put_in("T", tokens, "tokens of the run", "--tokens")
    found.put_in_usual(G=gpus, F=peak)
    found.put_in("u", mfu, "MFU: share of the peak that the model's FLOPs take", "--mfu")
    flops = training_flops(parameters, tokens)
    found.step(
        "C", "6 * P * T", flops, "FLOPs", "for the run: 2 for each parameter and token forward, 4 backward"
    )
    seconds = training_seconds(flops, devices=gpus, peak_flops_per_second=peak, mfu=mfu)
    found.step("seconds", "C / (G * F * u)", seconds, "s", "of training")
    found.step("days", "seconds / 86400", seconds / DAY, "days", "of training")
    hours = device_hours(seconds, gpus)
    found.step("hours", "seconds * G / 3600", hours, "GPU-hours", "of training")
    found.put_in("x", price, "price of a GPU-hour", "--price")
    found.put_in("W", watts, "watts of a GPU", "--watts")
    found.step("price", "hours * x", price_of(hours, price), "in the currency of --price", "for the run")
    found.step("energy", "hours * W / 1000", kilowatt_hours(hours, watts), "kWh", "without hosts and cooling")
    found.notes.append("6 P T leaves out attention's scores; `explain mfu` counts them.")
    found.sources += _SOURCES
    return found


def explain_mfu(
    rate: float,
    parameters: float,
    *,
    layers: int,
    width: float,
    sequence: int,
    gpus: int,
    peak: float,
    model: str | None = None,
) -> Explanation:
    """Explain MFU in both conventions, and HFU, from a rate; ``model`` sets the numbers of the model."""
    if model is not None:
        of = numbers_of(model, sequence)
        parameters, layers, width = of.matrices, of.layers, of.attention_width
    found = Explanation("MFU: the share of the peak that the model's own FLOPs take")
    found.put_in("R", rate, "tokens a second, all GPUs together", "--rate")
    found.put_in("P", parameters, "parameters in matrices, without the embedding table", "--parameters")
    found.put_in_usual(L=layers)
    found.put_in("A", width, "query heads times their width", "--width")
    found.put_in_usual(S=sequence, G=gpus, F=peak)
    both = {}
    for name, half, causal in (("full", "12", False), ("causal", "6", True)):
        both[name] = flops_of_token(parameters, layers, width, sequence, causal=causal)
        counted = "the causal half of attention" if causal else "all of attention"
        found.step(
            name, f"6 * P + {half} * L * A * S", both[name], "FLOPs", f"for a token, counting {counted}"
        )
    names = {"full": "torchtitan, nanotron, PaLM", "causal": "Megatron-LM, since 2025"}
    for name, users in names.items():
        share = utilization(rate, both[name], devices=gpus, peak_flops_per_second=peak)
        found.step(
            f"mfu_{name}", f"R * {name} / (G * F)", share, "share", f"is MFU in the convention of {users}"
        )
    hardware = with_recomputation(both["causal"])
    share = utilization(rate, hardware, devices=gpus, peak_flops_per_second=peak)
    found.step("hfu", "R * causal * 4 / 3 / (G * F)", share, "share",
               "is HFU if every block's forward is computed twice")  # fmt: skip
    found.notes.append(
        "Compare two MFUs only in the same convention, and see whether a rate is bf16 or float8."
    )
    found.sources += ["Chowdhery et al. 2022, appendix B", "Narayanan et al. 2021, appendix"]
    return found
