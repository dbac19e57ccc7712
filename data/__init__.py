"""Floor 3: from texts to token files, and from token files to batches, the same for every layout.

Offers ``TokenFile``, which reads the file that ``trilith tokenize`` writes, and ``Batch``, the input of a
step.
"""

from .batch import Batch
from .token_file import TokenFile

__all__ = ["Batch", "TokenFile"]
