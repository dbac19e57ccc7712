"""Floor 3: from texts to token files, and from token files to batches, the same for every layout.

Offers ``TokenFile``, what ``trilith tokenize`` writes, and ``Batch``, what a step is given.
"""

from .batch import Batch
from .tokens import TokenFile

__all__ = [
    "Batch",
    "TokenFile",
]
