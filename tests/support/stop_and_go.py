"""Check that a run which is stopped and goes on ends as a run that was never stopped.

The uninterrupted run depends on the recipe alone, not on where a row stops: it is made once for all rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from trilith.machine.random_files import write_tokens
from trilith.ranks.pool import run_parallel
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import read_metrics

from support.refusals import cases
from support.short_runs import run_recipe, tiny_recipe, whole_tensors

#: Figures of a step in which two equal runs may differ.
OF_THE_MACHINE = {"seconds", "tokens_per_second", "memory", "slow_rank", "slow_host", "slow_times"}
#: By which a run in another layout may differ from the uninterrupted one.
ROUNDING = 1e-10


@dataclass(frozen=True)
class StopAndGo:
    """State the starts of a run, and the uninterrupted run that they must equal.

    ``why`` is the test's id. ``starts``: the changes to ``recipe`` of each start; all but the last stop after
    an equal share of the steps, or where ``stops`` says. The uninterrupted run is made with the changes
    ``whole``: those of the starts if they are all the same, else none, which is one process. The two are
    compared bit for bit where all have one layout, else to ``ROUNDING``. ``given`` writes what the recipe
    needs into a folder, and returns changes that name it. ``train`` is what each rank does with the recipe.
    """

    why: str
    starts: Sequence[dict[str, Any]]
    recipe: dict[str, Any] = field(default_factory=dict)
    stops: Sequence[int] = ()
    whole: dict[str, Any] | None = None
    given: Callable[[Path], dict[str, Any]] = lambda folder: {}
    train: Callable[[dict[str, Any]], object] = run_recipe
    slow: bool = False

    @property
    def uninterrupted(self) -> dict[str, Any]:
        """Return the changes with which the uninterrupted run is made."""
        alike = all(one == self.starts[0] for one in self.starts)
        return self.whole if self.whole is not None else self.starts[0] if alike else {}

    @property
    def relative(self) -> float:
        """Return how far the run may differ from the uninterrupted one."""
        layouts = [{**self.recipe, **changes}.get("layout", {}) for changes in self.starts]
        whole = {**self.recipe, **self.uninterrupted}.get("layout", {})
        return 0.0 if all(layout == whole for layout in layouts) else ROUNDING


def differences(one: Path, other: Path, *, relative: float = 0.0, but: Sequence[str] = ()) -> list[str]:
    """Return what differs between two runs' folders: figures of steps, and tensors of the newest checkpoint.

    A tensor may differ by ``relative`` of its largest number; one without moments, which nothing trains, may
    not differ. Figures named in ``but`` are not compared.
    """
    left_out = OF_THE_MACHINE.union(but)
    lines, others = (
        [{key: value for key, value in line.items() if key not in left_out} for line in read_metrics(file)]
        for file in (one / "metrics.jsonl", other / "metrics.jsonl")
    )
    found = [] if len(lines) == len(others) > 0 else [f"{len(lines)} steps, {len(others)}"]
    for line, same in zip(lines, others, strict=False):
        for key in sorted(line.keys() | same.keys()):
            if not _close(line.get(key), same.get(key), relative):
                found.append(f"step {line['step']}: {key}: {line.get(key)}, {same.get(key)}")
    tensors, theirs = whole_tensors(one), whole_tensors(other)
    found += [f"{name}: only in one" for name in sorted(tensors.keys() ^ theirs.keys())]
    for name in tensors.keys() & theirs.keys():
        trained = name.startswith("optimizer.") or f"optimizer.exp_avg.{name}" in tensors
        bound = relative * float(tensors[name].abs().max()) if trained else 0.0
        if not float((tensors[name] - theirs[name]).abs().max()) <= bound:
            found.append(f"{name}: more than {bound} apart")
    return found


def _close(one: object, other: object, relative: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= relative * abs(one)
    return one == other


#: By its recipe: the folder of an uninterrupted run.
_wholes: dict[str, Path] = {}


def check_stop_and_go(row: StopAndGo, folder: Path, kept: pytest.TempPathFactory) -> Path:
    """Make the starts of a row in a folder, and see them equal the uninterrupted run; return their folder."""
    raw = row.recipe | row.given(folder)
    tokens = kept.getbasetemp() / "stop-and-go" / "tokens"  # no token files beside other tests' folders
    if not tokens.parent.exists():
        tokens.parent.mkdir()
        write_tokens(tokens)

    def train(out: Path, **changes: Any) -> None:
        made = tiny_recipe(out, tokens, **_together(raw, changes))
        run_parallel(row.train, parse_recipe(made).layout.world, made)

    key = json.dumps([row.train.__qualname__, row.given.__qualname__, row.recipe, row.uninterrupted])
    if key not in _wholes:
        whole = kept.mktemp("uninterrupted") / "run"
        train(whole, **row.uninterrupted)
        _wholes[key] = whole
    steps, count = int(tiny_recipe(folder, tokens, **raw)["steps"]), len(row.starts)
    stops = row.stops or [steps * number // count for number in range(1, count)]
    for changes, stop in zip(row.starts, [*stops, None], strict=True):
        train(folder / "run", **changes, stop_after=stop)
    assert differences(_wholes[key], folder / "run", relative=row.relative) == []
    return folder / "run"


def _together(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with changes, of which a section replaces keys of the section."""
    both = {key: raw[key] | changes[key] for key in raw.keys() & changes.keys() if isinstance(raw[key], dict)}
    return raw | changes | both


def stop_and_go(*table: StopAndGo | Iterable[StopAndGo]) -> Any:
    """Return one test with a case for each row, for a test module to bind to a name."""

    @pytest.mark.parametrize("row", cases(table))
    def test(row: StopAndGo, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        check_stop_and_go(row, tmp_path, tmp_path_factory)

    return test
