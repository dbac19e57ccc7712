"""Keep the list of nodes that jobs should not use: ``excluded-nodes`` in the run's folder."""

from collections.abc import Iterable
from pathlib import Path

from ..storage.disk import writing
from ..storage.small_files import read_text

#: One node's name a line; the Slurm script of ``trilith launch`` reads it.
EXCLUDED_NODES = "excluded-nodes"


def exclude_nodes(folder: Path, names: Iterable[str]) -> Path:
    """Add node names to the list in ``folder``, each once, and return the list's path; old lines stay."""
    path = folder / EXCLUDED_NODES
    known = read_text(path).splitlines() if path.exists() else []
    lines = [*known, *(name for name in dict.fromkeys(names) if name not in known)]
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        temporary.replace(path)
    return path
