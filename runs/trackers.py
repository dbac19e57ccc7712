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


class NamedTrackers:
    """Make Accelerate's trackers of one run.

    ``out``: the run's folder, where files of TensorBoard and of wandb lie, and the file that says by which
    name each tracker knows the run. ``project``: the name under which a tracker lists several runs.
    ``start``: how many steps are done; 0 begins a new run in each tracker.
    """

    def __init__(self, out: Path, project: str, *, start: int) -> None:
        from accelerate import PartialState

        self._out, self._project, self._start = out, project, start
        path = out / _IDENTITIES
        self._known: dict[str, str] = read_json(path) if start and path.is_file() else {}
        self._made: dict[str, Any] = {}
        # Accelerate's trackers refuse to log before it. The user's own stays.
        self._state = PartialState() if not PartialState._shared_state else None

    def goes_on(self, name: TrackerName) -> bool:
        """Tell whether the tracker has steps of this run that it cannot drop."""
        return name in self._known

    def make(self, name: TrackerName) -> Any:
        """Return the tracker, not yet started."""
        from accelerate import tracking

        title = self._out.absolute().name
        if name == "tensorboard":
            made: Any = tracking.TensorBoardTracker(name, str(self._out), purge_step=self._start + 1)
        elif name == "mlflow":  # gives runs their identity by itself
            made = tracking.MLflowTracker(self._project, run_name=title, run_id=self._known.get(name))
        else:
            identity = self._known.setdefault(name, secrets.token_hex(4))
            if name == "wandb":
                made = tracking.WandBTracker(
                    self._project, name=title, id=identity, resume="allow", dir=str(self._out)
                )
            else:
                made = tracking.TrackioTracker(self._project, name=f"{title}-{identity}", resume="allow")
        self._made[name] = made
        return made

    def remember(self) -> None:
        """Write by which name each tracker knows the run, once all have started."""
        if "mlflow" in self._made:
            self._known["mlflow"] = self._made["mlflow"].tracker.info.run_id
        if self._known:
            write_whole(self._out / _IDENTITIES, json.dumps(self._known))

    def close(self) -> None:
        """Leave Accelerate as it was before."""
        if self._state is not None:
            self._state._reset_state()
            self._state = None


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

    ``names``: the trackers of the recipe; ``others``: the objects that were given to ``run``. ``start``: the
    number of steps done; ``logged``: the last step that an earlier attempt handed over. If a resumed run
    repeats steps, trackers do not get them a second time, except TensorBoard, whose files can drop the steps
    after ``start``. A tracker that fails later is no longer called, and ``say`` gets the reason. Raises
    ``BadInput`` if a tracker cannot be started.
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
        self._say = say
        self._named = NamedTrackers(out, project, start=start) if names else None
        self._running: list[_Running] = []
        try:
            if self._named is not None:
                for name in names:
                    last_logged = logged if self._named.goes_on(name) else start
                    tracker = self._begin(name, self._named.make(name), last_logged)
                    if not start and name != "tensorboard":  # there it would show as a run of its own
                        tracker.store_init_configuration(dict(recipe))
                self._named.remember()
            for other in others:
                self._begin(_name_of(other), other, logged)
                if not start:
                    other.store_init_configuration(dict(recipe))
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str, tracker: Tracker, logged: int) -> Tracker:
        try:
            tracker.start()
        except Exception as error:  # of a package of others, which may raise anything
            raise BadInput(
                "recipe", "watch.trackers", expected=f"{name} to start",
                found=" ".join(f"{type(error).__name__}: {error}".split()),
                todo="Without a network: WANDB_MODE=offline, or a MLFLOW_TRACKING_URI on this machine",
            ) from error  # fmt: skip
        self._running.append(_Running(name, tracker, logged))
        return tracker

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
        if self._named is not None:
            self._named.close()

    def _try(self, running: _Running, call: Callable[[Tracker], None]) -> None:
        """Call a tracker. A run of days must not end because a tracker's server does not answer."""
        try:
            call(running.tracker)
        except Exception as error:
            self._running.remove(running)
            self._say(f"tracker {running.name} failed and gets nothing more: {type(error).__name__}: {error}")


def _name_of(tracker: Tracker) -> str:
    return str(getattr(tracker, "name", type(tracker).__name__))
