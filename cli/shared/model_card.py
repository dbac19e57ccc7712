"""Write the model card of an exported folder: its base, the recipe that trained it, its licence."""

import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...checkpoints import Source
from ...recipes.recipe import Recipe
from ...recipes.recipe_text import commented_recipe
from ...runs.events import last_recipe
from ...storage.safe_open import read_small

#: A run's file with its recipes, and a folder's card.
_EVENTS, CARD = "events.jsonl", "README.md"
_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license: *([\w.+-]+) *\n(?:.*\n)*?---\n")


def model_card(source: Source, *, base: str | None = None) -> str:
    """Return the card of what is exported from ``source``. ``base``: the model that adapters are added to.

    Paths are shortened to their last name: a card is made to be published.
    """
    recipe = _recipe_of(source.path)
    library = "transformers" if source.adapter is None or base is not None else "peft"
    base = base or recipe.get("model", {}).get("init_from")
    kind = source.described.model_type
    licence = _licence_of(Path(base) if base else source.path)
    head = {
        "license": licence,
        "base_model": base if base and not Path(base).exists() else None,  # a name of the hub
        "library_name": library,
    }
    step = None if source.manifest is None else source.manifest.step
    trained = f"trained to step {step:,}" if step is not None else "converted"
    lines = ["---", *(f"{key}: {value}" for key, value in head.items() if value), "tags: [trilith]", "---"]
    lines += ["", f"# A {kind} model", "", f"Weights {trained} with trilith {version('trilith')}.", ""]
    lines += [f"- Base: {_last_name(base) if base else 'none named: from scratch, or see the source'}"]
    lines += [f"- Licence: {licence or 'not stated here; that of the base and of the data applies'}"]
    if recipe:
        settings = commented_recipe(_changed(recipe)).strip()
        lines += [f"- Recipe, as far as it differs from the defaults:\n\n```toml\n{settings}\n```"]
    return "\n".join(lines) + "\n"


def _recipe_of(checkpoint: Path) -> dict[str, Any]:
    """Return the last recipe of the run that a checkpoint lies in; empty if it lies in none."""
    for folder in (checkpoint, *checkpoint.absolute().parents[:2]):
        if (folder / _EVENTS).is_file():
            return last_recipe(folder / _EVENTS)
    return {}


def _changed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults, the run's folder apart; all of a recipe that this
    version does not know.
    """
    with suppress(ValidationError):
        recipe = Recipe.model_validate(settings)
        settings = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {key: _public(setting) for key, setting in settings.items() if key != "out"}


def _public(setting: Any) -> Any:
    if isinstance(setting, dict):
        return {key: _public(entry) for key, entry in setting.items()}
    if isinstance(setting, list):
        return [_public(entry) for entry in setting]
    return _last_name(setting) if isinstance(setting, str) else setting


def _last_name(text: str) -> str:
    """Return an absolute path's last name; what may be a model of the hub stays."""
    return Path(text).name if text.startswith(("/", "~", ".")) else text


def _licence_of(folder: Path) -> str | None:
    card = folder / CARD
    if not card.is_file():
        return None
    head = _LICENSE.match(read_small(card, 1 << 20).decode(errors="replace"))
    return head[1] if head else None
