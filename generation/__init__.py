"""Floor 6: text from a model, on one rank or many.

Offers ``generate``, from lists of token ids to their continuations in any layout, and ``Sampling``.
"""

from .generate import generate
from .sampling import Sampling

__all__ = [
    "Sampling",
    "generate",
]
