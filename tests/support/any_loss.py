"""A decoder that the zoo does not know, and losses that no recipe has, for steps in drawn layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trilith.layers import (
    Attention,
    AttentionInputs,
    Experts,
    GatedMLP,
    LayerNorm,
    MoE,
    Stage,
    TopKRouter,
    VocabParallelEmbedding,
    VocabParallelHead,
    attention_kinds,
    gather_from_tensor,
    sum_over_context,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from trilith.parallel_state import Layout, ParallelState, alone_or, clip_gradients, initialize
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind
from trilith.testing.layouts import Observation, observe, random_rows, roughen
from trilith.training import FunctionLoss, Loss, Precision, Step, Sums, Term, shard_batch, shard_over_data
from trilith.training.loss import Scales
from trilith.training.samples import Samples

from support.strangers import SAMPLES, STRANGERS, STUBS, WORDS, Stranger, next_word, words_that_count

D, RUNGS, LENGTH = 8, 4, 8
FP64 = Precision(torch.float64, torch.float64, torch.float64)
#: Models that are not ours, and losses of one that is made of our layers.
NAMES = sorted([*STRANGERS, "contrast", "preference", "routers"])
BOTH = MappingProxyType({"tokens": 1, "labels": 1})


class Rung(nn.Module):
    """Attention, and experts or one net."""

    def __init__(self, routed: bool, dropout: float, *, state: ParallelState | None) -> None:
        super().__init__()
        self.calm = LayerNorm(D, state=state)
        self.look = Attention(D, heads=4, head_dim=4, rotary=None, state=state)
        self.still, self.drop = LayerNorm(D, state=state), nn.Dropout(dropout)
        if routed:
            router = TopKRouter(D, 4, 2, balance=0.1, z_loss=0.05, state=state)
            self.think: nn.Module = MoE(router, Experts(4, D, 2 * D, state=state), state=state)
        else:
            self.think = GatedMLP(D, 2 * D, state=state)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        x = x + self.look(self.calm(x), inputs)
        y: Tensor = x + self.drop(self.think(self.still(x)))
        return y


class Ladder(nn.Module):
    """A causal decoder that states nothing of itself; it gives logits, or if ``pooled`` a vector of a row."""

    def __init__(
        self,
        *,
        state: ParallelState | None = None,
        routed: bool = False,
        pooled: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.ranks, self.stage, self.pooled = alone_or(state), Stage.of(RUNGS, state=state), pooled
        if self.stage.first:
            self.words = VocabParallelEmbedding(WORDS, D, state=state)
        self.rungs = nn.ModuleDict({str(i): Rung(routed, dropout, state=state) for i in self.stage.blocks})
        self.kinds = attention_kinds(self.rungs)
        if self.stage.last:
            self.last = LayerNorm(D, state=state)
        if self.stage.last and not pooled:
            self.voice = VocabParallelHead(D, WORDS, state=state)

    def forward(self, x: Any = None, *, tokens: Tensor, stage: Stage | None = None) -> Tensor:
        stage = stage or self.stage
        x = self.words(tokens) if stage.first else x
        inputs = AttentionInputs(None, like=x, layers=self.kinds, state=self.ranks)
        for number in stage.blocks:
            x = self.rungs[str(number)](x, inputs)
        if not stage.last:
            return cast(Tensor, x)
        x = self.last(x)
        if not self.pooled:
            return cast(Tensor, self.voice(x))
        x = gather_from_tensor(x, self.ranks, dim=1) if self.ranks.sequence else x
        return sum_over_context(x.sum(1), self.ranks)


class Preference(Loss):
    """DPO (Rafailov et al. 2023) with the next token of the chosen row; two rows in turn are a pair."""

    sequence, group = BOTH, 2

    def __init__(self, state: ParallelState) -> None:
        self.state = state
        self.terms = {"preference": Term(), "next_token": Term(0.3), "wins": Term(in_total=False)}

    def count(self, samples: Samples) -> dict[str, Tensor | float]:
        pairs = len(samples["labels"]) // 2
        return {"wins": pairs, "next_token": valid_tokens(samples["labels"][::2]), "preference": pairs}

    def __call__(self, output: Tensor, samples: Samples, scales: Scales) -> Sums:
        losses = vocab_parallel_cross_entropy(output, samples["labels"], WORDS, state=self.state)
        gains = sum_over_context(-losses.sum(1), self.state) - samples["reference"]
        margins = gains[::2] - gains[1::2]
        sums = {
            "preference": -F.logsigmoid(0.5 * margins).sum(),
            "next_token": losses[::2].sum(),
            "wins": (margins.detach() > 0).double().sum(),
        }
        return Sums({name: value * scales[name] for name, value in sums.items()})


class Contrast(Loss):
    """InfoNCE over all pairs of the step, in micro-batches; a row's partner is the one after it."""

    terms = MappingProxyType({"contrast": Term()})
    sequence, group = MappingProxyType({"tokens": 1}), 2

    def count(self, samples: Samples) -> dict[str, Tensor | float]:
        return {"contrast": len(samples["tokens"]) / 2}

    def collect(self, output: Tensor, samples: Samples) -> Tensor:
        return output

    def whole_step(self, rows: Tensor, mine: slice, samples: Samples) -> Samples:
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            losses = contrast(rows)
            (gradients,) = torch.autograd.grad(losses.sum(), rows)
        values = torch.stack([losses.detach(), torch.zeros_like(losses)], 1).flatten()
        return {"gradients": gradients[mine], "values": values[mine], "seen": rows.detach()[mine]}

    def __call__(self, output: Tensor, samples: Samples, scales: Scales) -> Sums:
        assert torch.allclose(output, samples["seen"], rtol=1e-12, atol=1e-13), "other masks"
        toward = (output * samples["gradients"]).sum()
        value = toward - toward.detach() + samples["values"].sum()
        return Sums({"contrast": value * scales["contrast"]})


