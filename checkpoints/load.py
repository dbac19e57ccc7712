"""Load weights into a model; each rank reads only the parts that it stores."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..models import AdaptedFamily, CausalLM, Family, LoraConfig, ModelConfig
from ..parallel_state import BadCheckpoint, BadInput, ParallelState
from .lora import read_adapter
from .rank_storage import stored_parts
from .source import Source, read_source
from .verify_together import check_bytes


def load_weights(
    path: str | Path,
    model: CausalLM,
    family: Family,
    config: ModelConfig,
    *,
    finite: bool = True,
) -> Source:
    """Fill the model's parameters, in place, from a Hugging Face folder or a checkpoint of any layout, and
    return what they are from.

    The model may be cut, sharded by FSDP, or a pipeline stage. Weights are cast to the parameters' dtype;
    padding becomes zero. Rank 0 looks at all files, as ``read_source`` does. Raises ``BadInput`` or
    ``BadCheckpoint`` for a source of another model, or of LoRA adapters, which would leave the other
    parameters unfilled (see ``load_model``).
    """
    source = read_source(path, mtp=config.mtp_blocks > 0, whole=model.state.rank == 0)
    load_model_source(source, model, family, config, finite=finite)
    return source


def load_model_source(
    source: Source, model: CausalLM, family: Family, config: ModelConfig, *, finite: bool = True
) -> None:
    """Fill the model's parameters as ``load_weights`` does, from a source that is open."""
    check_whole(source)
    check_same_model(source, family, config)
    load_source(source, model, finite=finite)


def load_source(source: Source, model: CausalLM, *, finite: bool = True) -> None:
    """Fill, in place, the parameters that the source's family has: adapters, or all others.

    Collective: every byte of a checkpoint is compared with its checksum, each rank reading some of the files.
    """
    check_bytes(source, model.state)
    fill_from(source, model, finite=finite)


def fill_from(source: Source, model: CausalLM, *, finite: bool = True) -> None:
    """Fill the model as ``load_source`` does, from a source whose bytes were checked."""
    links, (stated,) = source.links(), source.family.declarations(source.model_config)
    for name, tensor, box in stored_parts(model, model.state):
        if name in stated:
            fill(tensor, source.read(name, box, links, finite=finite))


def load_model(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    state: ParallelState | None = None,
) -> CausalLM:
    """Return the model of a Hugging Face folder or a checkpoint, whole or as this rank's part of a layout.

    ``adapter``: a PEFT folder or a checkpoint with LoRA adapters to add. A ``path`` that is such a checkpoint
    gives its adapters on the base that it names. Raises ``BadInput`` or ``BadCheckpoint``.
    """
    source, added = read_with_adapter(path, adapter, whole=state is None or state.rank == 0)
    family = source.family if added is None else added.family
    model = family.build(source.model_config, state=state, device="cpu", dtype=dtype)
    for one in (source, added):
        if one is not None:
            load_source(one, model)
    return model


def read_with_adapter(
    path: str | Path, adapter: str | Path | None = None, *, whole: bool = True
) -> tuple[Source, Source | None]:
    """Open a model's weights and, if there are any, the LoRA adapters for it; see ``load_model``. ``whole``:
    as for ``read_source``.
    """
    source = read_source(path, whole=whole)
    if source.adapter is not None and adapter is None:
        if source.adapter.base is None:
            raise BadInput(source.path, "base", expected="the path of a model", found="none")
        adapter, source = source.path, read_source(source.adapter.base, whole=whole)
    return source, None if adapter is None else read_adapter(adapter, source, whole=whole)


def check_whole(source: Source) -> None:
    """Refuse LoRA adapters if the weights of a whole model are needed."""
    if source.adapter is not None:
        todo = f"`trilith merge-lora BASE {source.path} OUT` makes one; `load_model` loads both"
        raise BadInput(source.path, expected="a whole model", found="LoRA adapters", todo=todo)


def check_same_model(source: Source, family: Family, config: ModelConfig) -> None:
    """Refuse weights of another model, naming the first field in which it differs."""
    if source.family.model_type != family.model_type:
        raise BadCheckpoint(
            source.path, "model_type", expected=family.model_type, found=source.family.model_type
        )
    if isinstance(source.family, AdaptedFamily) != isinstance(family, AdaptedFamily):
        kinds = "a whole model", "LoRA adapters"
        expected, found = (kinds[isinstance(one, AdaptedFamily)] for one in (family, source.family))
        raise BadCheckpoint(source.path, expected=expected, found=found)
    if isinstance(source.family, AdaptedFamily) and isinstance(family, AdaptedFamily):
        _check_same_adapters(source, source.family.lora, family.lora)
    theirs = source.model_config
    for key in type(config).model_fields:
        mine, other = getattr(config, key), getattr(theirs, key)
        if mine != other and key not in ("initializer_range",):
            raise BadCheckpoint(
                source.path, key, expected=mine, found=other, todo="This is a checkpoint of another model"
            )


def _check_same_adapters(source: Source, theirs: LoraConfig, mine: LoraConfig) -> None:
    for key in LoraConfig.model_fields:
        if getattr(mine, key) != getattr(theirs, key) and key != "lora_dropout":
            todo = "A resumed run cannot change its adapters; start a new run with lora.init_from"
            raise BadCheckpoint(
                source.path, f"lora.{key}", expected=getattr(mine, key), found=getattr(theirs, key), todo=todo
            )


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy, casting, into what this rank stores."""
    assert tensor.shape == values.shape, (tensor.shape, values.shape)
    tensor.copy_(values)
