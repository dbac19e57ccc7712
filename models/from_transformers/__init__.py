"""Adopt the models of transformers that the zoo lacks: its code computes, with our parallel layers.

``family_of_type`` returns the ``Family`` of a model type. Nothing of transformers is imported before.
"""

from .config import adopted_types
from .model import TransformersFamily, family_of_type

__all__ = ["TransformersFamily", "adopted_types", "family_of_type"]
