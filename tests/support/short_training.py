"""Train a zoo model for a few steps in one layout, and return whole tensors to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trilith.data.batch import Batch
from trilith.layers import Balancing, Scaling, compile_blocks, use_float8
from trilith.models import CausalLM, Family, LoraConfig, ModelConfig, adapted, family_of
from trilith.parallel_state import Layout, ParallelState, clip_gradients, initialize, seed_of
from trilith.parallel_state.engine import to_empty
from trilith.recipes.section import ParameterGroup
from trilith.recipes.sections import MemorySection
from trilith.testing import run_parallel
from trilith.testing.layouts import (
    Observation,
    as_pieces,
    assemble,
    differences,
    observe,
    random_rows,
    roughen,
)
from trilith.training.build import spare_memory
from trilith.training.optimizer import assign, freeze, make_adamw, names_of
from trilith.training.precision import Precision
from trilith.training.step import Step
from trilith.training.token_loss import TokenLoss
from trilith.training.zero_on_fsdp import resting_device, shard_over_data

from support.shared_gpu import share_gpu


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
    """Hold each step's loss and gradient norm, the balance of experts over all steps (``balance_of``), the
    first step's gradients, the first and last parameters.
    """

    losses: list[float]
    norms: list[float]
    balance: list[float]
    gradients: dict[str, Tensor]
    initial: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """Hold what a rank trains with; the weights are not filled yet."""

    model: CausalLM
    step: Step
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
    spare_memory(model, case.memory, case.memory.stated_chunk, model.state)
    shard_over_data(model, state, precision, offload=case.memory.offload)
    to_empty(model, resting_device(state, offload=case.memory.offload))
    loss = TokenLoss(
        model,
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        mtp=case.mtp,
        chunk=case.memory.stated_chunk,
    )
    step = Step(model, loss, micro_batch=case.micro_batch, schedule=case.schedule)
    return Parts(model, step, make_adamw(model, lr=case.lr), family, config)


def train_rank(case: Case) -> tuple[Observation, list[float]]:
    """Train inside a process group of ``case.layout.world`` ranks; return what this rank holds in the end,
    and the balance of experts.
    """
    if case.device == "cuda":
        share_gpu()
    state = ParallelState.start(case.layout, device="cuda:0" if case.device == "cuda" else case.device)

    def build() -> tuple[CausalLM, Step]:
        parts = build_rank(case, state)
        initialize(parts.model, case.seed, state=state)
        roughen(parts.model, case.seed, state)
        return parts.model, parts.step

    batches = (rank_batch(case, number, state) for number in range(case.steps))
    clip, balance = partial(clip_gradients, max_norm=case.clip, state=state), list[float]()
    seen = observe(
        build, batches, state, lr=case.lr, clip=clip,
        then=lambda model, _: balance.extend(balance_of(model, state)),
    )  # fmt: skip
    dist.barrier()
    return seen, balance


def balance_of(model: nn.Module, state: ParallelState) -> list[float]:
    """Return what a run's metrics say of its experts, over all steps so far: z-loss, load and balance loss;
    this is not there where nobody asks for it over context ranks.
    """
    balance = Balancing(model, state=state).after_step()
    if balance is None:
        return []
    if balance.balance is None:
        assert state.layout.context > 1
        return [balance.z_loss, balance.load]
    return [balance.z_loss, balance.load, balance.balance]


def rank_batch(case: Case, step: int, state: ParallelState) -> Batch:
    """Return this data rank's rows of a step, on the host."""
    vocab_size = int(case.config["vocab_size"])
    return batch(case, step, vocab_size).split(case.samples // case.layout.data)[state.data_index]


def batch(case: Case, step: int, vocab_size: int) -> Batch:
    """Return the whole batch of a step; ignored labels and document starts are spread unevenly."""
    generator = torch.Generator().manual_seed(seed_of(case.seed, "batch", step))
    input_ids, labels = random_rows(case.samples, case.length, vocab_size, generator)
    positions = None
    if case.documents:
        places = torch.arange(case.length).expand(case.samples, -1)
        starts = torch.rand(case.samples, case.length, generator=generator) < 0.2
        positions = places - torch.where(starts, places, 0).cummax(1).values
    return Batch(input_ids, labels, positions)


def outcome(of_ranks: Sequence[tuple[Observation, list[float]]]) -> Outcome:
    """Assemble the outcomes of all ranks into one; ranks must agree on all numbers bit for bit."""
    ranks, (balance, *balances) = [rank for rank, _ in of_ranks], [balance for _, balance in of_ranks]
    first = ranks[0]
    assert all(each == balance for each in balances), "ranks disagree"
    for rank in ranks[1:]:
        assert rank.losses == first.losses and rank.norms == first.norms, "ranks disagree"
    return Outcome(
        first.losses,
        first.norms,
        balance,
        assemble([rank.gradients for rank in ranks]),
        assemble([rank.initial for rank in ranks]),
        assemble([rank.parameters for rank in ranks]),
    )


def train_each(cases: Sequence[Case]) -> list[tuple[Observation, list[float]]]:
    observations = []
    for case in cases:
        torch.manual_seed(0)  # for the masks of dropout, as in a call of its own
        observations.append(train_rank(case))
    return observations


def outcomes(cases: Sequence[Case]) -> list[Outcome]:
    """Train cases of as many ranks in one call, and return what each gives."""
    ranks = run_parallel(train_each, cases[0].layout.world, cases, timeout=240)
    return [outcome(each) for each in zip(*ranks, strict=True)]


def first_difference(a: Outcome, b: Outcome, *, tolerance: float) -> str | None:
    """Return the first thing that differs by more than ``tolerance``, relative to its largest element.

    Initial parameters must be equal bit for bit.
    """
    for what, difference in relative_differences(a, b):
        if not difference <= (0.0 if what.startswith("initial") else tolerance):
            return f"{what} differs by {difference:.2e}"
    return None


def relative_differences(a: Outcome, b: Outcome) -> Iterator[tuple[str, float]]:
    """Yield each number and tensor with its difference, relative to its largest element."""
    for name in ("losses", "norms", "balance"):
        both = getattr(a, name), getattr(b, name)
        for step, (x, y) in enumerate(zip(*both, strict=name != "balance")):
            yield f"{name}[{step}]: {x} and {y}", abs(x - y) / abs(x) if x != y else 0.0
    for kind in ("initial", "gradients", "parameters"):
        for name, difference in differences(getattr(a, kind), [as_pieces(getattr(b, kind))]):
            yield f"{kind}: {name}", difference
