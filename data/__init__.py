"""Floor 3: from token files to batches, the same for every layout."""

from .batch import Batch
from .tokens import TokenFile

__all__ = [
    "Batch",
    "TokenFile",
]
