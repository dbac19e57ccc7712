"""The pipeline of a step: torch's schedules over this rank's stage of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from ..layers import padded_vocabulary
from ..models import CausalLM
from ..parallel_state import BadInput

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def make_schedule(
    model: CausalLM,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    name: str,
    microbatches: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> PipelineScheduleSingle:
    """The schedule that runs one step over this stage.

    ``shape``: (B, S) of one micro-batch; ``dtype``: of the activations.

    Shapes between stages are stated, not found out by a trial run. Raises ``BadInput`` for an unknown name or
    fewer micro-batches than stages, which no schedule can keep busy.
    """
    if name not in SCHEDULES:
        raise BadInput("recipe", "schedule", expected=f"one of {', '.join(SCHEDULES)}", found=repr(name))
    layout, state = model.state.layout, model.state
    if microbatches < layout.pipeline:
        raise BadInput(
            "recipe",
            "micro-batches a step",
            expected=f"at least pipeline={layout.pipeline}",
            found=microbatches,
            todo="Make the micro-batch smaller or the global batch larger",
        )
    batch, length = shape
    config = model.config
    here = length // state.tensor_size if state.sequence else length

    def meta(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=of, device="meta", requires_grad=of.is_floating_point)

    tokens = meta(batch, length, of=torch.int64)
    hidden = meta(batch, here, config.hidden_size)
    logits = meta(batch, length, padded_vocabulary(config.vocab_size) // state.tensor_size)
    stage = PipelineStage(
        model,
        state.at.pipeline,
        layout.pipeline,
        state.device,
        input_args=tokens if model.stage.first else hidden,
        output_args=logits if model.stage.last and not model.head_in_loss else hidden,
        group=state.pipeline_group,
    )
    # The loss of a micro-batch is its share of the step's mean, so gradients are summed as they are.
    return SCHEDULES[name](stage, microbatches, loss_fn=loss, scale_grads=False)
