"""Train a zoo model for a few steps in one layout, and return whole tensors to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batch import Batch
from ..layers import IGNORE, Scaling, compile_blocks, use_float8
from ..models import CausalLM, Family, LoraConfig, ModelConfig, adapted, family_of
from ..parallel_state import (
    Box,
    Layout,
    Normal,
    ParallelState,
    clip_gradients,
    declarations,
    initialize,
    seed_of,
    stored_box,
)
from ..parallel_state.engine import local_data
from ..parallel_state.initial_weights import fill
from ..recipes.optimizer_sections import ParameterGroup
from ..recipes.sections import MemorySection
from ..training.adamw import make_adamw
from ..training.build import spare_memory
from ..training.parameter_groups import assign, freeze, names_of
from ..training.precision import Precision
from ..training.step import TrainStep
from ..training.zero_on_fsdp import resting_device, shard_over_data
from .shared_gpu import share_gpu


@dataclass(frozen=True)
class Case:
    """State what to train: a config.json's dict, a layout, a batch."""

    config: dict[str, Any]
    layout: Layout = field(default_factory=Layout)
    split: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mtp: float = 0.0  # factor of the loss of multi-token prediction
    samples: int = 4
    length: int = 16
    micro_batch: int = 1
    steps: int = 2
    clip: float = 0.05
    lr: float = 1e-2
    dtype: torch.dtype = torch.float64
    compute: torch.dtype | None = None
    seed: int = 7
    documents: bool = False  # several a row: positions start again where one starts
    memory: MemorySection = field(default_factory=MemorySection)
    compiled: str = ""  # torch.compile's backend
    float8: Scaling | None = None
    lora: dict[str, Any] | None = None
    frozen: str | None = None  # a pattern over names: what is not trained
    device: str = "cpu"  # or "cuda": all ranks then share the first GPU


@dataclass
class Outcome:
    """Hold each step's loss and gradient norm, the first step's gradients, the first and last parameters."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    initial: dict[str, Tensor]
    parameters: dict[str, Tensor]


Pieces = dict[str, tuple[Box, bool, Tensor]]


@dataclass
class RankOutcome:
    """Hold the pieces of an ``Outcome`` on one rank."""

    losses: list[float]
    norms: list[float]
    gradients: Pieces
    initial: Pieces
    parameters: Pieces


@dataclass(frozen=True)
class Parts:
    """Hold what a rank trains with; the weights are not filled yet."""

    model: CausalLM
    step: TrainStep
    optimizer: torch.optim.AdamW
    family: Family
    config: ModelConfig


def model_of(case: Case, state: ParallelState) -> tuple[CausalLM, Family, ModelConfig]:
    """Build a rank's part of the model on the meta device; the state may be a stand-in."""
    family = family_of(case.config)
    config = family.from_hf(case.config)
    if case.lora is not None:
        family = adapted(family, LoraConfig.model_validate(case.lora))
    base: dict[str, Any] = {} if case.lora is None or case.compute is None else {"base_dtype": case.compute}
    model = family.build(config, split=case.split, state=state, dtype=case.dtype, **base)
    if case.frozen is not None:
        freeze(model, assign([ParameterGroup(match=case.frozen, freeze=True)], names_of(family, config)))
    return model, family, config


def build_rank(case: Case, state: ParallelState) -> Parts:
    """Build a rank's part of the model in its layout, its step and its optimizer."""
    model, family, config = model_of(case, state)
    precision = Precision(case.dtype, case.compute or case.dtype, case.dtype)
    if case.float8 is not None:
        assert use_float8(model, case.float8) == []
    if case.compiled:
        compile_blocks(model.numbered_blocks().values(), backend=case.compiled)
    spare_memory(model, case.memory, case.memory.stated_chunk)
    shard_over_data(model, state, precision, offload=case.memory.offload)
    model.to_empty(device=resting_device(state, offload=case.memory.offload))
    step = TrainStep(
        model,
        micro_batch=case.micro_batch,
        schedule=case.schedule,
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        mtp=case.mtp,
        dtype=case.compute or case.dtype,
        loss_chunk=case.memory.stated_chunk,
    )
    return Parts(model, step, make_adamw(model, lr=case.lr), family, config)


def train_rank(case: Case) -> RankOutcome:
    """Train inside a process group of ``case.layout.world`` ranks; return what this rank holds in the end."""
    if case.device == "cuda":
        share_gpu()
    state = ParallelState.start(case.layout, device=case.device)
    parts = build_rank(case, state)
    model, optimizer = parts.model, parts.optimizer
    initialize(model, case.seed, state=state)
    roughen(model, case.seed, state)
    initial = pieces(model, state)
    losses, norms, gradients = [], [], {}
    for number in range(case.steps):
        losses.append(float(parts.step(rank_batch(case, number, state))))
        if number == 0:
            gradients = pieces(model, state, gradients=True)
        norms.append(float(clip_gradients(model, case.clip, state=state)))
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return RankOutcome(losses, norms, gradients, initial, pieces(model, state))


