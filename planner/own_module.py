"""Trace a module that is not the zoo's, stage by stage: its forward, its loss and their backward."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers import Checkpointing
from ..parallel_state import BadInput, ParallelState
from ..pipeline import Stages
from ..pipeline.relay import StageOutput, Travels, sent_as
from ..simulation.micro_batch import MicroBatch
from ..simulation.recorder import Recorder
from ..simulation.trace import InTwo, Piece, Trace
from ..simulation.traced import trace
from ..simulation.waits import numbers_refused
from ..simulation.without_numbers import DTYPES, device_of, empty, shapes_only
from ..system.user_errors import line_of_user
from ..training.own_code import signature_of
from ..training.token_loss import TokenLoss
from .rank_parameters import parts_of_module
from .stage_costs import StageCost
from .step_shape import Work

#: What ``Step`` takes: a function that returns the sum of the losses and how many they are, or a ``Loss``.
Loss = Callable[..., Any]
_NOTHING = Trace()


def stages_of(
    work: Work,
    model: nn.Module,
    samples: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    outputs: Sequence[StageOutput] | None = None,
) -> list[StageCost]:
    """Return the pieces of the stages of a rank that holds ``model``, which is not the zoo's: each is one.

    ``samples``: the tensors that ``forward`` and ``loss`` are given, of at least one micro-batch; only their
    shapes and dtypes count. Of a language model that transformers computes both are known. ``outputs``: what
    each stage of the model gives (``outputs_of``); by default hidden states as ``hidden_shape`` of the model
    or ``work`` says. Raises ``BadInput`` for samples or a loss that are missing, and for a module that cannot
    be traced.
    """
    layout, family = work.layout, getattr(model, "family", None)
    numbers = layout.stages_of(work.at.pipeline)
    if samples is None and family is not None and family.adopted:
        ids = torch.empty((1, work.sequence_length), dtype=torch.int64, device="meta")
        samples, loss = {"input_ids": ids, "labels": ids}, TokenLoss(cast(Any, model))
    if samples is None or (layout.stages - 1 in numbers and loss is None):
        raise BadInput(
            "plan", "samples" if samples is None else "loss",
            expected="the samples and the loss of a step, which a plan traces", found="none",
            todo="plan_memory(work, model, samples=batch, loss=loss) takes what Step takes",
        )  # fmt: skip
    part = micro_batch_of(work, samples, getattr(loss, "sequence", {}))
    stages = Stages(model, work.state)
    stages.assume(outputs or _hidden_states(work, model, part))
    costs = []
    for number, parameters in zip(numbers, parts_of_module(model), strict=True):
        last = number == layout.stages - 1
        taken = partial(_take, work, stages, number, part, loss if last else None, parameters)
        whole = (Piece(taken),)
        end = Piece(lambda mode, in_two: _NOTHING, what="loss") if last else None
        leads = number == numbers[0]
        costs.append(StageCost(number == 0, {}, whole, frozenset(), None, end, whole, leads=leads))
    return costs


def micro_batch_of(work: Work, samples: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return a micro-batch of such samples on the meta device; context ranks have cut ``dims``."""
    part = {}
    for name, x in samples.items():
        shape = [work.micro_batch, *x.shape[1:]]
        if (dim := dims.get(name)) is not None:
            shape[dim] //= work.layout.context
        part[name] = torch.empty(shape, dtype=x.dtype, device="meta")
    return part


def outputs_of(
    build: Callable[[ParallelState], nn.Module], work: Work, part: Mapping[str, Tensor]
) -> list[StageOutput]:
    """Return what each stage of a module gives for a micro-batch, by a run of them on shapes alone.

    ``build``: makes the module of a stand-in's rank, on the meta device.
    """
    layout, outputs = work.layout, list[StageOutput]()
    batch = MicroBatch(work.micro_batch, 1, work.compute, gpu=False)
    stages: dict[int, Stages] = {}
    for number in range(layout.stages):
        rank = layout.rank_of_stage(number)
        if rank not in stages:
            state = ParallelState.stand_in(layout, layout.first_rank(rank))
            stages[rank] = Stages(build(state), state)
        of_rank, model = stages[rank], stages[rank].model
        of_rank.assume(outputs)
        with shapes_only([model], batch), Recorder(), numbers_refused(), told(model):
            zeros = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in part.items()}
            outputs.append(of_rank.describe(number, zeros))
    return outputs


def bytes_sent(outputs: Sequence[StageOutput]) -> tuple[int, ...]:
    """Return the bytes of what each stage but the last sends."""
    sent = (sent_as(output).meta() for output in outputs[:-1])
    return tuple(tensor.numel() * tensor.element_size() for tensor in sent)


def _hidden_states(work: Work, model: nn.Module, part: Mapping[str, Tensor]) -> list[StageOutput]:
    layout, tensor = work.layout, work.layout.tensor if work.state.sequence else 1
    shape: tuple[int, ...] = (work.micro_batch, work.batch.length // tensor, work.hidden)
    first = getattr(model, "first_input", None)
    if first is not None and hasattr(model, "hidden_shape"):
        shape = tuple(cast(Any, model).hidden_shape(part[first]))
    return [(Travels(shape, DTYPES[work.compute]),)] * layout.stages


def _take(
    work: Work,
    stages: Stages,
    number: int,
    samples: Mapping[str, Tensor],
    loss: Loss | None,
    parameters: Sequence[nn.Parameter],
    mode: Checkpointing,
    in_two: InTwo,
) -> Trace:
    model: nn.Module = stages.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own_names = [names[id(parameter)] for parameter in parameters]
    with shapes_only([model], work.batch):
        part = {name: torch.empty_like(x, device=device_of(work.batch)) for name, x in samples.items()}
        fakes = dict(model.named_parameters())

        def run(x: Tensor) -> Any:
            with numbers_refused():
                output = stages.run_stage(number, x if number else None, part)
            return output if loss is None else _summed(loss, work)(output, part)

        def make() -> Tensor:
            return empty(sent_as(stages.outputs[number - 1]).shape if number else (0,), work.batch)

        with told(model):
            others = [fake for name, fake in fakes.items() if name not in own_names]
            return trace(
                run, make, [fakes[name] for name in own_names], others=others, reached=number > 0,
                in_two=in_two and number > 0, scalar=loss is not None,
            )  # fmt: skip


@contextmanager
def told(model: nn.Module) -> Iterator[None]:
    """Turn what a user's code raises where numbers are missing into one line."""
    try:
        yield
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        place = line_of_user(error.__traceback__)
        dtypes = re.search(r"\bdtype|\btype \(", message)
        raise BadInput(
            "plan", type(model).__name__, expected="a forward and a backward that run on shapes alone",
            found=f"{message} ({place})" if place else message,
            todo="Cast floating samples to the dtype of a weight" if dtypes
            else "Let nothing depend on numbers that a device computes, or state the size",
        ) from error  # fmt: skip


def _summed(loss: Loss, work: Work) -> Callable[..., Tensor]:
    """Return the function of output and samples that gives the sum of a micro-batch's losses."""
    if terms := getattr(loss, "terms", None):
        scales = dict.fromkeys(terms, torch.ones((), dtype=torch.float64, device=device_of(work.batch)))
        bound = cast(Any, loss).for_state(work.state)
        return lambda output, samples: sum(bound(output, samples, scales).terms.values())
    takes = "state" in signature_of(loss).parameters
    function = partial(loss, state=work.state) if takes else loss
    return lambda output, samples: function(output, samples)[0]
