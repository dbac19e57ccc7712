"""Manifests of checkpoints of many ranks, made from declarations and layout alone, without processes.

Processor time, and the most memory that Python held at once: of one rank's own share, of the manifest that
rank 0 writes at each save, and of loading it beside as many files without blocks.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from measure import Row, at_most, seconds_of
from trilith.checkpoints import Manifest
from trilith.checkpoints.manifest import WITH_GRIDS
from trilith.checkpoints.optimizer_state import MOMENTS
from trilith.checkpoints.rank_files import files_to_come, stored_tensors
from trilith.checkpoints.stored_tensor import StoredTensor
from trilith.parallel_state import Declaration, Layout
from trilith.recipes import load_recipe
from trilith.storage.file_names import MANIFEST
from trilith.storage.strict_json import StoredFile
from trilith.training.run_plan import plan

#: Name, shipped recipe, and how many times its data ranks.
RUNS = (
    ("70B on 256 ranks", "llama-3.1-70b-64gpus", 4),
    ("70B on 1,024 ranks", "llama-3.1-70b-64gpus", 16),
    ("405B on 16,384 ranks", "llama-3.1-405b-16384gpus", 1),
)

#: Bytes of each file.
SIZE = 10**10


@dataclass(frozen=True)
class StandIn:
    """Hold what the ranks of a run know without any process."""

    layout: Layout
    stages: list[dict[str, Declaration]]

    def files(self) -> tuple[StoredFile, ...]:
        """Return what the ranks would tell rank 0 of their files."""
        files = files_to_come(self.tensors(), self.layout.world)
        return tuple(one.model_copy(update={"size": SIZE, "crc32": 2**32 - 1}) for one in files)

    def tensors(self) -> dict[str, StoredTensor]:
        return stored_tensors(
            self.stages, self.layout, "F32", frozen=frozenset(), moments=dict.fromkeys(MOMENTS, ())
        )

    def write(self, files: tuple[StoredFile, ...], folder: Path) -> bytes:
        """Return the manifest of a save, as rank 0 makes it: described, written, read back and checked."""
        return Manifest(
            version=WITH_GRIDS, kind="training", model_type="llama", config={}, layout=self.layout, step=1,
            state={"memory": {"updates": 1}}, files=files, tensors=self.tensors(),
        ).accepted_bytes(folder)  # fmt: skip

    def own_share(self) -> int:
        """Return how many tensors the last rank writes; its own declarations are all it looks at."""
        at = self.layout.coordinates(self.layout.world - 1)
        return sum(one.owner(self.layout, at) for one in self.stages[at.pipeline].values())


def stand_in(name: str, times: int) -> StandIn:
    recipe = load_recipe(name)
    made = plan(recipe)
    layout = recipe.layout
    key = "data_shard" if layout.zero else "data_replicate"
    layout = replace(layout, **{key: getattr(layout, key) * times})
    return StandIn(layout, made.family.declarations(made.config, layout, split=made.split))


def measured(work: Callable[[], object], rounds: int) -> tuple[list[float], float]:
    """Return the processor seconds of some calls, sorted, and the peak of one more in MB."""
    seconds = sorted(seconds_of(work, clock=time.process_time) for _ in range(rounds))
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 1e6


def main(folder: Path, rounds: int) -> list[Row]:
    rows = []
    for title, name, times in RUNS:
        run = stand_in(name, times)
        place = folder / title.replace(" ", "-")
        place.mkdir()
        files = run.files()
        raw = run.write(files, place)
        (place / MANIFEST).write_bytes(raw)
        manifest = Manifest.parse(raw, place)
        for file in manifest.files:
            with (place / file.name).open("wb") as empty:
                empty.truncate(SIZE)  # without blocks on the disk
        grids = ((tensor.grid, tensor.shape) for tensor in manifest.tensors.values())
        parts = sum(grid.number(shape) for grid, shape in grids if grid is not None)
        works: dict[str, tuple[Callable[[], object], float]] = {
            "a rank's own share": (run.own_share, 1.0),
            "writing": (lambda run=run, files=files, place=place: run.write(files, place), 2.0),
            "loading": (lambda place=place: Manifest.load(place), 2.0),
        }
        for what, (work, goal) in works.items():
            seconds, peak = measured(work, rounds)
            row = at_most(f"{title}: {what}", seconds, goal)
            row.details = {"peak, MB": peak, "parts": float(parts)}
            row.good = row.good and (peak <= 100 or what != "a rank's own share")
            rows.append(row)
        rows.append(at_most(f"{title}: manifest", len(raw) / 1e6, 20, "MB"))
    return rows
