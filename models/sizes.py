"""List the published sizes of models by name: the family, the config, and the number of parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ..parallel_state import BadInput
from ..storage.small_files import read_toml
from .base.config import ModelConfig
from .base.family import Family
from .zoo import family_of

_TABLE = Path(__file__).with_name("sizes.toml")


@dataclass(frozen=True)
class Size:
    """Describe a published model: the fields of its config.json, and its published number of parameters."""

    name: str
    fields: Mapping[str, Any]
    parameters: int

    @property
    def family(self) -> Family:
        """Return the family of the model."""
        return family_of(self.fields, self.name)

    @property
    def config(self) -> ModelConfig:
        """Return the config of the model."""
        return self.family.from_hf(self.fields, self.name)

    def with_fields(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with some replaced, which may have another name that the family knows."""
        common = self.family.config.OWN_NAMES
        changed = {common.get(key, key) for key in changes}
        unchanged = {key: value for key, value in self.fields.items() if common.get(key, key) not in changed}
        return {**unchanged, **changes}


@cache
def published_sizes() -> Mapping[str, Size]:
    """Return every row of the table, in its order."""
    raw = read_toml(_TABLE)

    def fields_of(name: str) -> dict[str, Any]:
        row: dict[str, Any] = {**raw[name]}
        fields = fields_of(row.pop("like")) if "like" in row else {}
        return fields | dict.fromkeys(row.pop("null", ())) | row

    sizes = {}
    for name in raw:
        fields = fields_of(name)
        parameters = fields.pop("parameters")
        sizes[name] = Size(name, fields, parameters)
    return sizes


def published_size(name: str, where: str = "size", *, also: Iterable[str] = ()) -> Size:
    """Return the size of this name, such as ``llama-3.1-8b``.

    Raises ``BadInput`` with the nearest names, among them those of ``also``.
    """
    sizes = published_sizes()
    size = sizes.get(name.lower())
    if size is None:
        near = get_close_matches(name.lower(), sorted({*sizes, *also}), n=3, cutoff=0.5)
        todo = f"Nearest: {', '.join(near)}" if near else "`trilith models` lists them"
        raise BadInput(where, expected="the name of a published size", found=repr(name)[:80], todo=todo)
    return size
