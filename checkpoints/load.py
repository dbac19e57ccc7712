"""Load a model, whole or as a rank's part of it, and an optimizer's state; each rank reads what it stores."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ..models import AdaptedFamily, implementation_of
from ..parallel_state import BadCheckpoint, BadInput, Layout, ParallelState, check_state, require, state_of
from ..parallel_state.collective_errors import all_succeed, together
from ..storage.dtypes import TORCH
from ..storage.file_names import MANIFEST
from .described import check_memory, describe
from .find import newest_in
from .lora import base_implementation, check_same_base, read_adapter, stored_adapter
from .manifest import StoredAdapter
from .manifest_checks import Progress, check_progress
from .optimizer_state import adamw, check_optimizer, moment_name, moment_of, restore_state
from .rank_files import places, stored_parts
from .source import Source, read_source
from .stored_tensor import check_same_shapes
from .user_module_family import Described
from .verify import check_bytes


@dataclass(frozen=True)
class Loaded(Progress):
    """Hold what ``load`` returns: the ``model``, and how far its run was when it was saved (``Progress``).

    ``step`` is 0 for a Hugging Face folder. ``extra`` is what ``save`` was given, or a run's note of data.
    """

    #: A ``CausalLM``, or the module that was given.
    model: Any = field(kw_only=True)


def load(
    path: str | Path | Source,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    adapter: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    state: ParallelState | None = None,
) -> Loaded:
    """Fill a model from a checkpoint of any layout or a Hugging Face folder, or build the model of it.

    Collective. ``path``: a checkpoint, the folder of several or of a run (the newest complete one is taken),
    a Hugging Face folder, an id of the hub, a URL. Without a ``model`` the family that the folder names makes
    it on the CPU in ``dtype``, as this rank's part of the layout of ``state``. A given model may be cut,
    sharded by FSDP, a stage of a pipeline; weights are cast to its dtype and padding becomes zero. With an
    ``optimizer`` its state is restored, bit for bit, so its dtype must be that of the checkpoint.
    ``adapter``: a PEFT folder or a checkpoint of LoRA adapters to add to the base in ``path``; a ``path`` of
    adapters fills the base that it names as well, unless the model has it from an earlier call.

    Every byte of a checkpoint is compared with its checksum. Raises ``BadInput`` or ``BadCheckpoint``, the
    same on every rank, for a source of another model, and for an optimizer whose state is not there.
    """
    rank_state = state_of(model, state)
    if model is not None:
        check_state(model, rank_state, "load")
    with nullcontext(path) if isinstance(path, Source) else newest_in(path, rank_state) as place:
        described = None if model is None else describe(model, rank_state)
        model_adapter: StoredAdapter | None = getattr(model, "adapter", None)

        def chosen() -> list[Source]:
            if model is not None:
                check_memory(model, "load")
            sources = _sources(place, adapter, described, model_adapter, whole=not rank_state.rank)
            if described is not None:
                for source in sources:
                    _check_same(source, described)
            if optimizer is not None:
                _check_resumable(sources[-1], model, optimizer)
            return sources

        sources = all_succeed(chosen, rank_state)
        first, last = sources[0], sources[-1]
        if model is None:
            model = last.family.build(first.model_config, state=state, device="cpu", dtype=dtype)
        for source in sources:
            load_source(source, model, rank_state)
        if isinstance(family := getattr(model, "family", None), AdaptedFamily) and first.adapter is None:
            base = together(lambda: stored_adapter(family, first, whole=not rank_state.rank), rank_state)[0]
            model.__dict__["adapter"] = base

        def resumed() -> Progress:
            progress = _progress_of(last)
            if optimizer is not None:
                _restore_optimizer(last, model, optimizer, rank_state, progress.memory)
            return progress

        return Loaded(**vars(all_succeed(resumed, rank_state)), model=model)


def _sources(
    place: str | Source,
    adapter: str | Path | None,
    described: Described | None,
    model_adapter: StoredAdapter | None,
    *,
    whole: bool,
) -> list[Source]:
    """Open what fills the model, in this order: its weights or the base of its adapters, and the adapters."""
    if isinstance(place, Source):
        source = place
    else:
        module = None if described is None or described.module is None else described
        mtp = described is not None and module is None and described.config.mtp_blocks > 0
        raw = {} if described is None or module is not None else described.config.to_hf()
        implementation = raw.get("implementation", "auto")
        source = read_source(place, module=module, mtp=mtp, implementation=implementation, whole=whole)
    if described is not None and not isinstance(described.family, AdaptedFamily):
        check_whole(source, BadCheckpoint)
        todo = "Build it with adapted(family, lora), or let load build it"
        require(adapter is None, "load", "model", "one with adapters", "one without", todo)
        return [source]
    if source.adapter is not None and adapter is None and model_adapter is not None:
        check_same_base(source.adapter, model_adapter.base, model_adapter.fingerprint, source.path)
        return [source]
    base, adapters = with_adapter(source, adapter, whole=whole)
    return [base] if adapters is None else [base, adapters]


def with_adapter(
    source: Source, adapter: str | Path | None = None, *, whole: bool = True
) -> tuple[Source, Source | None]:
    """Return a model's weights and, if there are any, the LoRA adapters for it; see ``load``."""
    if adapter is not None:
        base, own_implementation = source, implementation_of(source.config)
        if (implementation := base_implementation(adapter) or own_implementation) != own_implementation:
            base = read_source(source.path, implementation=implementation)
    elif source.adapter is None:
        return source, None
    elif (place := source.adapter.base) is None:
        raise BadInput(source.path, "base", expected="the path of a model", found="none")
    else:
        base = read_source(place, implementation=implementation_of(source.config), whole=whole)
    return base, read_adapter(source.path if adapter is None else adapter, base, whole=whole)


