"""Checkpoints of a run: weights, both moments, step, data position; written by their owners, read in any
layout.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models import CausalLM, Family, ModelConfig
from ..parallel_state import BadCheckpoint, Holding, Layout, ParallelState, fault, holdings
from .agree import together
from .commit import Staging, remove_checkpoint
from .companions import store_companion
from .dtypes import name_of
from .find import complete_checkpoints, latest_checkpoint, step_directory
from .loading import check_same_model, fill, stored_parts
from .manifest import Manifest, Part, StoredFile, StoredTensor
from .source import read_source
from .tensor_writer import TensorWriter
from .training_names import MOMENTS, moment_name
from .verify import verify_files


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the steps done, the layout that did them, what fixes the order of its samples."""

    step: int
    layout: Layout
    data: dict[str, Any] = field(default_factory=dict)


def newest_checkpoint(
    root: Path, state: ParallelState, *, say: Callable[[str], None] = lambda text: None
) -> Path | None:
    """The newest complete checkpoint in a run's folder, the same on every rank; ``None`` if the run has none
    yet.

    Rank 0 looks and tells the others. Incomplete ones are skipped, saying why.
    """

    def look() -> tuple[str | None, tuple[str, ...]]:
        if state.rank or not root.is_dir() or not any(root.iterdir()):
            return None, ()
        found = latest_checkpoint(root)
        return str(found.directory), found.warnings

    path, warnings = together(look)[0]
    for warning in warnings:
        say(warning)
    return None if path is None else Path(path)


def save_training(
    root: Path,
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    *,
    family: Family,
    config: ModelConfig,
    hf_config: Mapping[str, Any],
    split: Sequence[int] | None,
    progress: Progress,
    companions: Sequence[Path] = (),
    keep: int = 2,
) -> Path:
    """Write and commit ``root/step-N``, then delete what is older than the newest ``keep``. Collective.

    Which rank writes which box follows from declarations and layout alone; nothing is gathered but the files'
    sizes and checksums. Every rank raises the same error if one failed, and what was there before stays.
    """
    state, layout = model.state, model.state.layout
    table = _table(family.declarations(config, layout, split=split), layout)
    target = step_directory(root, progress.step)
    staging: list[Staging] = []

    def begin() -> str | None:
        if state.rank:
            return None
        _set_aside(target)
        staging.append(Staging.begin(target))
        return str(staging[0].directory)

    try:
        directory = Path(str(together(begin)[0]))
        tensors = _local_tensors(model, optimizer)

        def write() -> tuple[StoredFile, str] | None:
            fault("checkpoint.before_data", rank=state.rank, step=progress.step)
            written = _write_file(directory, state.rank, layout.world, tensors, table)
            fault("checkpoint.after_data", rank=state.rank, step=progress.step)
            return written

        results = together(write)

        def finish() -> None:
            if state.rank:
                return
            manifest = Manifest(
                kind="training",
                model_type=family.model_type,
                config=dict(hf_config),
                layout=layout,
                step=progress.step,
                data_position=progress.data,
                state={"split": list(split) if split else None},
                companions=tuple(store_companion(path, directory) for path in companions),
                files=tuple(result[0] for result in results if result is not None),
                tensors=_stored_tensors(table, results),
            )
            manifest.check(target)
            fault("checkpoint.before_manifest", rank=0, step=progress.step)
            staging[0].publish(manifest.to_bytes())
            fault("checkpoint.before_retention", rank=0, step=progress.step)
            _retain(root, keep)

        together(finish)
    finally:
        for one in staging:
            one.abandon()
    return target