def rank_batch(case: Case, step: int, state: ParallelState) -> Batch:
    """Return this data rank's rows of a step, on the host."""
    vocab_size = int(case.config["vocab_size"])
    return batch(case, step, vocab_size).split(case.samples // case.layout.data)[state.data_index]


def batch(case: Case, step: int, vocab_size: int) -> Batch:
    """Return the whole batch of a step; ignored labels and document starts are spread unevenly."""
    generator = torch.Generator().manual_seed(seed_of(case.seed, "batch", step))
    tokens = torch.randint(vocab_size, (case.samples, case.length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(case.samples):
        labels[sample, : (3 * sample) % case.length] = IGNORE
    positions = None
    if case.documents:
        places = torch.arange(case.length).expand(case.samples, -1)
        starts = torch.rand(case.samples, case.length, generator=generator) < 0.2
        positions = places - torch.where(starts, places, 0).cummax(1).values
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def roughen(model: CausalLM, seed: int, state: ParallelState) -> None:
    """Draw norms, biases and LoRA's second factors: at their default values most mistakes do not show."""
    stated = declarations(model)
    for name, parameter in model.named_parameters():
        declaration = stated[name]
        if len(declaration.shape) == 1 or "lora_B" in name:
            box, data = stored_box(parameter, declaration, state), local_data(parameter)
            noise = torch.zeros_like(data)
            if box.size:
                fill(noise, box, declaration.shape, Normal(0.3), seed_of(seed, "rough", name))
            data.add_(noise)


def pieces(model: CausalLM, state: ParallelState, *, gradients: bool = False) -> Pieces:
    """Return this rank's part of each parameter: its box without padding, whether it owns it, the numbers.

    Asserts that padding is zero.
    """
    stated = declarations(model)
    found = {}
    for name, parameter in model.named_parameters():
        declaration = stated[name]
        if gradients and not parameter.requires_grad:
            assert parameter.grad is None, f"{name} is frozen and has a gradient"
            continue
        tensor = parameter.grad if gradients else parameter
        assert tensor is not None, f"{name} has no gradient"
        box = declaration.true_part(stored_box(parameter, declaration, state))
        owner = declaration.owner(state.layout, state.at)
        held = local_data(tensor)
        if declaration.multiple is not None:
            assert not bool(held[box.shape[0] :].any()), f"{name}: padding is not zero"
            held = held[: box.shape[0]]
        found[name] = (box, owner, held.clone().cpu())
    return found


def assemble(ranks: Sequence[Pieces]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' pieces. Each element is owned once; every copy equals it bit for bit."""
    whole: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        held = [rank[name] for rank in ranks if name in rank]
        shape = tuple(max(box.stop[dim] for box, _, _ in held) for dim in range(held[0][2].ndim))
        whole[name] = torch.full(shape, float("nan"), dtype=held[0][2].dtype)
        counts[name] = torch.zeros(shape, dtype=torch.int32)
        for box, owner, tensor in held:
            if owner:
                whole[name][box.slices] = tensor
                counts[name][box.slices] += 1
        assert bool((counts[name] == 1).all()), f"{name}: not every element has exactly one owner"
        for box, _, tensor in held:
            assert torch.equal(whole[name][box.slices], tensor), f"{name}: copies differ at {box}"
    return whole


def outcome(ranks: Sequence[RankOutcome]) -> Outcome:
    """Assemble the outcomes of all ranks into one; ranks must agree on losses and norms bit for bit."""
    first = ranks[0]
    for rank in ranks[1:]:
        assert rank.losses == first.losses and rank.norms == first.norms, "ranks disagree"
    return Outcome(
        first.losses,
        first.norms,
        assemble([rank.gradients for rank in ranks]),
        assemble([rank.initial for rank in ranks]),
        assemble([rank.parameters for rank in ranks]),
    )


def first_difference(a: Outcome, b: Outcome, *, tolerance: float) -> str | None:
    """Return the first thing that differs by more than ``tolerance``, relative to its largest element.

    Initial parameters must be equal bit for bit.
    """
    for what, difference in relative_differences(a, b):
        if not difference <= (0.0 if what.startswith("initial") else tolerance):
            return f"{what} differs by {difference:.2e}"
    return None


def relative_differences(a: Outcome, b: Outcome) -> Iterator[tuple[str, float]]:
    """Yield each loss, norm and tensor with its difference, relative to its largest element.

    A key bias is measured against a thousandth of the largest tensor of its kind: without rotation it shifts
    all scores alike, so its gradient is zero but for rounding.
    """
    for name in ("losses", "norms"):
        for step, (x, y) in enumerate(zip(getattr(a, name), getattr(b, name), strict=True)):
            yield f"{name}[{step}]: {x} and {y}", abs(x - y) / abs(x) if x != y else 0.0
    for kind in ("initial", "gradients", "parameters"):
        left, right = getattr(a, kind), getattr(b, kind)
        if left.keys() != right.keys():
            yield f"{kind}: names {sorted(left.keys() ^ right.keys())}", float("inf")
            return
        largest = {name: float(tensor.abs().max()) for name, tensor in left.items()}
        for name in left:
            scale = max(largest[name], 1e-3 * max(largest.values()) if name.endswith("k.bias") else 1e-300)
            yield f"{kind}: {name}", float((left[name] - right[name]).abs().max()) / scale
