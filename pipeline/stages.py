"""Hold a rank's stages of a model, the zoo's or a user's: call them, send what they give, run a schedule.

What goes between stages follows from ``hidden_shape`` of the model, or from a trial run if it has none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layers import Stage
from ..parallel_state import BadInput, ParallelState, PeerFailed, refuse_held_twice, require, seed_of
from ..parallel_state.engine import accelerator
from ..parallel_state.engine.local_tensors import without_view
from ..system import counted
from .relay import StageOutput, Travels, as_one, exchange, sent_as, split_sent, tensors_of

if TYPE_CHECKING:
    from .driver import Pipeline

#: Tensors by name, each with the samples on dim 0.
Samples = Mapping[str, Tensor]
#: Returns a micro-batch's share of the step's loss, of the last stage's output and of its samples.
MicroBatchLoss = Callable[[Any, Samples], Tensor]


class Stages:
    """Run a model over micro-batches, with ``forward`` alone or under a schedule with ``train``.

    ``forward`` of the model is called with the samples that it names. In a pipeline a later stage is given
    what the stage before gave first; that is one tensor, or several of one dtype with the samples on dim 0,
    which are sent as one. A model may have, and else this is derived:

    - ``first_input``: the name of the sample that its first stage is given first, without a name;
    - ``hidden_shape(first input)``: the shape of what each stage sends, in ``dtype``; else a trial run;
    - ``uses(stage)``: the modules whose parameters a stage computes with; else all;
    - ``trains_all``: whether each forward uses all parameters of its stage; else not.

    ``of_stage(number)``: further keywords of one stage, asked for at each of its runs.
    """

    #: That of the step that runs under a schedule.
    loss: MicroBatchLoss

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        *,
        dtype: torch.dtype | None = None,
        of_stage: Callable[[int], Mapping[str, Any]] = lambda number: {},
    ) -> None:
        self.model: Any = model
        self.state, self.dtype, self._of_stage = state, dtype, of_stage
        self.parts = dict(zip(state.layout.stages_of(state.at.pipeline), parts_of(model, state), strict=True))
        self.first_input: str | None = getattr(model, "first_input", None)
        require(
            self.first_input is not None or not hasattr(model, "hidden_shape"), "step", "model.first_input",
            "the name of the sample that hidden_shape is given", "none",
        )  # fmt: skip
        self.has_last = state.layout.stages - 1 in self.parts
        self.takes = keyword_test(model)
        self._parameters = [*inspect.signature(model.forward).parameters]
        #: What each stage of the whole model sends, in order, for micro-batches of the present shape.
        self.outputs: list[StageOutput] = []
        self._assumed = False
        #: What the random numbers of the next runs follow from, if anything; the runs of each stage since.
        self._seed: int | None = None
        self._runs: dict[int, int] = {}
        #: The schedule for such micro-batches.
        self._pipeline: Pipeline | None = None

    @property
    def states_shapes(self) -> bool:
        """Tell whether ``fit`` is told all shapes, without a trial run."""
        return self.state.layout.pipeline == 1 or hasattr(self.model, "hidden_shape")

    def seed_runs(self, seed: int | None) -> None:
        """Let the random numbers of each later run of a stage follow from ``seed`` and the run's number; or,
        without one, from torch's generators.

        Runs through a stage's micro-batches then draw the same masks again, in whatever order stages run.
        """
        self._seed, self._runs = seed, dict.fromkeys(self.parts, 0)

    def fit(self, micro_batch: Samples) -> None:
        """Prepare for micro-batches of these shapes. Collective over all ranks, for a trial run."""
        layout, group, self._pipeline = self.state.layout, None, None
        if layout.pipeline == 1 or self._assumed:
            return
        if hasattr(self.model, "hidden_shape"):
            assert self.first_input is not None and self.dtype is not None
            sent = Travels(tuple(self.model.hidden_shape(micro_batch[self.first_input])), self.dtype)
            self.outputs = [(sent,)] * layout.stages
            return
        refuse_held_twice(self.model, self.state)
        self.outputs, group = [], self.state.pipeline.group
        for number in range(layout.stages):
            holder, error = layout.rank_of_stage(number), None
            answer: list[Any] = [None]
            if holder == self.state.at.pipeline:
                try:
                    answer = [self.describe(number, micro_batch)]
                except Exception as failure:
                    error, failed = failure, f"{type(failure).__name__}: {failure}"
                    failed = f"stage {number} failed in its trial run: {failed}"
                    answer = [failure if isinstance(failure, BadInput) else PeerFailed(failed)]
            dist.broadcast_object_list(answer, src=dist.get_global_rank(group, holder), group=group)
            if isinstance(answer[0], Exception):  # on every rank: none waits for a stage that failed
                raise error or answer[0]
            self.outputs += answer

    def assume(self, outputs: Sequence[StageOutput]) -> None:
        """Take for known what each stage of the model sends, in place of ``fit``: a plan starts no ranks."""
        self.outputs, self._assumed = [*outputs], True

    def describe(self, number: int, samples: Samples) -> StageOutput:
        """Return what a stage of this rank sends, from a run of it on zeros; those before it are known.

        Random state and model stay as they are.
        """
        device, rows = self.state.device, len(next(iter(samples.values())))
        with torch.no_grad(), accelerator.fork_random(device):
            zeros = [
                torch.zeros(sent.shape, dtype=sent.dtype, device=device)
                for sent in (self.outputs[number - 1] if number else ())
            ]
            self._seed = None
            output = self._run(number, tuple(zeros), samples)
        tensors = () if number == self.state.layout.stages - 1 else tensors_of(output)
        for tensor in tensors:
            require(
                tensor.shape[:1] == (rows,) and tensor.dtype == tensors[0].dtype, "stage", "output",
                f"tensors of one dtype, {counted(rows, 'sample')} on dim 0",
                f"{tensor.dtype} {[*tensor.shape]}",
            )  # fmt: skip
        return tuple(Travels(tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def run_stage(self, number: int, x: Tensor | None, micro_batch: Samples) -> Any:
        """Return the model's output of its last stage, and of others what is sent for one micro-batch.

        ``x``: what the stage before has sent; the first stage uses none.
        """
        received = split_sent(x, self.outputs[number - 1]) if number and x is not None else ()
        outputs = self._run(number, received, micro_batch)
        last = number == self.state.layout.stages - 1
        return outputs if last else without_view(as_one(tensors_of(outputs)))

    def forward(self, micro_batch: Samples) -> Any:
        """Return the model's output for one micro-batch on the rank of the last stage, elsewhere ``None``.

        Collective over the pipeline, in which ``fit`` comes first.
        """
        layout, own_rank, x = self.state.layout, self.state.at.pipeline, None
        if layout.pipeline == 1:
            return self._run(0, (), micro_batch)
        group = self.state.pipeline.group
        for number in self.parts:
            if number and (before := layout.rank_of_stage(number - 1)) != own_rank:
                sent = sent_as(self.outputs[number - 1])
                x = torch.empty(sent.shape, dtype=sent.dtype, device=self.state.device)
                exchange([(dist.irecv, x, before)], group)
            output = self.run_stage(number, x, micro_batch)
            if number == layout.stages - 1:
                return output
            x = output.to(self.outputs[number][0].dtype)
            if (after := layout.rank_of_stage(number + 1)) != own_rank:
                exchange([(dist.isend, x.contiguous(), after)], group)
        return None

    def train(self, samples: Samples, loss: MicroBatchLoss, *, schedule: str, micro_batch: int) -> None:
        """Run forward and backward of all samples in a pipeline, under a schedule. Collective."""
        if self._pipeline is None:
            from .driver import Pipeline  # imports torch's compiler: half a second

            count = len(next(iter(samples.values())))
            self._pipeline = Pipeline(self, schedule, count // micro_batch, micro_batch)
        self.loss = loss
        try:
            self._pipeline.step(samples)
        finally:
            del self.loss

    def _run(self, number: int, received: tuple[Tensor, ...], samples: Samples) -> Any:
        if self._seed is not None:
            torch.manual_seed(seed_of(self._seed, "stage", number, self._runs[number]))
            self._runs[number] += 1
        if not number and self.first_input is not None:
            received = (samples[self.first_input],)
        filled = self._parameters[: len(received)]  # a sample of such a name is not given as well
        keywords: dict[str, Any] = {
            name: sample for name, sample in samples.items() if self.takes(name) and name not in filled
        }
        if (part := self.parts[number]) is not None:
            keywords["stage"] = part
        return self.model(*received, **keywords, **self._of_stage(number))


@contextmanager
def evaluating(model: nn.Module, **settings: Any) -> Iterator[None]:
    """Turn dropout off for the ``with`` block, and let the model's attributes be those of ``settings``."""
    training, before = model.training, {name: getattr(model, name) for name in settings}
    model.eval()
    vars(model).update(settings)
    try:
        yield
    finally:
        model.train(training)
        vars(model).update(before)


