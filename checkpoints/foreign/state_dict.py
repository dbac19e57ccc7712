"""Read one file in which ``torch.save`` wrote a model, or a trainer's dict with a model in it."""

from __future__ import annotations

from pathlib import Path

from ...storage.catalog import Catalog, in_one_file
from ...storage.torch_archive import open_state_dict
from .checkpoint import ForeignCheckpoint

FORM = "a file of torch.save"
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def recognise(path: Path) -> bool:
    """Return whether this is a single file that torch.save may have written."""
    return path.is_file() and path.name.endswith(_ENDINGS)


def read(path: Path) -> ForeignCheckpoint:
    """Read the headers of the file."""
    file = open_state_dict(path)
    return ForeignCheckpoint(path, FORM, Catalog({name: in_one_file(file, name) for name in file.views}))
