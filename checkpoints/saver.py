"""Write a run's checkpoints: weights, moments, step, data position; at once, or while the run goes on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..parallel_state import Declaration, ParallelState, buffer_names, declarations, fault, require, state_of
from ..parallel_state.collective_errors import on_rank_0, together
from ..storage.disk import Disk, writing
from ..storage.dtypes import BUFFER
from ..storage.files_beside_weights import Companion, read_companions
from ..storage.output_places import check_home, check_output, clear_unfinished
from ..storage.remote_folder import RemoteFolder
from ..storage.staging import Staging
from ..storage.strict_json import StoredFile, shown
from .find import good_manifests, step_directory
from .manifest import WITH_GRIDS, Manifest, StoredAdapter
from .manifest_checks import Progress, check_plain, check_same_model, read_back
from .mirror import AfterCommit, Mirror, set_aside
from .optimizer_state import MOMENTS, StoredOptimizer, gather_optimizer, moment_name, moment_of
from .rank_files import files_to_come, places, stored_parts, stored_tensors, write_file
from .stored_tensor import StoredTensor
from .user_module_family import Described

#: Seconds that a save in the background still has when its rank has failed.
_LAST_CHANCE = 2.0


@dataclass(frozen=True)
class Contents:
    """Hold what the checkpoints of a run have in common."""

    described: Described
    hf_config: Mapping[str, Any]
    split: Sequence[int] | None = None
    companions: Sequence[Path] = ()
    #: For LoRA (``family`` is then that of the adapters): the adapters and their base.
    adapter: StoredAdapter | None = None
    #: Parameters that are not trained, so have no moments.
    frozen: frozenset[str] = frozenset()
    #: What is stored of the optimizer; ``None`` for AdamW with both moments, whose updates ``memory`` counts.
    optimizer: StoredOptimizer | None = None


class Saver:
    """Write and commit ``root/step-N``, then delete checkpoints older than the newest ``keep``.

    Making a saver is collective. Data that a checkpoint cannot hold is refused then, before the first step.
    Declarations and layout alone determine which rank writes which box; only the files' sizes and checksums
    are gathered. If one rank fails, every rank raises the same error, and nothing is committed.

    With ``background``, ``save`` returns when the rank's own tensors are copied; one thread writes the copy
    and commits it. A second ``save`` waits for the first. ``failed`` tells whether the thread met an error;
    ask it on all ranks, and ``wait`` then raises it on all of them. Leaving the context waits for the thread,
    so destroy a process group only after it; after an error it waits only some seconds: others wait for it.

    ``start``: the step from which a run goes on; newer checkpoints, which it passed over, do not count.
    ``mirror``: path or URL of a second place, to which a thread of rank 0 copies each committed checkpoint.
    ``say`` is called with a line on each committed checkpoint, from the thread that calls ``save``, ``wait``
    or ``poll``. ``state``: needed for a module that does not have it. Without an ``optimizer`` the
    checkpoints hold weights only.
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
        start: int | None = None,
        background: bool = False,
        mirror: str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        whole = type(keep) is int and keep >= 1
        require(whole, "checkpoints", "keep", "a whole number of 1 or more", shown(keep))
        self.root, self.keep, self.background, self._say = root, keep, background, say
        self._start = start
        self._model, self._optimizer, self._contents = model, optimizer, contents
        self._state = state = state_of(model, state)
        self._layout = state.layout
        # A rank computes its own share from its own declarations; only rank 0 looks at those of all stages.
        named = contents.frozen.union(contents.described.family.declared(model))
        declared = {name: declaration for name, declaration in declarations(model).items() if name in named}
        self._fixed = buffer_names(declared)
        owned = {name for name, declaration in declared.items() if declaration.owner(self._layout, state.at)}
        self._mine = [place for place in places(model, state) if place.name in owned and place.box.size]
        self._lines: list[str] = []
        self._after = AfterCommit(root, keep, self._lines.append)
        self._mirror = mirror
        self._stages: list[dict[str, Declaration]] = []
        self._companions: list[Companion] = []
        together(self._prepare, state)
        self._copies: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        if not self._state.rank:
            clear_unfinished(self.root)
            self._after.resume(self._start)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.wait()
            self._after.wait()
            self.poll()
        else:
            wait([] if self._writing is None else [self._writing], _LAST_CHANCE)
            self._after.wait(_LAST_CHANCE)
        self._thread.shutdown(wait=error is None)
        self._after.close(wait=error is None)

    @property
    def failed(self) -> bool:
        """Tell whether a background save ended in an error that ``wait`` has not raised yet."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def save(self, progress: Progress) -> None:
        """Write the checkpoint of ``progress.step``, or start to write it. Collective."""
        step, whole = progress.step, type(progress.step) is int and progress.step >= 0
        require(whole, "checkpoints", "step", "a whole number of 0 or more", shown(step))
        self.wait()
        if self._optimizer is not None and self._contents.optimizer is not None:
            stored = gather_optimizer("save", self._model, self._optimizer, self._state)
            self._contents = replace(self._contents, optimizer=stored)
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
        # A program that just ends waits for it, so a checkpoint begun is completed.
        self._writing = self._thread.submit(self._write, progress, self._copies)

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes: the parts that it stores and owns."""
        tensors = {name: part for name, part, _ in stored_parts(self._mine)}
        for moment in self._moments:
            assert self._optimizer is not None, moment
            for name, part, _ in stored_parts(self._mine, moment_of(self._optimizer, moment)):
                tensors[moment_name(moment, name)] = part
        return tensors

    def wait(self) -> None:
        """Wait until the current save is committed; raise its error, the same on every rank. Collective."""
        if self._writing is not None:
            wait([self._writing])
        self.poll()
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def poll(self) -> None:
        """Report checkpoints that were committed since the last call."""
        while self._lines:
            self._say(self._lines.pop(0))

    def _write(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        rank, step = self._state.rank, progress.step
        target = step_directory(self.root, step)

        def begin() -> Staging:
            for key in ("data", "memory", "extra"):  # refused before a byte is written
                check_plain(getattr(progress, key), target, key)
            set_aside(target)
            check_output(target)
            return Staging.begin(target)

        def write(directory: Path) -> tuple[StoredFile, str] | None:
            with writing(target):
                fault("checkpoint.before_data", rank=rank, step=step)
            files_and_dtypes = write_file(directory, rank, self._layout.world, step, tensors, self._fixed)
            fault("checkpoint.after_data", rank=rank, step=step)
            return files_and_dtypes

        def commit(results: Sequence[tuple[StoredFile, str] | None]) -> None:
            fault("checkpoint.before_manifest", rank=rank, step=step)
            if staging is None:
                return
            for companion in self._companions:
                Disk().write_file(staging.directory / companion.name, companion.data)
            files_and_dtypes = [result for result in results if result is not None]
            dtype = next((dtype for _, dtype in files_and_dtypes if dtype), BUFFER)
            manifest = self._manifest(progress, [file for file, _ in files_and_dtypes], self._tensors(dtype))
            staging.publish(manifest.accepted_bytes(staging.output))
            self._lines.append(f"COMMITTED {target}")

        staging = on_rank_0(begin, self._state)
        try:
            directory = together(lambda: None if staging is None else staging.directory, self._state)[0]
            assert directory is not None, target
            results = together(lambda: write(directory), self._state)
            together(lambda: commit(results), self._state)
        finally:
            if staging is not None:
                staging.abandon()
        if not rank:
            fault("checkpoint.before_retention", rank=0, step=step)
            self._after.begin(target)  # now, when all ranks know of the commit

    def _prepare(self) -> None:
        """Read what travels along, once, and refuse now what a checkpoint of this run could not hold."""
        if not self._state.rank:
            contents = self._contents
            self._companions = read_companions(contents.companions)
            target, first = step_directory(self.root, 0), Progress(0, self._layout)
            check_plain(dict(contents.hf_config), target, "config")
            self._stages = contents.described.declarations(self._layout, split=contents.split)
            tensors = self._tensors("F32")
            files = files_to_come(tensors, self._layout.world)
            check_home(target)
            manifest = read_back(lambda: self._manifest(first, files, tensors), target)
            for path, other in good_manifests(self.root):
                check_same_model(path, other, manifest)
            if self._mirror is not None:
                self._after.mirror = Mirror(RemoteFolder(self._mirror), self.keep)
                self._after.mirror.check(self.root, manifest)

    def _tensors(self, dtype: str) -> dict[str, StoredTensor]:
        return stored_tensors(
            self._stages, self._layout, dtype, frozen=self._contents.frozen, moments=self._moments
        )

    @property
    def _moments(self) -> Mapping[str, Collection[str]]:
        """Return the moments that are saved, each with the trained parameters that have none."""
        if self._optimizer is None:
            return {}
        stored = self._contents.optimizer
        return dict.fromkeys(MOMENTS, ()) if stored is None else stored.moments

    def _manifest(
        self, progress: Progress, files: Sequence[StoredFile], tensors: dict[str, StoredTensor]
    ) -> Manifest:
        fixed = (name for stage in self._stages for name in buffer_names(stage))
        contents = self._contents
        return Manifest(
            version=WITH_GRIDS,
            kind="training" if self._optimizer is not None else "weights",
            model_type=contents.described.model_type,
            config=dict(contents.hf_config),
            layout=self._layout,
            step=progress.step,
            data_position=progress.data or None,
            extra=progress.extra,
            state={
                "split": list(contents.split) if contents.split else None,
                **({"memory": progress.memory} if progress.memory else {}),
                "frozen": [*sorted(contents.frozen.union(fixed))],  # what has no moments
            },
            adapter=contents.adapter,
            module=contents.described.module,
            optimizer=contents.optimizer if self._optimizer is not None else None,
            companions=tuple(companion.stored for companion in self._companions),
            files=tuple(files),
            tensors=tensors,
        )
