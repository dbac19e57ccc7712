"""Turn a user's request into the plan of a conversion or a merge: headers are read, nothing is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ...parallel_state import BadInput
from ...storage.dtypes import TORCH, WEIGHTS
from ...system import no_garbage_search
from ..lora import read_adapter
from ..source import read_source
from ..verify import verify
from .merge_lora import Merge
from .plan import Plan, plan_to_hf, plan_to_sharded

#: Part of a conversion's identity: another version may number or lay out its work otherwise.
_PLAN = 3

Form = Literal["hf", "peft", "sharded"]


@no_garbage_search()
def plan_conversion(
    src: str | Path,
    *,
    to: Form | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    split: Sequence[int] | None = None,
    dtype: str | None = None,
    allow_symlinks: bool = False,
    config: str | Path | None = None,
    names: str | None = None,
) -> Plan:
    """Return the plan of ``convert``, made from headers only; raises what ``convert`` would raise."""
    source = read_source(src, allow_symlinks=allow_symlinks, config=config, names=names)
    name = _dtype_name(dtype)
    whole: Form = "hf" if source.adapter is None else "peft"
    form = to or ("sharded" if source.manifest is None or tensor * pipeline > 1 else whole)
    if form == "sharded":
        return plan_to_sharded(source, tensor=tensor, pipeline=pipeline, split=split, dtype=name)
    if form != whole:
        found = "the weights of a whole model" if whole == "hf" else "LoRA adapters"
        expected, todo = "a checkpoint of LoRA adapters", ""
        if whole == "peft":
            expected = "a whole model"
            todo = f"--to peft writes the adapters; `trilith merge-lora BASE {src} OUT` a whole model"
        raise BadInput(source.path, f"--to {form}", expected=expected, found=found, todo=todo)
    if tensor * pipeline > 1 or split is not None:
        found = f"tensor {tensor}, pipeline {pipeline}" + ("" if split is None else f", split {[*split]}")
        raise BadInput(
            "convert", f"--to {form}", expected="no layout", found=found,
            todo="A Hugging Face folder is whole: leave out --tensor, --pipeline and --split",
        )  # fmt: skip
    return plan_to_hf(source, dtype=name)


def plan_merge(base: str | Path, adapter: str | Path) -> Plan:
    """Return the plan of adding LoRA adapters to their base, as a Hugging Face folder; ``carry_out`` writes
    it.

    ``base``: a Hugging Face folder or a checkpoint. ``adapter``: a PEFT folder, a LoRA run or a checkpoint of
    one. Dtypes stay, and tensors without adapters stay byte for byte. Raises ``BadInput`` or
    ``BadCheckpoint`` if they do not fit together (see ``read_adapter``).
    """
    source = read_source(base)
    added = read_adapter(adapter, source)
    if added.manifest is not None:
        verify(added.path, added.manifest, files=added.files)
    return replace(plan_to_hf(source), merge=Merge(source, added))


def identify(plan: Plan, *, allow_nonfinite: bool) -> str:
    """Return 16 hexadecimal digits that differ if other bytes would be written, by plan or source files.

    The content of the source's files counts, not only their names and times: they may have changed since a
    conversion was killed.
    """
    source, merged = plan.source, None if plan.merge is None else plan.merge.identity
    stated = (_PLAN, plan.layout, plan.split, allow_nonfinite, source.config, source.adapter, merged)
    digest = hashlib.sha256(repr(stated).encode())
    digest.update(repr([file.state() for file in source.files]).encode())
    if source.manifest is not None:
        digest.update(source.manifest.to_bytes())
    for output in plan.files.items():
        digest.update(repr(output).encode())
    return digest.hexdigest()[:16]


def _dtype_name(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    names = {str(TORCH[name]).removeprefix("torch."): name for name in WEIGHTS}
    if dtype not in names:
        raise BadInput("convert", "--dtype", expected=f"one of {', '.join(names)}", found=repr(dtype))
    return names[dtype]
