"""Hand the figures of a run to trackers, such as TensorBoard or Weights & Biases, each figure once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..parallel_state import BadInput
from .named_trackers import NamedTrackers, TrackerName


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
