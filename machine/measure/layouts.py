"""Compare layouts on this machine's devices with one process in fp64 on the CPU."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...data.batch import Batch
from ...layers import compile_blocks
from ...models import family_of, tiny_config
from ...parallel_state import Layout, ParallelState, initialize
from ...runs.launch import process_group
from ...testing.layouts import Observation, Pieces, assemble, differences, observe, random_rows, roughen
from ...training import Precision, Step, TokenLoss, shard_over_data

if TYPE_CHECKING:
    from ...models import CausalLM

#: Largest differences that rounding explains: of the loss, and in fp64 of any gradient, in bf16, where small
#: gradients are mostly rounding, of the norm of all.
BOUNDS = {"fp64": 1e-10, "bf16": 0.05}
_COMPUTE = {"fp64": torch.float64, "bf16": torch.bfloat16}
_SAMPLES, _LENGTH, _SEED = 8, 16, 7


def compare_layout(layout: dict[str, Any], device: str, compiled: bool = False) -> dict[str, Any]:
    """Run forward and backward of a small Llama in ``layout``, in fp64 and in bf16 (fp32 weights); compare
    the loss and all gradients with those of one process in fp64 on the CPU. Collective.

    Every rank computes the reference by itself and compares the pieces that it has.
    """
    figures: dict[str, float] = {}
    with process_group(Layout.of(**layout), device=device) as state:
        alone = _run(ParallelState.alone(), "fp64")
        expected = assemble([alone.gradients])
        for name in BOUNDS:
            of_layout = _run(state, name, sharded=True, compiled=compiled)
            figures[f"{name}: loss"] = abs(of_layout.losses[0] / alone.losses[0] - 1)
            distance = _worst if name == "fp64" else _norm
            figures[f"{name}: gradients"] = distance(expected, of_layout.gradients, state)
    wrong = [key for key, value in figures.items() if not value <= BOUNDS[key.partition(":")[0]]]
    bounds = ", ".join(f"{name} {bound:g}" for name, bound in BOUNDS.items())
    return {
        "figures": figures,
        "status": "differs" if wrong else "passed",
        "note": f"relative differences; allowed: {bounds}",
    }


def _run(state: ParallelState, name: str, *, sharded: bool = False, compiled: bool = False) -> Observation:
    """Take one step; unless ``sharded``, it is that of one device without FSDP."""
    master, compute = torch.float64 if name == "fp64" else torch.float32, _COMPUTE[name]
    family = family_of(raw := tiny_config("llama"))
    config = family.from_hf(raw)

    def build() -> "tuple[CausalLM, Step]":
        model = family.build(config, state=state, dtype=master)
        if compiled:
            compile_blocks(model.layers.values())
        if sharded:
            shard_over_data(model, state, Precision(master, compute, master))
        model.to_empty(device=state.device)
        initialize(model, _SEED, state=state)
        roughen(model, _SEED, state)
        return model, Step(model, TokenLoss(model), micro_batch=1)

    generator = torch.Generator().manual_seed(_SEED)
    whole = Batch(*random_rows(_SAMPLES, _LENGTH, config.vocab_size, generator))
    batch = whole.split(_SAMPLES // state.layout.data)[state.data_index]
    return observe(build, [batch.to(state.device)], state)


def _worst(expected: dict[str, Tensor], gradients: Pieces, state: ParallelState) -> float:
    of_rank = {name: expected[name] for name in gradients}
    worst = torch.tensor([gap for _, gap in differences(of_rank, [gradients])], dtype=torch.float64).max()
    return float(_over_ranks(worst, dist.ReduceOp.MAX, state))


def _norm(expected: dict[str, Tensor], gradients: Pieces, state: ParallelState) -> float:
    """Return the norm of the difference of all gradients, over all ranks, relative to their norm."""
    sums = torch.zeros(2, dtype=torch.float64)
    for name, (box, owner, tensor) in gradients.items():
        if owner:
            reference = expected[name][box.slices].double()
            sums[0] += (tensor.double() - reference).square().sum()
            sums[1] += reference.square().sum()
    apart, whole = _over_ranks(sums, dist.ReduceOp.SUM, state)
    return float((apart / whole).sqrt())


def _over_ranks(x: Tensor, how: Any, state: ParallelState) -> Tensor:
    if state.layout.world > 1:
        x = x.to(state.device)
        dist.all_reduce(x, how)
    return x
