"""Conversion and resharding: Hugging Face folder or checkpoint in, Hugging Face folder or checkpoint out."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..models import AdaptedFamily
from ..parallel_state import BadInput, Layout, fault
from .budget import block_within
from .commit import Staging, staged
from .companions import store_companion
from .conversion import Conversion, OutputTensor, plan_to_hf, plan_to_sharded
from .disk import Disk
from .dtypes import TORCH, WEIGHTS
from .execute import execute
from .hf_export import HFFolderWriter
from .journal import EVERY, JOURNAL, Journal
from .manifest import Manifest, StoredFile
from .source import read_source
from .tensor_writer import TensorWriter
from .transfer import Transfer
from .verify import checksum_of, verify_file, verify_rest

#: Part of a conversion's identity: another version may number or lay out its work otherwise.
_PLAN = 1

Form = Literal["hf", "peft", "sharded"]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class How:
    """What has no bearing on the result: ``max_ram`` and ``note_every`` in bytes.

    ``max_ram`` bounds all that the process holds of its own, what is there already included; ``None`` asks
    only that memory does not grow with the model (some 20 MB a worker).
    """

    workers: int = 2
    max_ram: int | None = None
    check: bool = True
    note_every: int = EVERY
    progress: Progress = lambda done: None


@contextmanager
def _no_collector() -> Iterator[None]:
    """A plan is many small objects and no cycles; with torch in memory the collector takes 0.1 s a time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    allow_symlinks: bool = False,
    how: How = How(),  # frozen, so one for all calls does no harm
) -> Conversion:
    """Write ``src`` anew as ``dst``: cut for ``tensor`` x ``pipeline``, or as a Hugging Face folder.

    ``to`` defaults to the other form when no layout is asked for; that of LoRA adapters is PEFT's folder.
    Moments come along between checkpoints; a Hugging Face folder holds weights only. ``dtype`` (``bfloat16``
    and so on) casts the weights, and refuses if a number overflows. A checkpoint's every byte is read against
    its checksums, unless ``how.check`` is false. Nothing is left behind on a failure; killed, the same call
    goes on where it was. ``how.progress`` gets the bytes written since the last call.
    """
    plan = plan_conversion(
        src, to=to, tensor=tensor, pipeline=pipeline, split=split, dtype=dtype, allow_symlinks=allow_symlinks
    )
    carry_out(plan, Path(dst), allow_nonfinite=allow_nonfinite, how=how)
    return plan


@_no_collector()
def carry_out(plan: Conversion, dst: Path, *, allow_nonfinite: bool = False, how: How = How()) -> None:
    """Write what was planned as ``dst``; see ``convert``."""
    identity = identify(plan, allow_nonfinite=allow_nonfinite)
    with staged(dst, inputs=[plan.source.path], need=plan.nbytes, identity=identity) as staging:
        keep = {file.name for file in plan.files} | {JOURNAL}
        for path in staging.directory.iterdir():  # of an earlier run: what is small is written again
            if path.name not in keep:
                path.unlink()
        if not all((staging.directory / file.name).exists() for file in plan.files):
            (staging.directory / JOURNAL).unlink(missing_ok=True)  # it speaks of files that are gone
        if plan.layout is None:
            _write_hf(plan, staging, allow_nonfinite, how)
        else:
            _write_sharded(plan, plan.layout, staging, allow_nonfinite, how)


@_no_collector()
def plan_conversion(
    src: str | Path,
    *,
    to: Form | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    split: Sequence[int] | None = None,
    dtype: str | None = None,
    allow_symlinks: bool = False,
) -> Conversion:
    """What ``convert`` would do, from headers alone; raises what it would raise."""
    source = read_source(src, allow_symlinks=allow_symlinks)
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


def identify(plan: Conversion, *, allow_nonfinite: bool) -> str:
    """16 hexadecimal digits that differ if another plan, or other source files, would write other bytes."""
    digest = hashlib.sha256(
        repr(
            (_PLAN, plan.layout, plan.split, allow_nonfinite, plan.source.config, plan.source.adapter)
        ).encode()
    )
    for file in plan.source.files:
        digest.update(repr((str(file.path), file.identity)).encode())
    for output in plan.files:
        digest.update(repr(output).encode())
    return digest.hexdigest()[:16]


