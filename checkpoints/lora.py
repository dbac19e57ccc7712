"""Read LoRA adapters from PEFT's folders, and find the base model that they belong to."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..models import AdaptedFamily, LoraConfig, adapted, implementation_of
from ..parallel_state import BadCheckpoint, BadInput, Box
from ..storage.catalog import Catalog, in_one_file
from ..storage.dtypes import WEIGHTS
from ..storage.file_names import ADAPTER_CONFIG, ADAPTER_MODEL, ADAPTERS, FolderKind, kind_of_folder
from ..storage.files_beside_weights import companions_in
from ..storage.safe_open import contained
from ..storage.safetensors_reader import TensorFile
from ..storage.small_files import read_json
from .find import local_folder
from .manifest import StoredAdapter
from .source import Source, read_source

_SAMPLE = 256


def fingerprint(base: Source) -> str:
    """Return 16 hexadecimal digits of a model: its config, the name, dtype and shape of each tensor, and some
    numbers.

    The numbers are the first ones of the first, the middle and the last row. They tell other weights without
    reading all; a single number changed elsewhere is not noticed. The same in every form and layout.
    """
    digest = hashlib.sha256(base.model_config.model_dump_json(exclude={"initializer_range"}).encode())
    for name, shape in base.family.links(base.model_config)[1].items():
        digest.update(repr((name, base.hf[name].dtype, shape)).encode())
        whole = Box.whole(shape).narrow(len(shape) - 1, 0, min(shape[-1], _SAMPLE))
        for row in sorted({0, shape[0] // 2, shape[0] - 1}) if len(shape) > 1 else (0,):
            box = whole.narrow(0, row, row + 1) if len(shape) > 1 else whole
            numbers = base.hf[name].read(box, finite=False).contiguous()
            digest.update(numbers.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def stored_adapter(family: AdaptedFamily, base: Source, *, whole: bool = True) -> StoredAdapter:
    """Return what a checkpoint of these adapters states about them and their base; without ``whole`` no
    fingerprint, which one of many ranks takes for all.
    """
    lora, taken = family.lora.model_dump(mode="json"), fingerprint(base) if whole else None
    return StoredAdapter(lora=lora, base=os.path.abspath(base.path), fingerprint=taken)


def read_adapter(path: str | Path, base: Source, *, whole: bool = True) -> Source:
    """Open the adapters in a PEFT folder or in a checkpoint of a LoRA run, to go with ``base``.

    The base must be a model's weights, not adapters. ``whole``: as for ``read_source``, and look whether they
    were trained on these weights. Raises ``BadInput`` or ``BadCheckpoint`` for a source that is not an
    adapter, is not supported, or does not fit the base: tensors missing, left over or of another shape, or
    another model's weights.
    """
    if base.adapter is not None:
        raise BadInput(base.path, expected="the weights of a whole model", found="LoRA adapters")
    path, kind = kind_of_folder(local_folder(path), ADAPTERS)
    if kind is FolderKind.ADAPTER:
        return _peft_folder(path, base)
    source = read_source(path, whole=whole)
    if source.adapter is None:
        raise BadInput(source.path, expected="LoRA adapters", found="the weights of a whole model")
    if whole:
        check_base(source.adapter, base, source.path)
    return source


def base_for(adapter: str | Path, base: Source) -> Source:
    """Return the base as adapters' checkpoint has it: computed by the zoo's code, or by transformers'."""
    path, kind = kind_of_folder(local_folder(adapter), ADAPTERS)
    if kind is FolderKind.ADAPTER:
        return base
    implementation = implementation_of(read_source(path, whole=False).config)
    if implementation == implementation_of(base.config):
        return base
    return read_source(base.path, implementation=implementation)


def read_lora(path: str | Path) -> LoraConfig:
    """Return the LoRA config of a PEFT folder or a LoRA checkpoint; reads neither weights nor base."""
    path, kind = kind_of_folder(local_folder(path), ADAPTERS)
    if kind is FolderKind.ADAPTER:
        return _peft_config(path)[0]
    source = read_source(path)
    if source.adapter is None:
        raise BadInput(source.path, expected="LoRA adapters", found="the weights of a whole model")
    return LoraConfig.model_validate(source.adapter.lora)


def _peft_config(path: Path) -> tuple[LoraConfig, dict[str, Any]]:
    where = path / ADAPTER_CONFIG
    raw = read_json(contained(path, ADAPTER_CONFIG))
    lora = LoraConfig.from_peft(raw, str(where))
    lora.check_patterns(str(where))
    return lora, raw


def read_converted(path: Path, source: Source) -> Source:
    """Open the result of a conversion of ``source``, in any form."""
    if kind_of_folder(path)[1] is FolderKind.ADAPTER:
        return _peft_folder(path, replace(source, adapter=None))
    return read_source(path, module=source.module, implementation=implementation_of(source.config))


def check_base(adapter: StoredAdapter, base: Source, where: object) -> None:
    """Refuse a base if the adapters were trained on other weights."""
    if adapter.fingerprint is not None:
        here = StoredAdapter(lora=adapter.lora, base=str(base.path), fingerprint=fingerprint(base))
        check_same_base(adapter, here, where)


def check_same_base(trained: StoredAdapter, here: StoredAdapter, where: object) -> None:
    """Refuse adapters whose base is not the base ``here``."""
    if trained.fingerprint not in (None, here.fingerprint):
        raise BadCheckpoint(
            where,
            "base",
            expected=f"the model that the adapters were trained on ({trained.base}, {trained.fingerprint})",
            found=f"{here.base}, whose config or weights are others ({here.fingerprint})",
        )


def _peft_folder(path: Path, base: Source) -> Source:
    lora, raw = _peft_config(path)
    named = raw.get("base_model_name_or_path")
    stored = StoredAdapter(lora=lora.model_dump(mode="json"), base=named if isinstance(named, str) else None)
    if not (file_path := contained(path, ADAPTER_MODEL)).exists():
        todo = "Save it with safetensors; we do not read pickle, which can run code"
        raise BadInput(file_path, expected="the adapters' weights", found="no such file", todo=todo)
    _, shapes = adapted(base.family, lora).links(base.model_config)
    file = TensorFile.open(file_path, expected=shapes)
    _check_tensors(file, shapes)
    catalog = Catalog({name: in_one_file(file, name) for name in shapes})
    return replace(
        base, path=path, companions=companions_in(path), files=[file], catalog=catalog, manifest=None,
        warnings=[], adapter=stored,
    )  # fmt: skip


def _check_tensors(file: TensorFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in [*shapes, *file.tensors]:
        if name not in shapes or name not in file.tensors:
            todo = "The adapter is for another model, or for modules that are not supported here"
            expected, actual = "no such tensor", "one"
            if name in shapes:
                expected, actual = "a tensor, as target_modules says", "none of that name"
            raise BadInput(file.path, name, expected=expected, found=actual, todo=todo)
    for name, shape in shapes.items():
        entry = file.tensors[name]
        if entry.dtype not in WEIGHTS:
            raise BadInput(file.path, name, expected=f"one of {', '.join(WEIGHTS)}", found=entry.dtype)
        if entry.shape != shape:
            todo = "The adapter is for another model, or its rank differs from adapter_config.json"
            raise BadInput(file.path, name, expected=list(shape), found=list(entry.shape), todo=todo)
