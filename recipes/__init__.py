"""Floor 6: recipes. A recipe is one TOML file that describes a run; the shipped ones lie in this folder.

Offers ``load_recipe`` for a file with overrides, ``parse_recipe`` for plain data, and the checked ``Recipe``.
"""

from .recipe import Recipe, load_recipe, parse_recipe

__all__ = ["Recipe", "load_recipe", "parse_recipe"]