def contrast(rows: Tensor) -> Tensor:
    query, key = F.normalize(rows, dim=1).view(-1, 2, D).unbind(1)
    return F.cross_entropy(query @ key.T / 0.2, torch.arange(len(query)), reduction="none")


@dataclass(frozen=True)
class Trial:
    """State a loss, a layout, a schedule, and the samples of a micro-batch."""

    loss: str
    layout: Layout = field(default_factory=Layout)
    schedule: str = "1f1b"
    micro_batch: int = 2
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.loss}-{self.layout}-{self.schedule}-{self.micro_batch}"


def under_every_schedule(name: str, *, whole: bool = False) -> list[Trial]:
    """Return layouts of four ranks: every other schedule, and for the next name the ones between, with one of
    ZeRO 0 to 3, tensor ranks, and context ranks if the loss cuts sequences, in turn; or if ``whole`` each
    schedule with each of them. Last come layouts without a pipeline: replicas of shards, for one of the
    names, and tensor ranks with context ranks.
    """
    beside: list[dict[str, Any]] = [{"data": 2, "zero": zero} for zero in range(4)]
    beside += [{"tensor": 2, "sequence": True}]
    if name not in STRANGERS:
        beside += [{"context": 2}, {"context": 2, "ring": True}]
    first, trials = NAMES.index(name), list[Trial]()
    for number, schedule in enumerate(SCHEDULE_NAMES if whole else SCHEDULE_NAMES[first % 2 :: 2]):
        kind = schedule_kind(schedule)
        stages: dict[str, Any] = {
            "pipeline": 2,
            "virtual_stages": kind.virtual_stages,
            "v_shape": kind.v_shape,
        }
        for axes in beside if whole else [beside[(number + 3 * first) % len(beside)]]:
            layout = Layout.of(**stages, **axes)
            trials.append(Trial(name, layout, schedule, 4 // layout.data))
    stages_of_zero = (1, 2, 3) if whole else (2,) * (first == 2)
    flat = [Layout.of(data=4, zero=zero, data_replicate=2) for zero in stages_of_zero]
    if name not in STRANGERS:
        flat.append(Layout.of(tensor=2, sequence=True, context=2, ring=whole))
    return [*trials, *(Trial(name, layout) for layout in flat)]


def batch(number: int) -> dict[str, Tensor]:
    """Return rows of tokens of unequal numbers of labels, with a number of each row beside them."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = random_rows(SAMPLES, LENGTH, WORDS, generator)
    reference = torch.randn(SAMPLES, generator=generator, dtype=torch.float64) - 20
    return {"tokens": tokens, "labels": labels, "reference": reference}


def loss_of(trial: Trial, state: ParallelState) -> Loss:
    if trial.loss in ("routers", "next"):
        return FunctionLoss(next_word, count=words_that_count, sequence=BOTH)
    return Preference(state) if trial.loss == "preference" else Contrast()


def train(trials: Sequence[Trial]) -> list[tuple[Observation, list[dict[str, float]]]]:
    """Evaluate, and take two steps of each trial; return what this rank saw, and each step's terms."""
    torch.set_default_dtype(torch.float64)
    return [_train(trial) for trial in trials]


def stranger_of(trial: Trial, state: ParallelState) -> Stranger:
    if trial.loss in {**STRANGERS, **STUBS}:
        return {**STRANGERS, **STUBS}[trial.loss]
    kind: dict[str, Any] = {
        "routed": trial.loss == "routers",
        "pooled": trial.loss == "contrast",
        "dropout": trial.dropout,
    }
    return Stranger(partial(Ladder, **kind), partial(loss_of, trial, state), batch)


def evaluated(trial: Trial, step: Step, samples: Samples) -> dict[str, float]:
    """Return the loss of samples, and of rows of half the length if the model is ours; nothing changes."""
    before, batches = torch.random.get_rng_state(), {"held out": samples}
    if trial.loss not in {**STRANGERS, **STUBS}:
        halves = {name: rows[:, : LENGTH // 2] if rows.ndim > 1 else rows for name, rows in samples.items()}
        batches["of half the length"] = halves
    found = {name: float(step.evaluate(rows).loss) for name, rows in batches.items()}
    assert torch.equal(before, torch.random.get_rng_state()) and step.model.training
    assert all(parameter.grad is None for parameter in step.model.parameters())
    return found


def _train(trial: Trial) -> tuple[Observation, list[dict[str, float]]]:
    state = ParallelState.start(trial.layout)
    terms, stranger = list[dict[str, float]](), stranger_of(trial, state)

    def build() -> tuple[nn.Module, Callable[[Samples], Tensor]]:
        model = shard_over_data(stranger.build(state=state), state, FP64)
        initialize(model, 3, state=state)
        roughen(model, 3, state)
        torch.manual_seed(100 * state.data_index + 10 * state.context.index + state.at.pipeline)
        how: dict[str, Any] = {"micro_batch": trial.micro_batch, "schedule": trial.schedule, "state": state}
        step = Step(model, stranger.loss(), **how)

        def once(samples: Samples) -> Tensor:
            held_out = {} if terms else evaluated(trial, step, samples)
            result = step.launch(samples)
            step.refuse(result)
            if not terms and not trial.dropout:
                assert abs(held_out["held out"] - float(result.loss)) <= 1e-12 * float(result.loss)
            terms.append({name: float(term) for name, term in result.terms.items()} | held_out)
            return result.loss

        return model, once

    def clip(model: nn.Module) -> Tensor:
        return clip_gradients(model, 0.5, state=state)

    batches = [shard_batch(stranger.batch(number), state) for number in range(2)]
    return observe(build, batches, state, lr=1e-2, clip=clip), terms
