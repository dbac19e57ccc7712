"""Refuse an input that is not there before the imports that take seconds, such as torch's."""

import os
import re
import shlex
from difflib import get_close_matches
from pathlib import Path

from ...system.addresses import address_of
from ...system.errors import BadInput
from .options import model_names, recipe_names

#: A name such as "meta-llama/Llama-3.2-1B", which may be that of a model of the hub.
_OF_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_there(name: str | Path, expected: str, *, kind: str = "folder") -> None:
    """Raise ``BadInput`` for a path where nothing is. Whether an address will do is found out later."""
    if address_of(name) is None and not os.path.lexists(name):
        raise BadInput(name, expected=expected, found=f"no such {kind}")


def check_weights_there(name: str | Path, expected: str, *, kind: str = "folder") -> None:
    """Raise ``BadInput`` as ``check_there`` does, unless the name may be that of a model of the hub (as
    ``from_hub`` tells), of a token file, or of what a killed command left: then another file's name has this
    one in it.
    """
    path = Path(name)
    of_the_hub = _OF_THE_HUB.fullmatch(str(name)) and not os.path.lexists(path.parent)
    if of_the_hub or path.name in ("", ".."):
        return
    try:
        others = os.listdir(path.parent)
    except FileNotFoundError:
        others = []
    except OSError:  # not one to look into
        return
    if not any(path.name in other for other in others):
        check_there(name, expected, kind=kind)


def check_recipe_there(recipe: str | Path) -> None:
    """Raise ``BadInput`` where neither a file is nor a recipe of this name comes with trilith."""
    names = recipe_names("")
    if str(recipe) in names:
        return
    todo = "" if Path(recipe).suffix == ".toml" else f"These come with trilith: {', '.join(names)}"
    if not os.path.lexists(recipe):
        raise BadInput(recipe, expected="a recipe", found="no such file", todo=todo)
    if os.path.isdir(recipe):
        todo = f'A recipe trains the model in it: model = {{ init_from = "{recipe}" }}'
        raise BadInput(recipe, expected="a recipe, a TOML file", found="a folder", todo=todo)


def check_model_there(model: str) -> None:
    """Raise ``BadInput`` where neither a file or folder is nor a published size or a recipe has this
    name.
    """
    names = model_names("")
    if model.lower() in names or os.path.lexists(model):
        return
    expected = "a published size, a config.json, a Hugging Face folder or a recipe"
    near = get_close_matches(model.lower(), names, n=3, cutoff=0.4)
    todo = f"Nearest: {', '.join(near)}" if near else "`trilith models` lists the sizes"
    raise BadInput(model, expected=expected, found="no such file or name", todo=todo)


def check_tokens_there(name: Path) -> None:
    """Raise ``BadInput`` where no token file of this name is."""
    if address_of(name) is None and not os.path.lexists(f"{name}.json"):
        text = os.path.lexists(name)
        todo = (
            f"trilith tokenize {shlex.quote(str(name)) if text else 'TEXT'} --tokenizer FOLDER --out tokens"
        )
        kind = "another file" if text else "no such file"
        raise BadInput(name, expected="a token file", found=kind, todo=todo)
