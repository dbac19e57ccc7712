"""Weights into a model, each rank reading only what it stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..models import CausalLM, Family, ModelConfig
from ..parallel_state import BadCheckpoint, Box, ParallelState, declarations, stored_box
from ..parallel_state.engine import local_data
from .source import Source, read_source


def load_weights(
    path: str | Path, model: CausalLM, family: Family, config: ModelConfig, *, finite: bool = True
) -> None:
    """Fill the model's parameters, in place, from a Hugging Face folder or a checkpoint of any layout.

    The model may be cut, sharded by FSDP, a pipeline's stage. Weights are cast to the parameters' dtype;
    padding becomes zero. Raises ``BadInput`` or ``BadCheckpoint`` for a source that is not of this model.
    """
    source = read_source(path)
    check_same_model(source, family, config)
    tie = source.tie()
    for name, tensor, box in stored_parts(model, model.state):
        fill(tensor, source.read(name, box, tie, finite=finite))


def load_model(
    path: str | Path, *, dtype: torch.dtype = torch.float32, state: ParallelState | None = None
) -> CausalLM:
    """The model of a Hugging Face folder or a checkpoint, whole or as this rank's part of a layout."""
    source = read_source(path)
    model = source.family.build(source.model_config, state=state, device="cpu", dtype=dtype)
    load_weights(path, model, source.family, source.model_config)
    return model


def check_same_model(source: Source, family: Family, config: ModelConfig) -> None:
    """Refuse weights of another model, naming the first field in which it differs."""
    if source.family is not family:
        raise BadCheckpoint(
            source.path, "model_type", expected=family.model_type, found=source.family.model_type
        )
    theirs = source.model_config
    for key in type(config).model_fields:
        mine, other = getattr(config, key), getattr(theirs, key)
        if mine != other and key not in ("initializer_range",):
            raise BadCheckpoint(
                source.path, key, expected=mine, found=other, todo="This is a checkpoint of another model"
            )


def stored_parts(
    model: nn.Module, state: ParallelState, choose: Callable[[nn.Parameter], Tensor] | None = None
) -> Iterator[tuple[str, Tensor, Box]]:
    """What this rank stores: name, the local tensor without padding (memory is shared), and its box of the
    whole.

    ``choose`` takes something else of the same shape: a moment, say. Padding rows
    are set to zero on the way. Parameters of which this rank stores nothing are left out.
    """
    stated = declarations(model)
    for name, parameter in model.named_parameters():
        declaration = stated[name]
        box = stored_box(parameter, declaration, state)
        tensor = local_data(parameter if choose is None else choose(parameter))
        true = declaration.true_part(box)
        if true != box:
            tensor[true.shape[0] :].zero_()
            tensor = tensor[: true.shape[0]]
        if true.size:
            yield name, tensor, true


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy, casting, into what this rank stores."""
    assert tensor.shape == values.shape, (tensor.shape, values.shape)
    tensor.copy_(values)
