"""Observe a zoo model in a layout: the pieces of each module's output, and their places in the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ...checkpoints import load_weights, read_source
from ...data.batch import Batch
from ...layers import (
    ColumnParallelLinear,
    LayerNorm,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_auxiliary_losses,
    token_places,
)
from ...models import CausalLM
from ...parallel_state import Box, Declaration, ParallelState, declarations
from ...ranks.pool import run_parallel
from ...training.precision import Precision
from ...training.step import TrainStep
from ...training.zero_on_fsdp import shard_over_data
from ..layouts import Pieces, assemble, observe
from .case import Observation, Question

#: Their outputs are whole along the features; those of a column-parallel linear are not.
_WHOLE = (RowParallelLinear, ReplicatedLinear, RMSNorm, LayerNorm, VocabParallelEmbedding)
_Outputs = dict[str, list[tuple[Box, Tensor]]]


def observe_ours(question: Question, *, timeout: float = 600) -> Observation:
    """Run the model on ``question.layout.world`` processes; ``timeout`` in seconds."""
    ranks = run_parallel(observe_rank, question.layout.world, question, timeout=timeout)
    outputs: _Outputs = {}
    for _, found, _ in ranks:
        for name, parts in found.items():
            outputs.setdefault(name, []).extend(parts)
    return Observation(ranks[0][0], outputs, assemble([gradients for _, _, gradients in ranks]))


def observe_rank(question: Question) -> tuple[float, _Outputs, Pieces]:
    """Return, in a group of the layout's ranks, the loss and this rank's pieces of outputs and gradients."""
    state = ParallelState.start(question.layout)
    source = read_source(question.folder)
    family, config = source.family, source.model_config
    input_ids, labels = question.batch(config)
    each = len(input_ids) // question.layout.data
    rows = slice(state.data_index * each, (state.data_index + 1) * each)
    outputs: _Outputs = {}

    def build() -> tuple[CausalLM, TrainStep]:
        model = family.build(config, split=question.split, state=state, dtype=question.dtype)
        shard_over_data(model, state, Precision(question.dtype, question.dtype, question.dtype))
        model.to_empty(device=state.device)
        load_weights(question.folder, model, family, config)
        model.eval()  # no dropout: its masks are not those of transformers
        set_auxiliary_losses(model, balance=0.0, z_loss=0.0)  # the loss is that of the tokens alone
        _Look(model, question, rows.start, outputs)
        return model, TrainStep(model, micro_batch=1, schedule=question.schedule, dtype=question.dtype)

    seen = observe(build, [Batch(input_ids[rows], labels[rows])], state)
    return seen.losses[0], outputs, seen.gradients


class _Look:
    """Hook the modules whose outputs have a counterpart in every layout and in transformers."""

    def __init__(self, model: CausalLM, question: Question, first_row: int, outputs: _Outputs) -> None:
        self.state, self.question, self.first_row = model.state, question, first_row
        self.outputs = outputs
        self.seen: Counter[str] = Counter()
        stated = declarations(model)
        for name, module in model.named_modules():
            places: list[tuple[str, Box | None]] = []
            if isinstance(module, ColumnParallelLinear):
                places = [*_products(name, module, stated, self.state)]
            elif isinstance(module, _WHOLE) or module in model.layers.values():
                places = [(name, None)]
            if places:
                module.register_forward_hook(self._hook(places))
        if model.stage.last:
            tied = "embed.weight" if model.config.tie_word_embeddings else "head.weight"
            box = stated[tied].box(self.state.layout, self.state.at)
            note = self._hook([("logits", stated[tied].true_part(box))])

            def logits(module: nn.Module, arguments: Any, told: dict[str, Any], given: Any) -> None:
                if (told.get("stage") or model.stage).last:
                    note(module, arguments, given)

            model.register_forward_hook(logits, with_kwargs=True)

    def _hook(self, places: list[tuple[str, Box | None]]) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, arguments: Any, given: Any) -> None:
            for (name, rows), output in zip(
                places, given if isinstance(given, tuple) else (given,), strict=True
            ):
                self._note(name, rows, output.detach())

        return look

    def _note(self, name: str, rows: Box | None, output: Tensor) -> None:
        """Note a micro-batch's output: (1, length, features), or a piece of the last two dims.

        Over context ranks the tokens are two runs of the whole sequence, or a part of these.
        """
        if output.ndim != 3:  # of single heads
            return
        held = self.outputs.setdefault(name, [])
        self.seen[name] += 1
        sample, length = self.first_row + self.seen[name] - 1, output.shape[1]
        places = token_places(self.question.length // self.state.context_size, self.state)
        begin = self.state.tensor_index * length if length < len(places) else 0
        places = places[begin : begin + length]
        first = 0 if rows is None else rows.start[0]
        features = output.shape[2] if rows is None else rows.shape[0]  # without padding
        breaks = ((places.diff() != 1).nonzero().flatten() + 1).tolist()
        for start, stop in pairwise([0, *breaks, length]):
            at = int(places[start])
            box = Box((sample, at, first), (sample + 1, at + stop - start, first + features))
            held.append((box, output[:, start:stop, :features].clone()))


def _products(
    name: str, module: ColumnParallelLinear, stated: dict[str, Declaration], state: ParallelState
) -> Iterator[tuple[str, Box]]:
    """Yield each product's name and its rows of the weight, which are the output's features."""
    outputs = [""] if isinstance(module.out_features, int) else module.out_features
    for key, part in zip(outputs, module.parts, strict=True):
        full = f"{name}.{key}" if key else name
        box = stated[f"{full}.weight"].box(state.layout, state.at)
        if part.slice is not None:
            box = box.narrow(0, part.slice.start, part.slice.stop)
        yield full, box
