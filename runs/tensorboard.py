"""Write TensorBoard event files, with torch's own writer, if the package ``tensorboard`` is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ..parallel_state import BadInput


def check_tensorboard() -> None:
    """Raise ``BadInput`` that says what to install, if TensorBoard is missing."""
    if find_spec("tensorboard") is None:
        raise BadInput(
            "recipe",
            "watch.tensorboard",
            expected="the package tensorboard",
            found="not installed",
            todo="pip install 'trilith[tensorboard]'",
        )


class EventFiles:
    """Write scalars into a folder for TensorBoard. Steps count from 1, as checkpoints do.

    ``start``: how many steps are done; what an earlier attempt wrote after them no longer counts.
    """

    def __init__(self, folder: Path, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Write the numbers known after ``step`` steps; ``None`` is left out.

        They are plain scalars: of tensors, TensorBoard's own reader would keep what a resumed run wrote
        twice.
        """
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
