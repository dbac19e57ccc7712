"""Read one file in which ``torch.save`` wrote a model, or a trainer's dict with a model in it."""

from __future__ import annotations

from pathlib import Path

from ...parallel_state import Box
from ...storage.torch_archive import open_state_dict
from .checkpoint import Chunk, ForeignCheckpoint, ForeignTensor

FORM = "a file of torch.save"
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def recognise(path: Path) -> bool:
    """Return whether this is a single file that torch.save may have written."""
    return path.is_file() and path.name.endswith(_ENDINGS)


def read(path: Path) -> ForeignCheckpoint:
    """Read the headers of the file."""
    file = open_state_dict(path)
    tensors = {
        name: ForeignTensor(view.dtype, view.shape, (Chunk(Box.whole(view.shape), file, view),))
        for name, view in file.views.items()
    }
    return ForeignCheckpoint(path, FORM, tensors)
