"""Make the trackers that a recipe names, with Accelerate's adapters, and let a resumed run go on in them."""

import json
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..parallel_state import BadInput
from ..storage.disk import writing
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
            path = self._out / _IDENTITIES
            temporary = path.with_suffix(".tmp")
            with writing(path):
                temporary.write_text(json.dumps(self._known), encoding="utf-8")
                temporary.replace(path)

    def close(self) -> None:
        """Leave Accelerate as it was before."""
        if self._state is not None:
            self._state._reset_state()
            self._state = None
