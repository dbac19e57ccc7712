"""Hand the figures of a run to trackers, such as TensorBoard or Weights & Biases, each figure once."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ..parallel_state import BadInput
from ..storage.disk import write_whole
from ..storage.small_files import read_json

#: Trackers that a recipe may name; others are given to ``run`` as objects.
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
#: A file in the run's folder: by which name each tracker knows the run.
_IDENTITIES = "trackers.json"


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise ``BadInput`` that says what to install, if Accelerate or the package of a tracker is missing."""
    for name in names:
        missing = [package for package in (name, "accelerate") if find_spec(package) is None]
        if missing:
            raise BadInput(
                "recipe", f"watch.trackers: {name}", expected=f"the package {missing[0]}",
                found="not installed", todo=f"pip install {' '.join(missing)}",
            )  # fmt: skip


class Tracker(Protocol):
    """Describe what a tracker can do; every ``accelerate.tracking.GeneralTracker`` can.

    ``start`` is called first and ``finish`` last. ``store_init_configuration`` gets the recipe, once in a
    run. ``log`` gets the numbers known after ``step`` steps, counted from 1, in one or several calls.
    """

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


class _Running(NamedTuple):
    """Name a tracker that has started, and the last step that it has."""

    name: str
    tracker: Tracker
    logged: int


class Trackers:
    """Start the trackers of a run, and hand figures to them; for the first rank alone.

    ``names``: the trackers of the recipe; ``others``: the objects that were given to ``run``. ``out``: the
    run's folder, where files of TensorBoard and of wandb lie. ``project``: the name under which a tracker
    lists several runs. ``start``: the number of steps done; 0 begins a new run in each tracker. ``logged``:
    the last step that an earlier attempt handed over. If a resumed run repeats steps, trackers do not get
    them a second time, except TensorBoard, whose files can drop the steps after ``start``. A tracker that
    fails later is no longer called, and ``say`` gets the reason. Raises ``BadInput`` if a tracker cannot be
    started.
    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        others: Sequence[Tracker],
        out: Path,
        *,
        project: str,
        recipe: Mapping[str, Any],
        start: int,
        logged: int,
        say: Callable[[str], None],
    ) -> None:
        self._say, self._running = say, list[_Running]()
        path = out / _IDENTITIES
        identities: dict[str, str] = read_json(path) if names and start and path.is_file() else {}
        self._accelerate: Any = None
        if names:
            from accelerate import PartialState

            # Before there is one, its trackers refuse to log; one that the user has made stays.
            self._accelerate = PartialState() if not PartialState._shared_state else None
        try:
            for name in names:
                # One that knows the run has steps of it that it cannot drop.
                last_logged = logged if name in identities else start
                tracker = _made(name, out, project, identities, start)
                self._begin(name, tracker, last_logged)
                if name == "mlflow":
                    identities[name] = tracker.tracker.info.run_id
                if not start and name != "tensorboard":  # there it would show as a run of its own
                    tracker.store_init_configuration(dict(recipe))
            if identities:
                write_whole(path, json.dumps(identities))
            for other in others:
                self._begin(str(getattr(other, "name", type(other).__name__)), other, logged)
                if not start:
                    other.store_init_configuration(dict(recipe))
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str, tracker: Tracker, logged: int) -> None:
        try:
            tracker.start()
        except Exception as error:  # of a package of others, which may raise anything
            raise BadInput(
                "recipe", "watch.trackers", expected=f"{name} to start",
                found=" ".join(f"{type(error).__name__}: {error}".split()),
                todo="Without a network: WANDB_MODE=offline, or a MLFLOW_TRACKING_URI on this machine",
            ) from error  # fmt: skip
        self._running.append(_Running(name, tracker, logged))

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Hand over the numbers known after ``step`` steps; other values are left out."""
        numbers = {name: value for name, value in figures.items() if type(value) in (int, float)}
        for running in [*self._running]:
            if step > running.logged:
                self._try(running, lambda tracker: tracker.log(numbers, step=step))

    def close(self) -> None:
        """Tell the trackers that the run has ended."""
        for running in [*self._running]:
            self._try(running, lambda tracker: tracker.finish())
        self._running = []
        if self._accelerate is not None:
            self._accelerate._reset_state()
            self._accelerate = None

    def _try(self, running: _Running, call: Callable[[Tracker], None]) -> None:
        """Call a tracker. A run of days must not end because a tracker's server does not answer."""
        try:
            call(running.tracker)
        except Exception as error:
            self._running.remove(running)
            self._say(f"tracker {running.name} failed and gets nothing more: {type(error).__name__}: {error}")


def _made(name: TrackerName, out: Path, project: str, identities: dict[str, str], start: int) -> Any:
    """Return Accelerate's tracker, not yet started. ``known``: by which name each tracker knows the run."""
    from accelerate import tracking

    title = out.absolute().name
    if name == "tensorboard":
        return tracking.TensorBoardTracker(name, str(out), purge_step=start + 1)
    if name == "mlflow":  # gives runs their identity by itself
        return tracking.MLflowTracker(project, run_name=title, run_id=identities.get(name))
    identity = identities.setdefault(name, secrets.token_hex(4))
    if name == "wandb":
        return tracking.WandBTracker(project, name=title, id=identity, resume="allow", dir=str(out))
    return tracking.TrackioTracker(project, name=f"{title}-{identity}", resume="allow")
