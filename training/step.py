"""Run one step's forward and backward of any model under any loss, in any layout; gradients ready to clip."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.batch import BatchParts
from ..layers import routers, set_auxiliary_scale
from ..layers.host_numbers import send
from ..models.patterns import checked
from ..parallel_state import (
    BadInput,
    GradientSums,
    ParallelState,
    check_state,
    divide_gradients,
    has_gradients,
    refuse_foreign,
    refuse_untrained,
    require,
    state_of,
)
from ..parallel_state.engine import is_sharded
from ..parallel_state.engine.gathered_weights import gathered_once
from ..pipeline import Stages, check_schedule, evaluating, schedule_kind
from ..system import counted, literal
from .loss import Loss, as_loss, refuse_uncut
from .precision import computing, dtypes_of
from .samples import Samples, count_samples, cut_over_context, rows_of_step, some_samples
from .step_sums import StepInputs, StepReport, StepResult, StepSums, checked_counts
from .zero_on_fsdp import before_backward


class Step:
    """Compute the gradients of a step's mean loss for any model: ``step(batch)`` leaves them in ``.grad``.

    ``batch``: this data rank's samples, tensors by name with the samples on dim 0 (``shard_batch``), or what
    ``loss.prepare`` takes (of ``TokenLoss`` a ``Batch``). Leave them on the host: they are checked there
    before they are copied. Context ranks are given whole rows. The model is called with the samples that its
    ``forward`` names (``pipeline.Stages``). With more than one data rank it must have been through
    ``shard_over_data``, which also says in what is computed and summed. Of ``BatchParts``, for a loss of
    tokens without a pipeline or without a backward, a micro-batch is asked for after the one before it.

    ``loss``: a ``Loss``, or a function that returns a sum and a count for a micro-batch (``FunctionLoss``).
    Each term is divided by its count over all micro-batches and data ranks, so that the mean is the same
    number in every layout. ``micro_batch``: number of samples. ``schedule``: one of ``SCHEDULE_NAMES``, of a
    pipeline. ``unused``: a pattern over names of parameters that a step may leave without a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        *,
        micro_batch: int,
        schedule: str = "1f1b",
        unused: str | None = None,
        state: ParallelState | None = None,
    ) -> None:
        whole = type(micro_batch) is int and micro_batch >= 1
        require(whole, "step", "micro_batch", "a whole number of 1 or more", literal(micro_batch))
        checked(unused or "", "step", "unused", "a pattern over names of parameters")
        self.model, self.state = model, state_of(model, state)
        self.loss, self.micro_batch = as_loss(loss, self.state), micro_batch
        self.schedule, self.unused = schedule, unused
        self.dtype, self.reduce = dtypes_of(model)
        self.device = self.state.device
        if self.state.mesh is None:  # one device, which may be another than the host
            self.device = next((parameter.device for parameter in model.parameters()), self.device)
        expected = f"a multiple of {self.loss.group}, the rows that the loss takes together"
        require(micro_batch % self.loss.group == 0, "step", "micro_batch", expected, micro_batch)
        self._check_model()
        least = schedule_kind(schedule).least_micro_batches(self.state.layout.pipeline)
        check_schedule(schedule, self.state.layout, least)
        self.stages = Stages(model, self.state, dtype=self.dtype)
        if self.loss.collect is not None and self.state.layout.data > 1:
            _ = self.state.data_group  # every rank makes it; those of the last stage use it
        #: The shapes of an earlier step's samples.
        self._shapes: dict[str, torch.Size] = {}

    def __call__(self, batch: Any, *, scale: float = 1.0) -> Tensor:
        """Run forward and backward of ``batch``; return the loss, the same scalar on every rank.

        ``scale``, a power of two and the same on all ranks, multiplies the loss before the backward. A step
        in which nothing counts has loss 0 and zero gradients. Raises ``NotTrained``, on every rank, if a
        trained parameter has no gradient, or if all gradients are zero and the loss is not; and
        ``BadInput``, on every rank, for samples that one rank cannot use, data ranks with different numbers
        of them, gradients of an earlier step that are not zero, and a loss that returns a mean.
        """
        result = self.launch(batch, scale=scale)
        self.refuse(result)
        return result.loss

    def launch(self, batch: Any, *, scale: float = 1.0) -> StepResult:
        """Do what a call does, without waiting for the device, and without refusing what only shows there:
        ``Update`` waits once, and refuses it before it changes anything. So does ``refuse``.
        """
        inputs = self._agree(batch, self.loss, scale)
        sums = StepSums(self.loss, inputs.scales)
        set_auxiliary_scale(self.model, scale / inputs.rows)
        with computing(self.model):
            if inputs.reshaped:
                shapes, self._shapes = self._shapes, {}
                self.stages.fit(some_samples(inputs.samples, 0, self.micro_batch))
                self._shapes = shapes
            inputs = self._with_whole_step(inputs, self.loss, self.stages)
            self._backward(inputs, sums)
        parameters = self.gradients.count(unused=re.compile(self.unused or "(?!)").search)
        result, divisor = sums.total(
            self.state, self.device, scale=scale, parameters=parameters, unused=self.unused
        )
        self.gradients.finalize(reduce=self.reduce)
        if divisor is not None:
            divide_gradients(self.model, divisor)
        return result

    def refuse(self, result: StepResult, *, alike: bool = True) -> None:
        """Refuse a step that no update may follow, on every rank alike. Waits for the device.

        ``alike``: also one whose losses differ between the ranks of a tensor group.
        """
        checks = result.checks.tolist()
        result.refuse_faults(checks, alike=alike)
        refuse_untrained(self.model, float(result.loss), checks[:2], unused=self.unused, state=self.state)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> StepResult:
        """Return loss and terms of ``loss.for_evaluation()`` over the samples of all data ranks.

        They are equal on every rank, and nothing is changed: the model is in evaluation mode meanwhile.
        Collective over all ranks, which must have the same number of samples of the same shapes.
        """
        loss = self.loss.for_evaluation()
        with evaluating(self.model):
            result, _ = self.forward(batch, loss).total(self.state, self.device)
        if result.faults:
            result.refuse_faults(result.checks.tolist())
        return result

    @torch.no_grad()
    def forward(self, batch: Any, loss: Loss | None = None) -> StepSums:
        """Run the forward of a step alone, in the mode that the model is in; with ``loss`` compute that.

        Collective over all ranks.
        """
        inputs = self._agree(batch, loss or self.loss)
        sums = StepSums(loss or self.loss, inputs.scales)
        stages = Stages(self.model, self.state, dtype=self.dtype)  # other shapes may travel than in training
        with computing(self.model):
            if loss is not None:
                inputs = self._with_whole_step(inputs, loss, stages)
            for part, output in self._outputs(inputs, stages):
                if loss is not None and stages.has_last:
                    sums.add(output, part)
        return sums

    @cached_property
    def gradients(self) -> GradientSums:
        """Return the gradients of the model, looked up at the first step."""
        return GradientSums(self.model, self.state, where="step")

    def _check_model(self) -> None:
        model, layout, data = self.model, self.state.layout, self.state.layout.data
        check_state(model, self.state, "step")
        if dist.is_initialized() and dist.get_world_size() > layout.world:
            refuse_foreign(model, "step")  # a state of one rank, and a wrapper that averages over several
        todo = "Call shard_over_data(model, state, Precision(...)) before"
        shared = data == 1 or is_sharded(model)
        require(shared, "step", "model", f"one shared over data={data}", "none", todo)
        refuse_uncut(self.loss, layout)
        for name, router in () if self.loss.count is not None else routers(model):
            factor = router.balance or router.z_loss
            expected = "0: the number of a step's losses is known only at its end"
            todo = "State it before: FunctionLoss(loss, count=...)"
            require(not factor, "step", f"{name}.balance", expected, factor, todo)

    def _agree(self, batch: Any, loss: Loss, scale: float | None = None) -> StepInputs:
        """Check and count samples on the host, agree over all ranks, cut the samples and copy them.

        Each rank must gather weights and sum gradients as often as its neighbours. If shapes changed on one
        rank, all set up their pipeline anew: a trial run gathers weights too. ``scale``: only to train.
        """
        state, refusal, samples, training = self.state, None, dict[str, Tensor](), scale is not None
        nothing = dict.fromkeys(loss.terms, 0.0)
        report, shapes, parts = StepReport(nothing, refused=True), self._shapes, None
        try:
            parts = batch if isinstance(batch, BatchParts) else None
            samples = {} if parts else dict(loss.prepare(batch))
            rows, first = parts.rows if parts else count_samples(samples), self.stages.first_input
            has_first = first is None or parts or first in samples
            require(has_first, "batch", first, "the model's first input", ", ".join(samples))
            if (training or not self.stages.states_shapes) and rows % self.micro_batch:
                expected = f"a divisor of the {counted(rows, 'sample')} of a data rank"
                raise BadInput("step", "micro_batch", expected=expected, found=self.micro_batch)
            counts, counts_here = nothing, state.counts_here and state.at.pipeline == 0
            if parts:
                if loss.count_labels is None:
                    raise BadInput("batch", expected="tensors by name", found=type(batch).__name__)
                if counts_here and state.context.index == 0:  # of whole rows
                    counts = checked_counts(loss, loss.count_labels(parts.labels))
            elif loss.count is not None and counts_here:
                counts = checked_counts(loss, loss.count(cut_over_context(samples, loss.sequence, state)))
            shapes = {name: sample.shape for name, sample in samples.items()}
            stale, reshaped = training and has_gradients(self.model), training and shapes != self._shapes
            report = StepReport(
                counts, rows, rows**2, stale=stale, reshaped=reshaped,
                scale=scale or 0, scale_squared=(scale or 0) ** 2,
            )  # fmt: skip
        except BadInput as error:
            refusal = error
        total = report.agreed(state, refusal)
        if training:
            self._shapes = shapes
        factors = [
            (scale or 1.0) * term.weight / (total.counts[name] or 1.0) for name, term in loss.terms.items()
        ]
        scales = torch.tensor(factors, dtype=torch.float64).to(self.device, non_blocking=True)
        return StepInputs(
            self._sent(samples, loss),
            int(total.rows) * state.layout.data,
            dict(zip(loss.terms, scales.unbind(), strict=True)),
            bool(total.reshaped),
            (self._sent(loss.prepare(part), loss) for part in parts.parts) if parts else None,
        )

    def _sent(self, samples: Samples, loss: Loss) -> Samples:
        """Return this context rank's chunks of samples on the device."""
        copies = {name: send(sample, self.device) for name, sample in samples.items()}
        return cut_over_context(copies, loss.sequence, self.state)

    def _backward(self, inputs: StepInputs, sums: StepSums) -> None:
        """Run forward and backward of all micro-batches, under a schedule or one after the other."""
        size = self.micro_batch
        if self.state.layout.pipeline > 1:
            self.stages.train(inputs.samples, sums.add, schedule=self.schedule, micro_batch=size)
            return
        sharded, trains_all = is_sharded(self.model), getattr(self.model, "trains_all", False)
        count = inputs.rows // self.state.layout.data // size
        for number, part in enumerate(inputs.micro_batches(size)):
            if sharded:
                # If each micro-batch gives each trained parameter a gradient, replicas sum theirs at the last
                # one alone: FSDP sums nothing there for a group that got no gradient.
                last = number == count - 1
                before_backward(self.model, self.state, last=last, sum_replicas=last or not trains_all)
            sums.add(self.stages.forward(part), part).backward()

    def _outputs(self, inputs: StepInputs, stages: Stages) -> Iterator[tuple[Samples, Any]]:
        """Run the forward of each micro-batch alone, and yield its samples and its output."""
        with gathered_once(self.model):
            for number, part in enumerate(inputs.micro_batches(self.micro_batch)):
                if stages is not self.stages and (not number or stages.states_shapes):
                    stages.fit(part)  # the last one may be smaller
                yield part, stages.forward(part)

    @torch.no_grad()
    def _with_whole_step(self, inputs: StepInputs, loss: Loss, stages: Stages) -> StepInputs:
        """Let a loss that compares all rows of the step see them first, and add the samples that it returns.

        The backward then goes through one micro-batch at a time (GradCache, Gao et al. 2021). In training
        each run of a stage has a seed of its own, so that the second forward has the first one's dropout.
        """
        if loss.collect is None or loss.whole_step is None:
            return inputs
        seed = int(torch.randint(2**31, ())) if stages is self.stages else None
        stages.seed_runs(seed)
        outputs = self._outputs(inputs, stages)
        rows = [loss.collect(output, part) for part, output in outputs if stages.has_last]
        stages.seed_runs(seed)
        if not rows:
            return inputs
        everyone, own_rows = rows_of_step(torch.cat(rows), self.state)
        extra = loss.whole_step(everyone, own_rows, inputs.samples)
        return replace(inputs, samples={**inputs.samples, **extra})