def _dtype_name(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    names = {str(TORCH[name]).removeprefix("torch."): name for name in WEIGHTS}
    if dtype not in names:
        raise BadInput("convert", "--dtype", expected=f"one of {', '.join(names)}", found=repr(dtype))
    return names[dtype]


def _write_hf(plan: Conversion, staging: Staging, allow_nonfinite: bool, how: How) -> None:
    outputs = {one.name: one for file in plan.files for one in file.tensors}
    writer = HFFolderWriter(
        staging.directory,
        _config(plan),
        {name: (one.dtype, one.box.shape) for name, one in outputs.items()},
        companions=plan.source.companions,
        again=True,
        adapters=plan.source.adapter is not None,
    )
    try:
        transfers = [_transfer(one, writer.writers[writer.place[name]]) for name, one in outputs.items()]
        _move(plan, transfers, writer.writers, staging, allow_nonfinite, how)
        writer.finish()
    finally:
        writer.abandon()
    (staging.directory / JOURNAL).unlink(missing_ok=True)
    staging.publish()


def _write_sharded(
    plan: Conversion, layout: Layout, staging: Staging, allow_nonfinite: bool, how: How
) -> None:
    writers: list[TensorWriter] = []
    try:
        for file in plan.files:
            spec = {one.name: (one.dtype, one.box.shape) for one in file.tensors}
            writers.append(TensorWriter(staging.directory / file.name, spec, again=True))
        transfers = [
            _transfer(one, writer)
            for file, writer in zip(plan.files, writers, strict=True)
            for one in file.tensors
        ]
        _move(plan, transfers, writers, staging, allow_nonfinite, how)
        written = [writer.close() for writer in writers]
    finally:
        for writer in writers:
            writer.abandon()
    (staging.directory / JOURNAL).unlink(missing_ok=True)
    files = [
        StoredFile(name=file.name, size=one.size, crc32=one.crc)
        for file, one in zip(plan.files, written, strict=True)
    ]
    manifest = _manifest(plan, layout, files, staging.directory)
    manifest.check(staging.output)
    staging.publish(manifest.to_bytes())


def _manifest(plan: Conversion, layout: Layout, files: Sequence[StoredFile], directory: Path) -> Manifest:
    old = plan.source.manifest
    return Manifest(
        kind="training" if plan.keeps_moments else "weights",
        model_type=plan.source.family.model_type,
        config=_config(plan),
        layout=layout,
        step=old.step if old else None,
        data_position=old.data_position if old else None,
        seeds=old.seeds if old else {},
        state=(old.state if old else {}) | {"split": list(plan.split) if plan.split else None},
        adapter=plan.source.adapter,
        companions=tuple(store_companion(path, directory) for path in plan.source.companions),
        files=tuple(files),
        tensors=plan.tensors,
    )


def _config(plan: Conversion) -> dict[str, Any]:
    """The source's config, its dtype told anew where the weights were cast; PEFT's for adapters."""
    source = plan.source
    if plan.layout is None and source.adapter is not None:
        assert isinstance(source.family, AdaptedFamily)
        return source.family.to_peft(source.model_config, source.adapter.base)
    config = dict(plan.source.config)
    dtypes = {one.dtype for file in plan.files for one in file.tensors}
    if len(dtypes) == 1:
        name = str(TORCH[dtypes.pop()]).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            if config.get(key) not in (None, name):
                config[key] = name
    return config


def _transfer(one: OutputTensor, writer: TensorWriter) -> Transfer:
    return Transfer(one.name, one.box, one.copies, writer)


def _move(
    plan: Conversion,
    transfers: Sequence[Transfer],
    writers: Sequence[TensorWriter],
    staging: Staging,
    allow_nonfinite: bool,
    how: How,
) -> None:
    """Move the numbers; a checkpoint's checksums are taken from what is read, and compared at the end."""
    source, manifest = plan.source, plan.source.manifest if how.check else None
    block, workers = block_within(how.max_ram, how.workers)
    seen = [checksum_of(file) for file in source.files] if manifest is not None else []
    fault("convert.before_data", rank=0)

    def sync() -> None:
        for writer in writers:
            writer.sync()
        for directory in (staging.directory, staging.directory.parent):
            Disk().sync_directory(directory)

    try:
        report = execute(
            source.files,
            transfers,
            threads=workers,
            block=block,
            allow_nonfinite=allow_nonfinite,
            seen=seen,
            journal=Journal(staging.directory / JOURNAL, sync, every=how.note_every),
            progress=how.progress,
        )
    except BadInput as error:
        if manifest is not None:  # numbers that are not finite may be what a damaged file looks like
            for file, stored in zip(source.files, manifest.files, strict=True):
                if file.path == error.where:
                    verify_file(file, stored, checksum_of(file))
        raise
    fault("convert.after_data", rank=0)
    if manifest is not None:
        verify_rest(source.path, manifest, source.files, seen, threads=workers)
    for name, count in report.overflows.items():
        todo = "Choose a type with a wider range"
        found = f"{count:,} that overflow"
        raise BadInput(source.path, name, expected="numbers that fit the type", found=found, todo=todo)
    source.warnings.extend(
        f"{name} is all zeros" for name in sorted(report.zeros) if not name.endswith("bias")
    )
