"""Convert and reshard: from a Hugging Face folder or a checkpoint to one of them."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models import AdaptedFamily, Implementation
from ...parallel_state import fault, require
from ...storage.disk import Disk
from ...storage.dtypes import TORCH
from ...storage.files_beside_weights import read_companions
from ...storage.safetensors_writer import TensorWriter
from ...storage.small_files import EVERY, JOURNAL, FinishedWork
from ...storage.staging import Staging, staged
from ...storage.strict_json import StoredFile
from ...system import check_workers, counted, no_garbage_search
from ...system.machine import memory_available
from ..hugging_face.writer import for_transformers, open_file, write_config_and_index
from ..manifest import Manifest
from ..manifest_checks import check_plain, read_back
from ..verify import verifying
from .execute import BLOCK, Group, Work
from .plan import Form, Plan, identify, plan_conversion


@dataclass(frozen=True)
class ConversionOptions:
    """Set how a conversion runs, without effect on its result.

    Each worker takes some 20 MB, however large the model is. ``note_every`` is in bytes; ``progress`` is
    called with those written since its last call. ``card``: README.md beside weights in Hugging Face's form.
    """

    workers: int = 2
    check: bool = True
    note_every: int = EVERY
    progress: Callable[[int], None] = lambda done: None
    card: str | None = None

    def __post_init__(self) -> None:
        check_workers(self.workers, "convert")


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
    config: str | Path | None = None,
    names: str | None = None,
    implementation: Implementation = "auto",
    options: ConversionOptions = ConversionOptions(),  # frozen, so one for all calls does no harm
) -> Plan:
    """Write ``src`` to ``dst``, a new folder: cut for ``tensor`` x ``pipeline``, or as a Hugging Face folder.

    ``to``: default is the other form if no layout is given, and PEFT's folder for LoRA adapters. Moments are
    copied between checkpoints; a Hugging Face folder holds weights only. ``dtype`` (``bfloat16`` and so on)
    casts the weights; a number that overflows is refused. Every byte of a checkpoint is compared with its
    checksum, unless ``options.check`` is false. A failure leaves nothing behind; if the process is killed,
    the same call continues. ``config``, ``names`` and ``implementation``: see ``read_source``.
    """
    plan = plan_conversion(
        src, to=to, tensor=tensor, pipeline=pipeline, split=split, dtype=dtype, allow_symlinks=allow_symlinks,
        config=config, names=names, implementation=implementation,
    )  # fmt: skip
    carry_out(plan, dst, allow_nonfinite=allow_nonfinite, options=options)
    return plan


@no_garbage_search()
def carry_out(
    plan: Plan,
    dst: str | Path,
    *,
    allow_nonfinite: bool = False,
    options: ConversionOptions = ConversionOptions(),
) -> None:
    """Write the planned conversion to ``dst``; see ``convert``."""
    dst, source = Path(dst), plan.source
    check_plain(source.config, source.path, "config")
    if plan.layout is not None:  # refuse, before anything is written, what could not be read back
        files, companions = (
            [StoredFile(name=name, size=0, crc32=0) for name in names]
            for names in (plan.files, [path.name for path in source.companions])
        )
        read_back(lambda: _manifest(plan, files, companions), Path(os.path.abspath(dst)))
    identity = identify(plan, allow_nonfinite=allow_nonfinite)
    inputs = [source.path, *([] if plan.merge is None else [plan.merge.adapter.path])]
    with staged(dst, inputs=inputs, need=plan.nbytes, identity=identity, apart=True) as staging:
        if staging.goes_on:
            source.warnings.append(f"{dst}: a command that wrote it was killed; its work was used")
        keep = {*plan.files, JOURNAL}
        for path in staging.directory.iterdir():  # of an earlier run: what is small is written again
            if path.name not in keep:
                path.unlink()
        if not all((staging.directory / name).exists() for name in plan.files):
            (staging.directory / JOURNAL).unlink(missing_ok=True)  # it speaks of files that are gone
        _write_files(plan, staging, allow_nonfinite, options)


def _write_files(plan: Plan, staging: Staging, allow_nonfinite: bool, options: ConversionOptions) -> None:
    folder, opened = staging.directory, open_file if plan.layout is None else TensorWriter
    writers, transfers = list[TensorWriter](), Group()
    try:
        for name, file_transfers in plan.files.items():
            spec = {transfer.name: (transfer.dtype, transfer.box.shape) for transfer in file_transfers}
            writers.append(opened(folder / name, spec, again=True))
            transfers += [(transfer, writers[-1]) for transfer in file_transfers]
        _move(plan, transfers, writers, staging, allow_nonfinite, options)
        files = [writer.close() for writer in writers]
    finally:
        for writer in writers:
            writer.abandon()
    (folder / JOURNAL).unlink(missing_ok=True)
    config, companions = _config(plan), read_companions(plan.source.companions)
    if plan.layout is None and plan.source.manifest is not None:
        config, companions = for_transformers(config, companions)
    for companion in companions:
        Disk().write_file(folder / companion.name, companion.data)
    if plan.layout is None:
        if options.card is not None:
            Disk().write_file(folder / "README.md", options.card.encode())
        write_config_and_index(folder, config, writers, adapters=plan.source.adapter is not None)
        staging.publish()
        return
    manifest = _manifest(plan, files, [companion.stored for companion in companions])
    staging.publish(manifest.accepted_bytes(staging.output))


def _manifest(plan: Plan, files: Sequence[StoredFile], companions: Sequence[StoredFile]) -> Manifest:
    old, foreign = plan.source.manifest, plan.source.foreign
    assert plan.layout is not None, plan.source.path
    state = dict(old.state) if old else {}
    step = old.step if old else None
    if foreign is not None and plan.keeps_moments:
        updates = foreign.updates or foreign.step or 0
        memory: dict[str, Any] = {"updates": updates}
        if plan.source.updates_of:
            memory["updates_of"] = plan.source.updates_of
        state, step = {"memory": memory}, foreign.step or updates
    trains = plan.keeps_moments or (old is not None and old.kind == "training")
    return Manifest(
        kind="training" if trains else "weights",
        model_type=plan.source.described.model_type,
        config=_config(plan),
        layout=plan.layout,
        step=step,
        data_position=old.data_position if old else None,
        extra=old.extra if old else None,
        optimizer=old.optimizer if old else None,
        seeds=old.seeds if old else {},
        state=state | {"split": list(plan.split) if plan.split else None},
        adapter=plan.source.adapter,
        module=plan.source.described.module,
        companions=tuple(companions),
        files=tuple(files),
        tensors=plan.tensors,
    )


def _config(plan: Plan) -> dict[str, Any]:
    """Return the source's config, with the new dtype if the weights were cast; PEFT's config for adapters."""
    source = plan.source
    if plan.layout is None and source.adapter is not None:
        assert isinstance(source.family, AdaptedFamily)
        return source.family.to_peft(source.model_config, source.adapter.base)
    config = dict(source.config)
    dtypes = {transfer.dtype for transfer in plan.transfers if not transfer.fixed}
    if len(dtypes) == 1:
        name = str(TORCH[dtypes.pop()]).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            if config.get(key) not in (None, name):
                config[key] = name
    return config


def _move(
    plan: Plan,
    transfers: Group,
    writers: Sequence[TensorWriter],
    staging: Staging,
    allow_nonfinite: bool,
    options: ConversionOptions,
) -> None:
    """Move the numbers, and verify the source by what is read."""
    source = plan.source
    fault("convert.before_data", rank=0)

    # In the page cache a large output would push out the source before it is read, and slow each write down.
    evict = 2 * plan.nbytes > (memory_available() or sys.maxsize)

    def sync() -> None:
        for writer in writers:
            writer.sync(evict=evict)
        for directory in (staging.directory, staging.directory.parent):
            Disk().sync_directory(directory)

    checking = verifying(source, threads=options.workers) if options.check else nullcontext(dict[Any, Any]())
    with checking as seen:
        tallies = Work(
            change=(lambda name: None) if plan.merge is None else plan.merge.change,
            block=BLOCK if plan.merge is None else BLOCK // 2,  # a merge holds it in fp32 as well
            allow_nonfinite=allow_nonfinite,
            seen=seen,
            finished=FinishedWork(staging.directory / JOURNAL, sync, sync_interval=options.note_every),
            progress=options.progress,
        ).execute(transfers, options.workers)
        fault("convert.after_data", rank=0)
    todo = "Choose a type with a wider range"
    for name, tally in sorted(tallies.items()):
        lost = f"{tally['overflows']:,} that overflow"
        require(not tally["overflows"], source.path, name, "numbers that fit the type", lost, todo)
        if small := tally["underflows"]:
            expected = "few numbers too small for the type"
            lost = f"{small:,}, so that the whole tensor becomes zero"
            require(tally["left"], source.path, name, expected, lost, f"{todo}, or more digits")
            source.warnings.append(f"{name}: {counted(small, 'number')} too small for the type became zero")
        if not tally["others"] and not name.endswith("bias"):
            source.warnings.append(f"{name} is all zeros")