def parts_of(model: nn.Module, state: ParallelState) -> tuple[Stage | None, ...]:
    """Return this rank's stages, which ``forward`` gets as ``stage=``; a single one is ``None``, not passed.

    ``BadInput`` if the layout has several stages a rank and the model has no matching ``stage``, or its
    forward takes none.
    """
    count = state.layout.virtual_stages
    if count == 1:
        return (None,)
    todo = "Keep self.stage = Stage.of(blocks, state=state), or take virtual_stages=1 with 1f1b or gpipe"
    stage = getattr(model, "stage", None)
    if not isinstance(stage, Stage):
        raise BadInput(
            "step", "model.stage", expected=f"a Stage of virtual_stages={count} parts",
            found="none" if stage is None else type(stage).__name__, todo=todo,
        )  # fmt: skip
    numbers, parts = state.layout.stages_of(state.at.pipeline), tuple(part.number for part in stage.parts)
    require(parts == numbers, "step", "model.stage", f"parts {[*numbers]}", parts, todo)
    require(
        "stage" in inspect.signature(model.forward).parameters, "step", "model.forward",
        f"a keyword stage, with virtual_stages={count}", "none",
        "Take stage=None; if it is given, run only that one of self.stage.parts",
    )  # fmt: skip
    return stage.parts


def keyword_test(model: nn.Module) -> Callable[[str], bool]:
    """Return a function that tells whether ``forward`` takes a keyword of a name."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lambda name: True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in kinds}.__contains__
