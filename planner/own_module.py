"""Trace a module that is not the zoo's: its forward, its loss and their backward, as one piece."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers import Checkpointing
from ..parallel_state import BadInput
from ..pipeline.stages import keyword_test
from ..simulation.asked_numbers import line_of_user, numbers_refused
from ..simulation.piece import Piece
from ..simulation.trace import Trace
from ..simulation.traced import trace
from ..simulation.without_numbers import device_of, empty, shapes_only
from .rank_parameters import has_pieces
from .stage_costs import Pieces, StageCost, stage_costs
from .step_shape import Work

#: What ``Step`` takes: a function that returns the sum of the losses and how many they are, or a ``Loss``.
Loss = Callable[..., Any]


def stages_of(
    work: Work, model: nn.Module, samples: Mapping[str, Tensor] | None = None, loss: Loss | None = None
) -> list[StageCost]:
    """Return the pieces of the stages of a rank that holds ``model``, the zoo's or another module."""
    if has_pieces(model):
        return stage_costs(work, model)
    return [module_stage(work, model, samples, loss)]


def module_stage(
    work: Work, model: nn.Module, samples: Mapping[str, Tensor] | None, loss: Loss | None
) -> StageCost:
    """Return the one stage of the rank of ``work``, whose module is ``model``.

    ``samples``: the tensors that ``forward`` and ``loss`` are given, of at least one micro-batch; only their
    shapes and dtypes count. A later stage of a pipeline is given the hidden states of the one before, too.
    Raises ``BadInput`` for a rank with several stages, for samples or a loss that are missing, and for a
    module that cannot be traced.
    """
    layout = work.layout
    if layout.virtual_stages > 1:
        expected = "1 for a module of your own, whose stages cannot be told apart"
        raise BadInput("plan", "virtual_stages", expected=expected, found=layout.virtual_stages)
    (number,) = layout.stages_of(work.at.pipeline)
    first, last = number == 0, number == layout.stages - 1
    if samples is None or (last and loss is None):
        raise BadInput(
            "plan", "samples" if samples is None else "loss",
            expected="the samples and the loss of a step, which a plan traces", found="none",
            todo="plan_memory(work, model, samples=batch, loss=loss) takes what Step takes",
        )  # fmt: skip
    dims = getattr(loss, "sequence", {})
    part = {name: _like(x, work, dims.get(name)) for name, x in samples.items()}
    whole = Piece(partial(_take, work, model, part, loss if last else None, first))
    nothing = Piece(lambda mode, in_two: Trace(kept=0, made=0, forward=0, weights=0), what="loss")
    behind = Pieces((whole,))
    return StageCost(first, {}, behind, frozenset(), None, nothing if last else None, behind)


def _take(
    work: Work,
    model: nn.Module,
    samples: Mapping[str, Tensor],
    loss: Loss | None,
    first: bool,
    mode: Checkpointing,
    in_two: bool,
) -> Trace:
    takes, of_first = keyword_test(model), getattr(model, "first_input", None)
    with shapes_only([model], work.batch):
        part = {name: torch.empty_like(x, device=device_of(work.batch)) for name, x in samples.items()}
        keywords = {name: x for name, x in part.items() if takes(name)}
        inputs = () if of_first is None else (part[of_first],)

        def run(x: Tensor) -> Any:
            with numbers_refused():
                output = model(*(inputs if first else (x,)), **keywords)
            return output if loss is None else _summed(loss, work)(output, part)

        def make() -> Tensor:
            return empty(shape, work.batch)

        tensor = work.layout.tensor if work.state.sequence else 1
        shape = (0,) if first else (work.micro_batch, work.batch.length // tensor, work.hidden)
        if inputs and not first:
            shape = tuple(cast(Any, model).hidden_shape(*inputs))
        try:
            return trace(
                run, make, [*model.parameters()], reached=not first, in_two=in_two, scalar=loss is not None
            )
        except BadInput:
            raise
        except Exception as error:  # whatever a user's code raises where numbers are missing
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            place = line_of_user(error.__traceback__)
            raise BadInput(
                "plan", type(model).__name__, expected="a forward and a backward that run on shapes alone",
                found=f"{message} ({place})" if place else message,
                todo="Let nothing depend on numbers that a device computes, or state the size",
            ) from error  # fmt: skip


def _summed(loss: Loss, work: Work) -> Callable[..., Tensor]:
    """Return the function of output and samples that gives the sum of a micro-batch's losses."""
    if terms := getattr(loss, "terms", None):
        scales = dict.fromkeys(terms, torch.ones((), dtype=torch.float64, device=device_of(work.batch)))
        bound = cast(Any, loss).for_state(work.state)
        return lambda output, samples: sum(bound(output, samples, scales).terms.values())
    takes = "state" in inspect.signature(loss).parameters
    function = partial(loss, state=work.state) if takes else loss
    return lambda output, samples: function(output, samples)[0]


def _like(x: Tensor, work: Work, dim: int | None) -> Tensor:
    """Return a micro-batch of such samples without numbers; context ranks cut ``dim``."""
    shape = [work.micro_batch, *x.shape[1:]]
    if dim is not None:
        shape[dim] //= work.layout.context
    return torch.empty(shape, dtype=x.dtype, device="meta")
