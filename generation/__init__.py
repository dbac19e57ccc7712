"""Floor 6: text from a model, on one rank or many."""

from .generate import generate
from .sampling import Sampling

__all__ = [
    "Sampling",
    "generate",
]
