"""A run: build the model in its layout, start or resume, step, log, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import (
    Progress,
    load_training,
    load_weights,
    newest_checkpoint,
    read_source,
    save_training,
)
from ..models import CausalLM, Family, ModelConfig, family_of
from ..parallel_state import BadInput, Layout, ParallelState, clip_gradients, initialize, seed_of
from .batches import GlobalBatches, Mixture
from .data_parallel import check_zero, shard_over_data
from .metrics import MetricsLog, StepMetrics, Terminal
from .optimizer import learning_rate, make_adamw, set_learning_rate
from .precision import Precision, dtype_named
from .recipe import Recipe, read_config
from .step import TrainStep
from .tokens import TokenFile


@dataclass(frozen=True)
class Plan:
    """What a run will build, found out before any process starts."""

    family: Family
    config: ModelConfig
    hf_config: Mapping[str, Any]
    companions: list[Path]


def plan(recipe: Recipe) -> Plan:
    """Read the model's config and refuse a layout that cannot hold it; reads no weights, starts nothing."""
    companions: list[Path] = []
    if recipe.model.init_from is not None:
        source = read_source(recipe.model.init_from)
        raw: Mapping[str, Any] = source.config
        companions = list(source.companions)
        where = str(Path(recipe.model.init_from) / "config.json")
    else:
        raw = read_config(recipe.model)
        where = recipe.model.config if isinstance(recipe.model.config, str) else "recipe: model.config"
    if recipe.model.tokenizer is not None:
        companions = tokenizer_files(Path(recipe.model.tokenizer))
    family = family_of(raw, where)
    config = family.from_hf(raw, where)
    if recipe.data.sequence_length > config.max_position_embeddings:
        raise BadInput(
            "recipe",
            "data.sequence_length",
            expected=f"at most the model's {config.max_position_embeddings} positions",
            found=recipe.data.sequence_length,
        )
    layout = recipe.layout.layout
    check_zero(layout)
    # Building every stage on the meta device refuses each cut that is not even.
    family.declarations(config, layout, split=recipe.layout.split)
    hf_config = raw if recipe.model.init_from is not None else family.to_hf(config) | dict(raw)
    return Plan(family, config, hf_config, companions)


def tokenizer_files(folder: Path) -> list[Path]:
    """What a tokenizer folder holds, to be carried along with the weights."""
    if not folder.is_dir():
        raise BadInput(folder, expected="a tokenizer folder", found="no folder")
    wanted = (
        "tokenizer",
        "special_tokens",
        "vocab",
        "merges",
        "added_tokens",
        "chat_template",
        "generation_config",
    )
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.startswith(wanted))


def open_data(recipe: Recipe) -> GlobalBatches:
    """The run's batches. Raises ``BadInput`` for what the token files cannot give."""
    names = [recipe.data.tokens] if isinstance(recipe.data.tokens, str) else recipe.data.tokens
    files = [TokenFile.open(Path(name)) for name in names]
    weights = recipe.data.weights
    if weights is not None and len(weights) != len(files):
        raise BadInput("recipe", "data.weights", expected=f"{len(files)} numbers, one a file", found=weights)
    if len(files) == 1:
        tokens: TokenFile | Mixture = files[0]
    else:
        tokens = Mixture(list(zip(files, weights or [float(len(f.tokens)) for f in files], strict=True)))
    return GlobalBatches(tokens, recipe.data.sequence_length, recipe.data.global_batch, recipe.seed)


