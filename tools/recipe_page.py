"""Write the tables of docs/recipe.md and docs/training.md from the keys' own help: ``make docs``."""

import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from trilith.recipes import section, sections
from trilith.recipes.recipe import Recipe

#: A table in a page: the section's class, perhaps some of its keys, the table; or the shipped recipes.
TABLE = re.compile(r"(<!-- (\w+)(?:: ([\w ]+))? -->)\n.*?<!-- end -->", re.DOTALL)


def default_of(field: FieldInfo) -> str:
    """Return a key's default as the tables show it."""
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if isinstance(default, BaseModel) or default == ():
        return ""
    if isinstance(default, float) and default >= 2**16:
        return f"2^{default.hex().split('p+')[1]}"
    return (
        "none" if default is None else f"`{str(default).replace('True', 'true').replace('False', 'false')}`"
    )


def choices_of(annotation: Any) -> list[str]:
    """Return the words that a key may have, then what else it may have; nothing for a key without words."""
    choices: list[str] = []
    for part in get_args(annotation):
        if isinstance(part, str):
            choices.append(f"`{part}`")
        elif part is bool:
            choices += ["`true`", "`false`"]
        elif part is int or (get_origin(part) is Annotated and get_args(part)[0] is int):
            choices.append("a number")
        elif get_origin(part) is not None:
            choices += choices_of(part)
    words = [choice for choice in choices if choice.startswith("`")]
    return words + [choice for choice in choices if choice not in words] if words else []


def table(model: type[BaseModel], keys: list[str]) -> str:
    """Write the table of a section's keys, or of some of them."""
    lines = ["| key | default | |", "|---|---|---|"]
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        if keys and name not in keys:
            continue
        assert field.description, f"{model.__name__}.{name} has no description"
        words = ", ".join(choices_of(field.annotation))
        several = "some of" if get_origin(field.annotation) is list else "one of"
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        words = f"; {several} {words}" if words else ""
        lines.append(f"| `{name}` | {default_of(field)} | {meaning}{words} |")
    return "\n".join(lines) + "\n"


#: Each section's class, by its name.
SECTIONS: dict[str, type[BaseModel]] = {
    name: model
    for file in (sections, section)
    for name, model in {"Recipe": Recipe, **vars(file)}.items()
    if isinstance(model, type)
    and issubclass(model, BaseModel)
    and model.model_fields
    and name != "LoraConfig"
}


def shipped(recipes: Path = Path(sections.__file__).parent) -> str:
    """Write the table of the recipes that come with trilith, by the first sentence of each."""
    lines = ["| recipe | for |", "|---|---|"]
    for file in sorted(recipes.glob("*.toml")):
        comment = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"| [`{file.stem}`](../recipes/{file.name}) | {re.split(r'[.,:](?: |$)', comment)[0]} |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """Replace the tables in a page by those that the keys' help gives now."""

    def table_of(match: re.Match[str]) -> str:
        head, name, keys = match[1], match[2], match[3]
        rows = shipped() if name == "shipped" else table(SECTIONS[name], (keys or "").split())
        return f"{head}\n{rows}<!-- end -->"

    return TABLE.sub(table_of, text)


if __name__ == "__main__":
    for page in (Path("docs/recipe.md"), Path("docs/training.md")):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
