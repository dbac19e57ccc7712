"""Adopt the causal models of transformers that the zoo lacks: its code computes, with our parallel layers.

``family_of_type`` returns the ``Family`` of a model type. Nothing of transformers is imported before.
"""

from .family import TransformersFamily, adopted_types, family_of_type

__all__ = ["TransformersFamily", "adopted_types", "family_of_type"]
