"""Find the recipes that come with the package by their names."""

from __future__ import annotations

from pathlib import Path

from ..parallel_state import BadInput

_FOLDER = Path(__file__).resolve().parent.parent / "recipes"


def shipped_recipes() -> list[str]:
    """Their names, such as ``llama-3.1-8b-8gpus``."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def recipe_file(said: str | Path) -> Path:
    """Return the file at this path, or the shipped recipe of this name; else ``BadInput`` lists them."""
    path = Path(said)
    if path.exists() or path.suffix == ".toml" or len(path.parts) != 1:
        return path
    if path.name not in (names := shipped_recipes()):
        todo = f"These come with trilith: {', '.join(names)}"
        raise BadInput(path, expected="a recipe in TOML, or the name of one", found="neither", todo=todo)
    return _FOLDER / f"{path.name}.toml"
