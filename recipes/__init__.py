"""Floor 6: recipes, their keys and checks; the shipped ones are the TOML files here."""

from .recipe import Recipe, load_recipe

__all__ = [
    "Recipe",
    "load_recipe",
]
