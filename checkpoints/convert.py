"""Conversion and resharding: Hugging Face folder or checkpoint in, Hugging Face folder or checkpoint out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..parallel_state import BadInput, Layout
from .commit import staged
from .companions import store_companion
from .conversion import Conversion, OutputTensor, plan_to_hf, plan_to_sharded
from .dtypes import TORCH, WEIGHTS
from .execute import Transfer, execute
from .hf_export import HFFolderWriter
from .manifest import Manifest, StoredFile
from .source import Source, read_source
from .tensor_writer import TensorWriter
from .verify import verify

Form = Literal["hf", "sharded"]
Report = Callable[[int], None]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: Form | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    split: Sequence[int] | None = None,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    check: bool = True,
    progress: Report = lambda done: None,
) -> Conversion:
    """Write ``src`` anew as ``dst``: cut for ``tensor`` x ``pipeline``, or as a Hugging Face folder.

    ``to`` defaults to the other form when no layout is asked for. Moments come along between checkpoints; a
    Hugging Face folder holds weights only. ``dtype`` (``bfloat16`` and so on) casts the weights, and refuses
    if a number overflows. ``check`` first reads a checkpoint's every byte against its checksums. ``progress``
    gets the bytes written since the last call. Nothing is left behind on a failure.
    """
    plan = plan_conversion(src, to=to, tensor=tensor, pipeline=pipeline, split=split, dtype=dtype)
    source = plan.source
    if check and source.manifest is not None:
        verify(source.path, source.manifest)
    with staged(Path(dst), inputs=[source.path], need=plan.nbytes) as staging:
        if plan.layout is None:
            _write_hf(plan, staging.directory, allow_nonfinite, progress)
            staging.publish()
        else:
            manifest = _write_sharded(plan, plan.layout, staging.directory, allow_nonfinite, progress)
            manifest.check(dst)
            staging.publish(manifest.to_bytes())
    return plan


def plan_conversion(
    src: str | Path,
    *,
    to: Form | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    split: Sequence[int] | None = None,
    dtype: str | None = None,
) -> Conversion:
    """What ``convert`` would do, from headers alone; raises what it would raise."""
    source = read_source(src)
    name = _dtype_name(dtype)
    form = to or ("sharded" if source.manifest is None or tensor * pipeline > 1 else "hf")
    if form == "sharded":
        return plan_to_sharded(source, tensor=tensor, pipeline=pipeline, split=split, dtype=name)
    if tensor * pipeline > 1:
        raise BadInput(
            "convert", "--to hf", expected="no layout", found=f"tensor {tensor}, pipeline {pipeline}",
            todo="A Hugging Face folder is whole: leave out --tensor and --pipeline",
        )  # fmt: skip
    return plan_to_hf(source, dtype=name)


def _dtype_name(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    names = {str(TORCH[name]).removeprefix("torch."): name for name in WEIGHTS}
    if dtype not in names:
        raise BadInput("convert", "--dtype", expected=f"one of {', '.join(names)}", found=repr(dtype))
    return names[dtype]


def _write_hf(plan: Conversion, directory: Path, allow_nonfinite: bool, progress: Report) -> None:
    outputs = {one.name: one for file in plan.files for one in file.tensors}
    writer = HFFolderWriter(
        directory,
        _config(plan),
        {name: (one.dtype, one.box.shape) for name, one in outputs.items()},
        companions=plan.source.companions,
    )
    try:
        transfers = [_transfer(one, writer.writers[writer.place[name]]) for name, one in outputs.items()]
        _carry_out(plan.source, transfers, allow_nonfinite, progress)
        writer.finish()
    finally:
        writer.abandon()


def _config(plan: Conversion) -> dict[str, Any]:
    """The source's config, its dtype told anew where the weights were cast."""
    config = dict(plan.source.config)
    dtypes = {one.dtype for file in plan.files for one in file.tensors}
    if len(dtypes) == 1:
        name = str(TORCH[dtypes.pop()]).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            if config.get(key) not in (None, name):
                config[key] = name
    return config


def _write_sharded(
    plan: Conversion, layout: Layout, directory: Path, allow_nonfinite: bool, progress: Report
) -> Manifest:
    writers: list[TensorWriter] = []
    try:
        for file in plan.files:
            spec = {one.name: (one.dtype, one.box.shape) for one in file.tensors}
            writers.append(TensorWriter(directory / file.name, spec))
        transfers = [
            _transfer(one, writer)
            for file, writer in zip(plan.files, writers, strict=True)
            for one in file.tensors
        ]
        _carry_out(plan.source, transfers, allow_nonfinite, progress)
        written = [writer.close() for writer in writers]
    finally:
        for writer in writers:
            writer.abandon()
    files = [
        StoredFile(name=file.name, size=one.size, crc32=one.crc)
        for file, one in zip(plan.files, written, strict=True)
    ]
    old = plan.source.manifest
    return Manifest(
        kind="training" if plan.keeps_moments else "weights",
        model_type=plan.source.family.model_type,
        config=_config(plan),
        layout=layout,
        step=old.step if old else None,
        data_position=old.data_position if old else None,
        seeds=old.seeds if old else {},
        state={"split": list(plan.split) if plan.split else None},
        companions=tuple(store_companion(path, directory) for path in plan.source.companions),
        files=tuple(files),
        tensors=plan.tensors,
    )


def _transfer(one: OutputTensor, writer: TensorWriter) -> Transfer:
    return Transfer(one.name, one.box, one.copies, writer)


def _carry_out(
    source: Source, transfers: Sequence[Transfer], allow_nonfinite: bool, progress: Report
) -> None:
    report = execute(source.files, transfers, allow_nonfinite=allow_nonfinite, progress=progress)
    for name, count in report.overflows.items():
        todo = "Choose a type with a wider range"
        found = f"{count:,} that overflow"
        raise BadInput(source.path, name, expected="numbers that fit the type", found=found, todo=todo)
    source.warnings.extend(
        f"{name} is all zeros" for name in sorted(report.zeros) if not name.endswith("bias")
    )