def load_source(source: Source, model: nn.Module, state: ParallelState | None = None) -> None:
    """Fill, in place, the parameters that the source's family has: adapters, or all others.

    Collective: every byte of a checkpoint is compared with its checksum, each rank reading some of the files.
    """
    state = state_of(model, state)
    check_bytes(source, state)

    def fill_model() -> None:
        (declared,) = source.described.declarations()
        for name, tensor, box in stored_parts(places(model, state)):
            if name in declared:
                fill(tensor, source.ours[name].read(box))

    all_succeed(fill_model, state)


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy, casting, into what this rank stores."""
    assert tensor.shape == values.shape, (tensor.shape, values.shape)
    tensor.copy_(values)


def check_whole(source: Source, kind: type[BadInput] = BadInput) -> None:
    """Refuse LoRA adapters if the weights of a whole model are needed."""
    todo = f"`trilith merge-lora BASE {source.path} OUT` makes one; `load` without a model loads both"
    require(source.adapter is None, source.path, None, "a whole model", "LoRA adapters", todo, kind=kind)


def _check_same(source: Source, described: Described) -> None:
    """Refuse weights of another model, naming the first field or parameter in which it differs."""
    if described.module is not None:
        if source.manifest is not None:  # else the folder was read against them
            shapes = {name: declaration.shape for name, declaration in described.declarations()[0].items()}
            todo = "It is a checkpoint of another module"
            check_same_shapes(source.path, shapes, source.manifest.shapes(), what="parameter", todo=todo)
        return
    family, stored = described.family, source.described
    if stored.model_type != family.model_type:
        raise BadCheckpoint(source.path, "model_type", expected=family.model_type, found=stored.model_type)
    if isinstance(stored.family, AdaptedFamily) and isinstance(family, AdaptedFamily):
        _check_same_fields(
            source, "lora.", family.lora, stored.family.lora, "lora_dropout",
            todo="A resumed run cannot change its adapters; start a new run with lora.init_from",
        )  # fmt: skip
    todo = "This is a checkpoint of another model: name that model, or write to another folder"
    _check_same_fields(source, "", described.config, stored.config, "initializer_range", todo=todo)


def _check_same_fields(
    source: Source, prefix: str, current: BaseModel, stored: BaseModel, free: str, *, todo: str
) -> None:
    """Refuse a config in which a field other than ``free`` differs."""
    for key in type(current).model_fields:
        expected, actual = getattr(current, key), getattr(stored, key)
        if expected != actual and key != free:
            expected, actual = ("null" if field is None else field for field in (expected, actual))
            raise BadCheckpoint(source.path, prefix + key, expected=expected, found=actual, todo=todo)


def _check_resumable(source: Source, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a source that has no state for this optimizer of the model.

    Another dtype than that of the trained parameters is refused, too: a cast would change weights and
    moments, and the run would continue with other numbers.
    """
    if model is None:
        raise BadInput("load", "model", expected="the one whose parameters the optimizer has", found="none")
    manifest = source.manifest
    if manifest is None or manifest.kind != "training":
        expected, actual = "a checkpoint of a training run", "weights alone" if manifest else source.form
        todo = "Start from it with model.init_from, or in a loop of your own without the optimizer"
        raise BadCheckpoint(source.path, expected=expected, found=actual, todo=todo)
    if isinstance(getattr(model, "family", None), AdaptedFamily) and source.adapter is None:
        raise BadInput(source.path, expected="LoRA adapters, which the model trains", found="a whole model")
    check_optimizer("load", model, optimizer, manifest.optimizer or adamw({}))
    stored = {TORCH[whole.dtype] for name, whole in source.catalog.items() if name.startswith("optimizer.")}
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if stored and trained and stored != trained:
        both = stored, trained
        names = (sorted(str(dtype).removeprefix("torch.") for dtype in dtypes) for dtypes in both)
        expected, actual = map(", ".join, names)
        expected = f"{expected}, as the run's weights and moments are"
        todo = "Resume with that dtype, or start a new run from these weights"
        raise BadInput(source.path, "dtype", expected=expected, found=actual, todo=todo)


def _progress_of(source: Source) -> Progress:
    manifest = source.manifest
    if manifest is None:
        return Progress(0, Layout())
    check_progress(manifest, source.path / MANIFEST)
    memory, data = manifest.state.get("memory"), manifest.data_position
    return Progress(
        manifest.step or 0,
        manifest.layout,
        dict(data) if isinstance(data, dict) else {},
        {"updates": manifest.updates} | (dict(memory) if isinstance(memory, dict) else {}),
        data if manifest.extra is None else manifest.extra,
    )


def _restore_optimizer(
    source: Source,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: ParallelState,
    memory: Mapping[str, Any],
) -> None:
    """Fill what the optimizer keeps; ``BadCheckpoint`` for a parameter that was frozen and is trained now."""
    manifest = source.manifest
    assert manifest is not None, source.path
    restore_state(model, optimizer, manifest.optimizer or adamw(memory))
    for moment in manifest.moments:
        for name, tensor, box in stored_parts(places(model, state), moment_of(optimizer, moment)):
            key = moment_name(moment, name)
            expected, actual = "the moment of a parameter that is trained", "none: it was frozen"
            todo = "Freeze what the run began with frozen, or start a new run from these weights"
            require(name not in manifest.frozen, source.path, key, expected, actual, todo, kind=BadCheckpoint)
            fill(tensor, source.ours[key].read(box))