def load_training(
    path: Path,
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    family: Family,
    config: ModelConfig,
) -> Progress:
    """Fill the model and the optimizer from a run's checkpoint, whatever layout wrote it. Collective."""

    def load() -> Progress:
        source = read_source(path)
        manifest = source.manifest
        if manifest is None or manifest.kind != "training" or manifest.step is None:
            raise BadCheckpoint(
                path,
                expected="a checkpoint of a training run",
                found="weights alone",
                todo="Start from it with model.init_from",
            )
        check_same_model(source, family, config)
        # Every byte is read against its checksum before a run goes on: each rank sees to some of the files.
        verify_files(path, manifest, range(model.state.rank, len(manifest.files), model.state.layout.world))
        tie = source.tie()
        for name, tensor, box in stored_parts(model, model.state):
            fill(tensor, source.read(name, box, tie))
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(manifest.step), dtype=torch.float32),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }
        for moment in MOMENTS:
            for name, tensor, box in stored_parts(model, model.state, _moment_of(optimizer, moment)):
                fill(tensor, source.read(moment_name(moment, name), box, tie))
        data = manifest.data_position if isinstance(manifest.data_position, dict) else {}
        return Progress(manifest.step, manifest.layout, dict(data))

    return together(load)[model.state.rank]


def _moment_of(optimizer: torch.optim.Optimizer, moment: str) -> Callable[[nn.Parameter], Tensor]:
    def choose(parameter: nn.Parameter) -> Tensor:
        value: Tensor = optimizer.state[parameter][moment]
        return value

    return choose


def _table(stages: Sequence[Mapping[str, Any]], layout: Layout) -> dict[str, list[Holding]]:
    """Who writes what: the moments lie exactly as their parameters do."""
    weights = holdings(stages, layout)
    moments = {moment_name(moment, name): held for moment in MOMENTS for name, held in weights.items()}
    return weights | moments


def _stored_tensors(
    table: Mapping[str, list[Holding]], results: Sequence[tuple[StoredFile, str] | None]
) -> dict[str, StoredTensor]:
    """What the manifest says of each tensor; files are numbered as the ranks that wrote one."""
    writers = [rank for rank, result in enumerate(results) if result is not None]
    numbers = {rank: number for number, rank in enumerate(writers)}
    dtype = next(result[1] for result in results if result is not None)
    return {
        name: StoredTensor(
            dtype=dtype,
            shape=tuple(max(stops) for stops in zip(*(one.box.stop for one in held), strict=True)),
            parts=tuple(Part(file=numbers[one.rank], start=one.box.start, stop=one.box.stop) for one in held),
        )
        for name, held in table.items()
    }


def _local_tensors(model: CausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What this rank could write: everything that it stores."""
    found = {name: tensor for name, tensor, _ in stored_parts(model, model.state)}
    for moment in MOMENTS:
        for name, tensor, _ in stored_parts(model, model.state, _moment_of(optimizer, moment)):
            found[moment_name(moment, name)] = tensor
    return found


def _write_file(
    directory: Path, rank: int, world: int, tensors: Mapping[str, Tensor], table: Mapping[str, list[Holding]]
) -> tuple[StoredFile, str] | None:
    """This rank's file and the dtype of its tensors, or nothing if it owns nothing."""
    mine = {name: one.box for name, held in table.items() for one in held if one.rank == rank}
    if not mine:
        return None
    file = f"rank-{rank:05d}-of-{world:05d}.safetensors"
    spec = {name: (name_of(tensors[name].dtype), box.shape) for name, box in mine.items()}
    writer = TensorWriter(directory / file, spec)
    try:
        for name, box in mine.items():
            writer.write(name, box.within(box), tensors[name].cpu().contiguous())
        written = writer.close()
    finally:
        writer.abandon()
    (dtype,) = {dtype for dtype, _ in spec.values()}
    return StoredFile(name=file, size=written.size, crc32=written.crc), dtype


def _set_aside(target: Path) -> None:
    """A damaged checkpoint of this step, passed over on resume, makes way for the one written again."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    try:
        Manifest.load(target)
    except BadCheckpoint:
        aside = target.with_name(f"{target.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)


def _retain(root: Path, keep: int) -> None:
    """Delete the complete checkpoints older than the newest ``keep``."""
    for old in complete_checkpoints(root)[:-keep]:
        remove_checkpoint(old)
