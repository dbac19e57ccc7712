"""Compare the loss, outputs and gradients of two runs of a model, and observe a zoo model in a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoints import load, read_source
from ..data.batch import Batch
from ..layers import (
    ColumnParallelLinear,
    LayerNorm,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    reduce_from_tensor,
    set_auxiliary_losses,
    token_places,
)
from ..models import Implementation, ModelConfig
from ..parallel_state import Box, Layout, ParallelState, declarations, seed_of
from ..training.precision import Precision
from ..training.step import Step
from ..training.token_loss import TokenLoss
from ..training.zero_on_fsdp import shard_over_data
from .layouts import (
    Observation,
    Outputs,
    Pieces,
    as_pieces,
    assemble,
    differences,
    join,
    observe,
    on_ranks,
    random_rows,
)
from .recorder import Recorder, Seen

if TYPE_CHECKING:
    from ..models import CausalLM


@dataclass(frozen=True)
class Question:
    """Hold a model's folder, the layout to try, and the batch: ``samples`` x ``length`` random tokens.

    ``folder`` is a Hugging Face folder; the layout may be cut by hand with ``split``. ``device``: of every
    run, ``cpu`` or ``cuda``, where each rank has a GPU of its own. ``implementation``: as in a recipe.
    """

    folder: str
    layout: Layout = field(default_factory=Layout)
    split: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    samples: int = 4
    length: int = 32
    seed: int = 0
    device: str = "cpu"
    implementation: Implementation = "auto"

    def batch(self, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Return (input_ids, labels), both (samples, length) int64; ignored labels are spread unevenly."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "parity"))
        return random_rows(self.samples, self.length, config.vocab_size, generator)


@dataclass(frozen=True)
class Difference:
    """State how far a tensor is from the reference, relative to the reference's largest element."""

    kind: str
    name: str
    relative: float


@dataclass(frozen=True)
class Comparison:
    """Hold the differences of every output, the loss and every gradient, and the ``tolerance`` for each."""

    what: str
    tolerance: float
    differences: list[Difference]

    @property
    def first(self) -> Difference | None:
        """Return the first difference beyond the tolerance, in the order of computation; NaN differs."""
        return next((gap for gap in self.differences if not gap.relative <= self.tolerance), None)

    def worst(self, kind: str) -> Difference:
        """Return the largest difference of the outputs, the loss or the gradients."""
        return max((gap for gap in self.differences if gap.kind == kind), key=lambda gap: gap.relative)


def compare(reference: Observation, other: Observation, tolerance: float, what: str = "") -> Comparison:
    """Compare one step's loss, outputs and gradients. The pieces of ``reference`` hold all of each."""
    return Comparison(what, tolerance, [*_differences(reference, other)])


def _differences(reference: Observation, other: Observation) -> Iterator[Difference]:
    """Yield differences: of outputs in the order of computation, of the loss, of gradients in reverse.

    So the first large one is where things go wrong.
    """
    for name, parts in reference.outputs.items():
        if name in other.outputs:
            pieces: list[Pieces] = [{name: (box, True, part)} for box, part in other.outputs[name]]
            yield from (Difference("output", *gap) for gap in differences({name: join(parts)}, pieces))
    expected, loss = reference.losses[0], other.losses[0]
    yield Difference("loss", "the step", abs(expected - loss) / max(abs(expected), 1e-300))
    gradients = differences(assemble([reference.gradients]), [other.gradients])
    yield from (Difference("gradient", *gap) for gap in gradients)


#: Their outputs are whole along the features; those of a column-parallel linear are not.
_WHOLE = (RowParallelLinear, ReplicatedLinear, RMSNorm, LayerNorm, VocabParallelEmbedding)

#: Of a module's outputs: names, and the features that this rank has without padding, or ``None`` for all.
_Features = dict[str, list[tuple[str, slice | None]]]


