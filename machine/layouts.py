"""Compare layouts on this machine's devices with one process in fp64 on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..layers import compile_blocks
from ..models import family_of, tiny_config
from ..parallel_state import Layout, ParallelState, initialize
from ..runs.launch import process_group
from ..testing.short_training import Case as Model
from ..testing.short_training import Pieces, batch, pieces, roughen
from ..training import Precision, TrainStep, shard_over_data

#: Largest differences that rounding explains, relative to the loss and to the norm of all gradients.
BOUNDS = {"fp64": 1e-10, "bf16": 0.05}
TINY = tiny_config("llama")
_COMPUTE = {"fp64": torch.float64, "bf16": torch.bfloat16}


def compare_layout(layout: dict[str, Any], device: str, compiled: bool = False) -> dict[str, Any]:
    """Run forward and backward of a small Llama in ``layout``, in fp64 and in bf16 (fp32 weights); compare
    the loss and all gradients with those of one process in fp64 on the CPU. Collective.

    Every rank computes the reference by itself and compares the pieces that it owns.
    """
    figures: dict[str, float] = {}
    with process_group(Layout.of(**layout), device=device) as state:
        alone, expected = _run(ParallelState.alone(), "fp64", reference=True)
        for name in BOUNDS:
            loss, found = _run(state, name, compiled=compiled)
            figures[f"{name}: loss"] = abs(loss - alone) / abs(alone)
            figures[f"{name}: gradients"] = _apart(expected, found, state)
    wrong = [key for key, value in figures.items() if not value <= BOUNDS[key.partition(":")[0]]]
    bounds = ", ".join(f"{name} {bound:g}" for name, bound in BOUNDS.items())
    return {
        "figures": figures,
        "status": "differs" if wrong else "passed",
        "note": f"relative differences; allowed: {bounds}",
    }


def _run(
    state: ParallelState, name: str, *, reference: bool = False, compiled: bool = False
) -> tuple[float, Pieces]:
    """Return the loss of one step, and this rank's pieces of the gradients, on the CPU.

    The reference is one device without FSDP.
    """
    case = Model(TINY, samples=8)
    master = torch.float64 if name == "fp64" else torch.float32
    family = family_of(TINY)
    config = family.from_hf(TINY)
    model = family.build(config, state=state, dtype=master)
    if compiled:
        compile_blocks(model.layers.values())
    if not reference:
        shard_over_data(model, state, Precision(master, _COMPUTE[name], master))
    model.to_empty(device=state.device)
    initialize(model, case.seed, state=state)
    roughen(model, case.seed, state)
    whole = batch(case, 0, config.vocab_size)
    mine = whole.split(case.samples // state.layout.data)[state.data_index]
    step = TrainStep(model, micro_batch=1, dtype=_COMPUTE[name])
    loss = float(step(mine.to(state.device)))
    held = pieces(model, state, gradients=True)
    return loss, {key: (box, owner, tensor.cpu()) for key, (box, owner, tensor) in held.items()}


def _apart(expected: Pieces, found: Pieces, state: ParallelState) -> float:
    """Return the norm of the difference of all gradients, over all ranks, relative to their norm."""
    sums = torch.zeros(2, dtype=torch.float64)
    for name, (box, owner, tensor) in found.items():
        if owner:
            reference = expected[name][2][box.slices].double()
            sums[0] += (tensor.double() - reference).square().sum()
            sums[1] += reference.square().sum()
    if state.layout.world > 1:
        sums = sums.to(state.device)
        dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())
