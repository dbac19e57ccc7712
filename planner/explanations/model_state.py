"""Explain the memory of a model's state: weights, gradients, optimizer, and activations by the textbook."""

from __future__ import annotations

from typing import get_args

from ...parallel_state import BadInput
from ..formulas.activation_bytes import Recompute, block_activation_bytes
from ..formulas.bytes_per_parameter import state_bytes
from .explanation import Explanation
from .published import numbers_of

_SOURCE = "Micikevicius et al. 2018; Rajbhandari et al. 2020, section 5"


def _sizes(found: Explanation, weight_bytes: float, gradient_bytes: float, optimizer_bytes: float) -> None:
    found.put_in("w", weight_bytes, "bytes of a weight to compute with", "--weight-bytes")
    found.put_in("g", gradient_bytes, "bytes of a gradient", "--gradient-bytes")
    found.put_in(
        "o",
        optimizer_bytes,
        "bytes of the optimizer for each weight: 12 with fp32 weights and two moments, 8 with moments only",
        "--optimizer-bytes",
    )


def explain_zero(
    parameters: float, ranks: int, *, weight_bytes: float, gradient_bytes: float, optimizer_bytes: float
) -> Explanation:
    """Explain the bytes of a rank in each ZeRO stage."""
    found = Explanation("ZeRO: data ranks share the optimizer's state (1), gradients (2), weights (3)")
    found.put_in("P", parameters, "parameters on a rank before ZeRO", "--parameters")
    found.put_in("N", ranks, "data ranks", "--ranks")
    _sizes(found, weight_bytes, gradient_bytes, optimizer_bytes)
    for zero, formula in enumerate(
        ("P * (w + g + o)", "P * (w + g + o / N)", "P * (w + (g + o) / N)", "P * (w + g + o) / N")
    ):
        held = state_bytes(
            parameters,
            zero=zero,
            data_ranks=ranks,
            weight_bytes=weight_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
        )
        parts = " + ".join(f"{part / 1e9:.4g}" for part in (held.weights, held.gradients, held.optimizer))
        meaning = f"on each rank: {parts} GB of weights, gradients, optimizer"
        found.step(f"zero_{zero}", formula, held.total, "bytes", meaning)
    found.notes.append("ZeRO 0 is DDP, ZeRO 3 is FSDP. Activations come in addition: `explain memory`.")
    found.notes.append(
        "trilith keeps gradients in fp32 (--gradient-bytes 4), and at ZeRO 3 no 16-bit copy of the weights "
        "(--weight-bytes 0). `trilith train RECIPE.toml --dry-run` counts every byte of a rank."
    )
    found.sources.append(_SOURCE)
    return found


def explain_memory(
    parameters: float,
    *,
    tensor: int,
    pipeline: int,
    data: int,
    zero: int,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    micro_batch: int,
    sequence_parallel: bool,
    recompute: Recompute,
    weight_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
    model: str | None = None,
) -> Explanation:
    """Explain the memory of a rank: its share of the model's state, and the activations of its blocks.

    ``model`` sets the numbers of the model. Raises ``BadInput`` for another ``recompute``.
    """
    if recompute not in (legal := get_args(Recompute)):
        raise BadInput("explain", "--recompute", expected=f"one of {', '.join(legal)}", found=repr(recompute))
    if model is not None:
        of = numbers_of(model, sequence)
        parameters, layers, hidden, heads = of.parameters, of.layers, of.hidden, of.heads
    found = Explanation("the memory of a rank: weights, gradients, optimizer, activations")
    found.put_in("P", parameters, "parameters of the model", "--parameters")
    found.put_in_usual(t=tensor, p=pipeline)
    found.put_in("N", data, "data ranks", "--data")
    _sizes(found, weight_bytes, gradient_bytes, optimizer_bytes)
    found.step("own", "P / (t * p)", own := parameters / (tensor * pipeline), "parameters", "are a rank's")
    held = state_bytes(
        own,
        zero=zero,
        data_ranks=data,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
    )
    cut = [" / N" if zero >= stage else "" for stage in (3, 2, 1)]
    found.step("weights", f"own * w{cut[0]}", held.weights, "bytes", f"with ZeRO {zero} (--zero)")
    found.step("gradients", f"own * g{cut[1]}", held.gradients, "bytes", f"with ZeRO {zero}")
    found.step("optimizer", f"own * o{cut[2]}", held.optimizer, "bytes", f"with ZeRO {zero}")
    found.put_in_usual(L=layers, D=hidden)
    found.put_in("h", heads, "heads", "--heads")
    found.put_in_usual(S=sequence, b=micro_batch)
    block = block_activation_bytes(
        sequence * micro_batch,
        hidden,
        heads=heads,
        sequence_length=sequence,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    shared = " / t" if sequence_parallel else ""
    if recompute == "full":
        formula = f"2 * S * b * D{shared}"
    else:
        scores = " + 5 * h * S * S * b / t" if recompute == "none" else ""
        formula = f"S * b * D * (10{shared} + 24 / t){scores}"
    words = {"none": "nothing", "selective": "attention's scores", "full": "whole blocks"}
    meaning = f"are kept of a block; {words[recompute]} computed again (--recompute {recompute})"
    found.step("block", formula, block, "bytes", meaning)
    # The first stage of 1F1B holds as many micro-batches as there are stages.
    found.step("activations", "L * block", layers * block, "bytes",
               "on the first rank of 1F1B: L / p blocks of p micro-batches")  # fmt: skip
    total = held.total + layers * block
    found.step("total", "weights + gradients + optimizer + activations", total, "bytes", "together")
    found.notes.append(
        "The activations are those of GPT with dropout (Korthikanti et al. 2022). Logits and buffers come in "
        "addition; `trilith train RECIPE.toml --dry-run` counts what the layers of a real model keep."
    )
    found.sources += [_SOURCE, "Korthikanti et al. 2022, table 2"]
    return found
