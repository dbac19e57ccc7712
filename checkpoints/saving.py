"""Writing a run's checkpoints: weights, moments, step, data position; at once, or while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..models import CausalLM, Family, ModelConfig
from ..parallel_state import BadInput, Box, Holding, Layout, ParallelState, buffer_names, fault, holdings
from .agree import together
from .commit import Staging, clear_unfinished
from .companions import store_companion
from .disk import DiskFailed, writing
from .dtypes import BUFFER, name_of
from .find import step_directory
from .manifest import Manifest, Part, StoredAdapter, StoredFile, StoredTensor
from .module_family import ModuleFamily
from .retention import delete_old, set_aside
from .stored import Place, places
from .tensor_writer import TensorWriter
from .training import Progress, moment_of
from .training_names import MOMENTS, moment_name

T = TypeVar("T")

#: Seconds that a save in the background still has when its rank has failed.
_LAST_CHANCE = 2.0


@dataclass(frozen=True)
class Contents:
    """What the checkpoints of a run have in common."""

    family: Family
    config: ModelConfig
    hf_config: Mapping[str, Any]
    split: Sequence[int] | None = None
    companions: Sequence[Path] = ()
    #: Of LoRA adapters (``family`` is theirs): what they are, and for which base.
    adapter: StoredAdapter | None = None
    #: Parameters that are not trained, so have no moments.
    frozen: frozenset[str] = frozenset()


class Saver:
    """Writes and commits ``root/step-N``, then deletes what is older than the newest ``keep``.

    Which rank writes which box follows from declarations and layout alone; nothing is gathered but the
    files' sizes and checksums. If one rank fails, every rank raises the same error, nothing is committed,
    and what was there before stays.

    With ``background``, ``save`` returns once the rank's own tensors are copied; one thread writes the copy
    and commits it. A second ``save`` waits for the first. ``failed`` says whether the thread met an error;
    ask it on all ranks alike, and ``wait`` then raises it on all of them. Leaving the context waits for the
    thread, so a process group may be destroyed after it and not before; after an error only some seconds,
    since the other ranks wait to hear of it. ``said`` is called, from the thread that calls ``save``,
    ``wait`` or ``poll``, with a line on each checkpoint that was committed. ``state``: of a module that does
    not have it by itself. Without an ``optimizer`` the checkpoints hold weights alone.
    """

    def __init__(
        self,
        root: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        contents: Contents,
        *,
        state: ParallelState | None = None,
        keep: int = 2,
        background: bool = False,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.root, self.keep, self.background, self._said = root, keep, background, said
        self._model, self._optimizer, self._contents = model, optimizer, contents
        if state is None:
            assert isinstance(model, CausalLM), "a module of a user's comes with its state"
            state = model.state
        self._state, self._layout = state, state.layout
        stages = contents.family.declarations(contents.config, self._layout, split=contents.split)
        self._fixed = frozenset(name for stage in stages for name in buffer_names(stage))
        #: What has no moments.
        self._frozen = contents.frozen | self._fixed
        self._table = _table(stages, self._layout, self._frozen, () if optimizer is None else MOMENTS)
        # Found out once: a run that saves waits for what is done here.
        self._mine = [place for place in places(model, self._state) if self._owns(place)]
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        if not self._state.rank:
            clear_unfinished(self.root)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(_LAST_CHANCE)

    @property
    def failed(self) -> bool:
        """Whether a save in the background ended in an error that ``wait`` has not raised yet."""
        return self._error is not None

    def save(self, progress: Progress) -> None:
        """Write, or begin to write, the checkpoint of ``progress.step``. Collective."""
        self.wait()
        tensors = self._own_tensors()
        if not self.background:
            self._write(progress, tensors)
            self.poll()
            return
        for name, tensor in tensors.items():
            if name not in self._copies:
                # The same memory each time: fresh pages cost as much as the copy.
                self._copies[name] = torch.empty_like(tensor, device="cpu")
            self._copies[name].copy_(tensor)
        # Not a daemon: a program that just ends waits for it, so a checkpoint begun is completed.
        self._thread = threading.Thread(target=self._write_behind, args=(progress,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the save at hand is committed; raises its error, the same on every rank. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def poll(self) -> None:
        """Tell of what was committed since the last call."""
        while self._lines:
            self._said(self._lines.pop(0))

    def _write_behind(self, progress: Progress) -> None:
        try:
            self._write(progress, self._copies)
        except Exception as error:
            self._error = error

    def _together(self, work: Callable[[], T]) -> list[T]:
        return together(work, world=self._layout.world, group=self._state.file_group)

    def _write(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        rank, step = self._state.rank, progress.step
        target = step_directory(self.root, step)
        staging: list[Staging] = []

        def begin() -> str | None:
            if rank:
                return None
            set_aside(target)
            staging.append(Staging.begin(target))
            return str(staging[0].directory)

        def write(directory: Path) -> tuple[StoredFile, str] | None:
            with writing(target):
                fault("checkpoint.before_data", rank=rank, step=step)
            written = _write_file(directory, rank, self._layout.world, step, tensors, self._fixed)
            fault("checkpoint.after_data", rank=rank, step=step)
            return written

        def finish(results: Sequence[tuple[StoredFile, str] | None]) -> None:
            fault("checkpoint.before_manifest", rank=rank, step=step)
            if rank:
                return
            manifest = self._manifest(progress, results, staging[0].directory)
            manifest.check(target)
            staging[0].publish(manifest.to_bytes())
            self._lines.append(f"COMMITTED {target}")

        try:
            directory = Path(str(self._together(begin)[0]))
            results = self._together(lambda: write(directory))
            self._together(lambda: finish(results))
        finally:
            for one in staging:
                one.abandon()
        if not rank:
            fault("checkpoint.before_retention", rank=0, step=step)
            self._retain(step)

    def _retain(self, step: int) -> None:
        """After all ranks know of the commit, which nobody waits for; what cannot be deleted ends no run."""
        try:
            delete_old(self.root, self.keep, step)
        except (OSError, BadInput, DiskFailed) as error:
            self._lines.append(f"old checkpoints stay: {error}")

    def _manifest(
        self, progress: Progress, results: Sequence[tuple[StoredFile, str] | None], directory: Path
    ) -> Manifest:
        contents = self._contents
        return Manifest(
            kind="training" if self._optimizer is not None else "weights",
            model_type=contents.family.model_type,
            config=dict(contents.hf_config),
            layout=self._layout,
            step=progress.step,
            data_position=progress.data,
            state={
                "split": list(contents.split) if contents.split else None,
                "memory": progress.memory,
                "frozen": [*sorted(self._frozen)],
            },
            adapter=contents.adapter,
            module=contents.family.module if isinstance(contents.family, ModuleFamily) else None,
            companions=tuple(store_companion(path, directory) for path in contents.companions),
            files=tuple(result[0] for result in results if result is not None),
            tensors=_stored_tensors(self._table, results, self._fixed),
        )

    def _owns(self, place: Place) -> bool:
        return any(one.rank == self._state.rank for one in self._table.get(place.name, ()))

    def _own_tensors(self) -> dict[str, Tensor]:
        """What this rank writes: of all that it stores, that which it owns."""
        found = {place.name: place.part(place.parameter) for place in self._mine}
        if self._optimizer is None:
            return found
        for moment in MOMENTS:
            choose = moment_of(self._optimizer, moment)
            for place in self._mine:
                if (tensor := choose(place.parameter)) is not None:
                    found[moment_name(moment, place.name)] = place.part(tensor)
        return found


def _table(
    stages: Sequence[Mapping[str, Any]], layout: Layout, frozen: frozenset[str], moments: Sequence[str]
) -> dict[str, list[Holding]]:
    """Who writes what: the moments lie exactly as their parameters do."""
    weights = holdings(stages, layout)
    trained = {name: held for name, held in weights.items() if name not in frozen}
    theirs = {moment_name(moment, name): held for moment in moments for name, held in trained.items()}
    return weights | theirs


def _stored_tensors(
    table: Mapping[str, list[Holding]],
    results: Sequence[tuple[StoredFile, str] | None],
    fixed: frozenset[str],
) -> dict[str, StoredTensor]:
    """What the manifest says of each tensor; files are numbered as the ranks that wrote one.

    All tensors have one dtype, but the ``fixed`` ones, which have a buffer's.
    """
    writers = [rank for rank, result in enumerate(results) if result is not None]
    numbers = {rank: number for number, rank in enumerate(writers)}
    dtype = next((result[1] for result in results if result is not None and result[1]), BUFFER)
    return {
        name: StoredTensor(
            dtype=BUFFER if name in fixed else dtype,
            shape=tuple(max(stops) for stops in zip(*(one.box.stop for one in held), strict=True)),
            parts=tuple(Part(file=numbers[one.rank], start=one.box.start, stop=one.box.stop) for one in held),
        )
        for name, held in table.items()
    }


def _write_file(
    directory: Path, rank: int, world: int, step: int, tensors: Mapping[str, Tensor], fixed: frozenset[str]
) -> tuple[StoredFile, str] | None:
    """This rank's file and the dtype of its tensors but the ``fixed``, or nothing if it owns nothing."""
    if not tensors:
        return None
    file = f"rank-{rank:05d}-of-{world:05d}.safetensors"
    spec = {name: (name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(directory / file, spec, overlap=True)
    try:
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                fault("checkpoint.amid_data", rank=rank, step=step)
            writer.write(name, Box.whole(tuple(tensor.shape)), tensor.cpu().contiguous())
        written = writer.close()
    finally:
        writer.abandon()
    dtypes = {dtype for name, (dtype, _) in spec.items() if name not in fixed}
    assert len(dtypes) < 2, dtypes
    return StoredFile(name=file, size=written.size, crc32=written.crc), "".join(dtypes)
