"""Complete names in a shell: recipes that are installed with trilith, and published sizes."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def recipe_names(incomplete: str) -> list[str]:
    """Return the names of installed recipes that begin so."""
    names = (path.stem for path in (_ROOT / "recipes").glob("*.toml"))
    return sorted(name for name in names if name.startswith(incomplete))


def size_names(incomplete: str) -> list[str]:
    """Return the published sizes that begin so."""
    table = (_ROOT / "models" / "sizes.toml").read_text(encoding="utf-8")
    names = re.findall(r'^\["(.+)"\]$', table, re.MULTILINE)  # trilith.models, which reads it, imports torch
    return sorted(name for name in names if name.startswith(incomplete))


def model_names(incomplete: str) -> list[str]:
    """Return the published sizes and the installed recipes that begin so."""
    return [*size_names(incomplete), *recipe_names(incomplete)]