class Trainer:
    """One rank's part of a run. Collective: every rank makes one and calls ``run``."""

    def __init__(self, recipe: Recipe, state: ParallelState, *, quiet: bool = False) -> None:
        self.recipe, self.state, self.plan = recipe, state, plan(recipe)
        self.out = Path(recipe.out)
        self.first = state.rank == 0
        self.terminal = Terminal(steps=recipe.steps, every=recipe.log_every, quiet=quiet or not self.first)
        self.batches = open_data(recipe)
        if self.batches.vocab_size > self.plan.config.vocab_size:
            raise BadInput(
                "recipe",
                "data.tokens",
                expected=f"ids below the model's vocab_size={self.plan.config.vocab_size}",
                found=f"token files for a vocabulary of {self.batches.vocab_size}",
            )
        master = dtype_named(recipe.dtype)
        self.precision = Precision(master, dtype_named(recipe.compute or recipe.dtype), master)
        self.model = self._build()
        optimizer = recipe.optimizer
        self.optimizer = make_adamw(
            self.model,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.step = TrainStep(
            self.model,
            micro_batch=recipe.data.micro_batch,
            schedule=recipe.layout.schedule,
            label_smoothing=optimizer.label_smoothing,
            dtype=self.precision.compute,
        )

    def _build(self) -> CausalLM:
        model = self.plan.family.build(
            self.plan.config, split=self.recipe.layout.split, state=self.state, dtype=self.precision.master
        )
        shard_over_data(model, self.state, self.precision)
        model.to_empty(device=self.state.device)
        return model

    def run(self, after_step: Callable[[StepMetrics], None] | None = None) -> list[StepMetrics]:
        """Train from the newest complete checkpoint, or from the start, to the last step; the metrics of its
        steps.
        """
        start = self._start()
        stop = min(self.recipe.steps, self.recipe.stop_after or self.recipe.steps)
        log = MetricsLog(self.out / "metrics.jsonl", start=start) if self.first else None
        done = []
        for number in range(start, stop):
            metrics = self._one_step(number)
            done.append(metrics)
            self.terminal.step(metrics)
            if log is not None:
                log.write(metrics)
            if after_step is not None:
                after_step(metrics)
            every = self.recipe.checkpoint.every
            if number + 1 == stop or (every and (number + 1) % every == 0):
                self._save(number + 1)
        if log is not None:
            log.close()
        return done

    def _start(self) -> int:
        """Resume if there is a checkpoint, else load or draw the first weights; the step to begin with."""
        newest = newest_checkpoint(self.checkpoints, self.state, say=self.terminal.say)
        if newest is not None:
            progress = load_training(newest, self.model, self.optimizer, self.plan.family, self.plan.config)
            self._check_progress(newest, progress)
            self.terminal.say(f"resumed from {newest} (written by {progress.layout})")
            return progress.step
        if self.recipe.model.init_from is not None:
            load_weights(self.recipe.model.init_from, self.model, self.plan.family, self.plan.config)
            self.terminal.say(f"weights from {self.recipe.model.init_from}")
        else:
            initialize(self.model, self.recipe.seed, state=self.state)
        return 0

    def _check_progress(self, newest: Path, progress: Progress) -> None:
        """A resumed run goes on with the same samples in the same order, or not at all."""
        for key, value in self._identity().items():
            if progress.data.get(key) != value:
                raise BadInput(
                    newest,
                    f"data.{key}",
                    expected=progress.data.get(key),
                    found=value,
                    todo="Resume with the data that the run began with, or start a new run with init_from",
                )

    def _identity(self) -> dict[str, Any]:
        """What fixes the order of samples, besides the step."""
        return {
            "fingerprint": self.batches.fingerprint,
            "sequence_length": self.recipe.data.sequence_length,
            "global_batch": self.recipe.data.global_batch,
            "seed": self.recipe.seed,
        }

    def _one_step(self, number: int) -> StepMetrics:
        recipe, state = self.recipe, self.state
        began = time.perf_counter()
        # Dropout's masks follow from here: the same on the ranks of one tensor group, else different.
        torch.manual_seed(seed_of(recipe.seed, "step", number, state.data_index, state.at.pipeline))
        input_ids, labels = self.batches.batch(number, state.data_index, state.layout.data)
        lr = learning_rate(
            recipe.optimizer.schedule,
            number,
            peak=recipe.optimizer.lr,
            warmup=recipe.optimizer.warmup,
            total=recipe.steps,
            minimum=recipe.optimizer.lr * recipe.optimizer.minimum_ratio,
        )
        set_learning_rate(self.optimizer, lr)
        loss = self.step(input_ids.to(state.device), labels.to(state.device))
        norm = clip_gradients(self.model, recipe.optimizer.clip, state=state)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value, grad_norm = float(loss), float(norm)
        seconds = time.perf_counter() - began
        tokens = recipe.data.global_batch * recipe.data.sequence_length
        return StepMetrics(number, value, grad_norm, lr, tokens, tokens / seconds, seconds)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def _save(self, step: int) -> None:
        layout: Layout = self.state.layout
        path = save_training(
            self.checkpoints,
            self.model,
            self.optimizer,
            family=self.plan.family,
            config=self.plan.config,
            hf_config=self.plan.hf_config,
            split=self.recipe.layout.split,
            progress=Progress(step=step, layout=layout, data=self._identity()),
            companions=self.plan.companions,
            keep=self.recipe.checkpoint.keep,
        )
        self.terminal.say(f"COMMITTED {path}")