def observe_ours(question: Question, *, timeout: float = 600) -> Observation:
    """Run the model on ``question.layout.world`` processes; ``timeout`` in seconds."""
    ranks = on_ranks(observe_rank, question.layout.world, question, timeout=timeout)
    outputs: Outputs = {}
    for rank in ranks:
        for name, parts in rank.outputs.items():
            outputs.setdefault(name, []).extend(parts)
    gradients = as_pieces(assemble([rank.gradients for rank in ranks]))
    return Observation(ranks[0].losses, gradients=gradients, outputs=outputs)


def observe_rank(question: Question) -> Observation:
    """Observe the loss and this rank's pieces of outputs and gradients, in a group of the layout's ranks."""
    state = ParallelState.start(question.layout, device=question.device)
    source = read_source(question.folder, implementation=question.implementation)
    family, config = source.family, source.model_config
    input_ids, labels = question.batch(config)
    rank_rows = len(input_ids) // question.layout.data
    rows = slice(state.data_index * rank_rows, (state.data_index + 1) * rank_rows)
    model = family.build(config, split=question.split, state=state, dtype=question.dtype)
    features = _features(model)

    def build() -> tuple[CausalLM, Step]:
        shard_over_data(model, state, Precision(question.dtype, question.dtype, question.dtype))
        model.to_empty(device=state.device)
        load(source, model)
        model.eval()  # no dropout: its masks are not those of transformers
        set_auxiliary_losses(model, balance=0.0, z_loss=0.0)  # the loss is that of the tokens alone
        return model, Step(model, TokenLoss(model), micro_batch=1, schedule=question.schedule)

    recorder = Recorder(model, features, first=rows.start, outputs_only=True)
    observation = observe(build, [Batch(input_ids[rows], labels[rows])], state)
    return replace(observation, outputs=_outputs(recorder.leave(), features, model, question.length))


def _features(model: CausalLM) -> _Features:
    """Return the modules whose outputs have a counterpart in every layout and in transformers."""
    state, declared, features = model.state, declarations(model), _Features()
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear):
            features[name] = []
            for key, part in module.parts.items():
                full = f"{name}.{key}" if key else name
                box = declared[f"{full}.weight"].box(state.layout, state.at)
                if part.rows_here is not None:
                    box = box.narrow(0, part.rows_here.start, part.rows_here.stop)
                features[name].append((full, box.slices[0]))
        elif isinstance(module, _WHOLE) or module in model.layers.values():
            features[name] = [(name, None)]
    if model.stage.last:
        head = declared[model.head_name]
        features[""] = [("logits", head.true_part(head.box(state.layout, state.at)).slices[0])]
    return features


def _outputs(observation: Seen, features: _Features, model: CausalLM, length: int) -> Outputs:
    """Return the outputs of micro-batches of one row, (1, length, features), or their pieces.

    Over context ranks the tokens are two runs of the whole sequence, or a part of these.
    """
    outputs: Outputs = {}
    modules = dict(model.named_modules())
    for event, output in observation.forward.items():
        if event.leaf >= len(features[event.module]):  # what transformers' blocks give beside hidden states
            continue
        name, own = features[event.module][event.leaf]
        of_another_stage = name == "logits" and event.call < len(model.stage.parts)
        if of_another_stage or output.ndim != 3:  # of single heads
            continue
        module = modules[event.module]
        if isinstance(module, RowParallelLinear) and module.entered:
            output = reduce_from_tensor(output, model.state)
        first, stop = (0, output.shape[2]) if own is None else (own.start, own.stop)
        for run, start in _runs(output.shape[1], length, model.state):
            piece = output[:, run, : stop - first]
            box = Box((event.micro, start, first), (event.micro + 1, start + piece.shape[1], stop))
            outputs.setdefault(name, []).append((box, piece.cpu()))
    return outputs


def _runs(tokens: int, length: int, state: ParallelState) -> Iterator[tuple[slice, int]]:
    """Yield the runs of a rank's tokens that lie together in the whole sequence, and where each begins."""
    places = token_places(length // state.context.size, state)
    begin = state.tensor.index * tokens if tokens < len(places) else 0
    places = places[begin : begin + tokens]
    breaks = ((places.diff() != 1).nonzero().flatten() + 1).tolist()
    for start, stop in pairwise([0, *breaks, tokens]):
        yield slice(start, stop), int(places[start])
