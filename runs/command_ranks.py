"""Run a command on several local ranks, which get its words again and end with a line of figures."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..storage.small_files import read_text
from .launch import launch

#: In the status folder, what the first rank has to say at the end: the ranks' stderr is the launcher's log.
_FIGURES = "figures"


def start_ranks(words: Sequence[str], world: int, note: Callable[[str], None]) -> int:
    """Run the command on ``world`` local ranks, which get ``--status FOLDER``; return the exit code.

    ``note`` gets what the first rank has left with ``leave_figures``.
    """
    with tempfile.TemporaryDirectory(prefix=f"trilith-{words[0]}-") as folder:
        code = launch([*words, "--status", folder], world, Path(folder))
        figures = Path(folder) / _FIGURES
        if figures.exists():
            note(read_text(figures))
    return code


def leave_figures(text: str, note: Callable[[str], None], status: Path | None) -> None:
    """Give ``note`` the figures, or leave them in the folder ``status`` for the process that started this."""
    if status is None:
        note(text)
    else:
        (status / _FIGURES).write_text(text)
