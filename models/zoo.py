"""List the families by Hugging Face's ``model_type``, and the published sizes of models by name."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ..parallel_state import BadInput
from ..storage.small_files import read_toml
from ..system import literal, nearest_names
from .base.config import ModelConfig
from .base.family import Family
from .from_transformers import family_of_type

#: Files of this folder that have a family, or one and its successors.
_FILES = """
    llama gpt2 mistral qwen glm gemma granite olmo phi starcoder2 stablelm cohere gpt_neox
    falcon opt bloom gpt_oss deepseek qwen_hybrid
"""
#: Families of the zoo by their names.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for file in _FILES.split()
    for family in vars(import_module(f".{file}", __package__)).values()
    if isinstance(family, Family)
}


#: Whose code computes a model: the zoo's if it has the family, or transformers' in any case.
Implementation = Literal["auto", "transformers"]


def implemented_by(raw: Mapping[str, Any], implementation: Implementation) -> dict[str, Any]:
    """Return a config.json's dict that says itself that transformers computes a type of the zoo."""
    kind = raw.get("model_type")
    chosen = implementation != "auto" and isinstance(kind, str) and kind in FAMILIES
    return {**raw, "implementation": implementation} if chosen else dict(raw)


def predicting(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json's dict that asks for blocks of multi-token prediction, if its family has such."""
    return {**raw, "mtp": True} if "mtp" in family_of(raw, where).config.model_fields else dict(raw)


def implementation_of(raw: Mapping[str, Any]) -> Implementation:
    """Return whose code computes the model of a config.json's dict, as the dict says itself."""
    return "transformers" if raw.get("implementation") == "transformers" else "auto"


def family_of(raw: Mapping[str, Any], where: str = "config.json") -> Family:
    """Return the family of a config.json's dict. Raises ``BadInput`` for an unknown type or a
    contradiction.
    """
    kind = raw.get("model_type")
    if kind is None:
        raise BadInput(
            where, "model_type",
            expected="the model's type, such as 'llama'",
            found="no such key" if raw else "an object without any key",
            todo="Take the config.json that came with the model; `trilith models` lists the types",
        )  # fmt: skip
    text = kind if isinstance(kind, str) else ""
    family = FAMILIES.get(text) if implementation_of(raw) == "auto" else None
    family = family or (family_of_type(text) if text else None)
    if family is None:
        todo = nearest_names(str(kind).lower(), FAMILIES, most=1, cutoff=0.7)
        listed = f"one of the {len(FAMILIES)} types that `trilith models` lists"
        expected = f"{listed}, or another of transformers'"
        raise BadInput(where, "model_type", expected=expected, found=literal(kind), todo=todo)
    architectures = raw.get("architectures")
    if architectures and architectures != [family.architecture]:
        expected = f"[{family.architecture!r}], which predicts the next token"
        todo = "A checkpoint that was saved as another class has another output layer or other blocks"
        actual = literal(architectures)
        raise BadInput(where, "architectures", expected=expected, found=actual, todo=todo)
    return family


_TABLE = Path(__file__).with_name("sizes.toml")
#: The fields whose values a row begins with, behind the number of parameters.
STANDARD = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


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
    sizes = {}
    for model_type, groups in read_toml(_TABLE).items():
        for group in groups:
            rows, null = group.pop("sizes"), group.pop("null", ())
            further = group.pop("further", ())
            columns = group.pop("columns", (*STANDARD, *further))
            shared = {"model_type": model_type, **dict.fromkeys(null), **group}
            for name, (parameters, *values) in rows.items():
                fields = shared | dict(zip(columns, values, strict=True))
                sizes[name] = Size(name, fields, parameters)
    return sizes


def published_size(name: str, where: str = "size", *, also: Iterable[str] = ()) -> Size:
    """Return the size of this name, such as ``llama-3.1-8b``.

    Raises ``BadInput`` with the nearest names, among them those of ``also``.
    """
    sizes = published_sizes()
    size = sizes.get(name.lower())
    if size is None:
        names, listed = sorted({*sizes, *also}), "`trilith models` lists them"
        todo = nearest_names(name.lower(), names, cutoff=0.5, also=listed)
        raise BadInput(where, expected="the name of a published size", found=repr(name)[:80], todo=todo)
    return size


def tiny_config(model_type: str) -> dict[str, Any]:
    """Return a tiny config.json of this ``model_type``, with few of its fields at their defaults."""
    rows, config = _rows(), FAMILIES[model_type].config
    own: dict[str, Any] = deepcopy({**rows[model_type]})
    left_out = {*config.HARMLESS, *own.pop("absent", ())}
    shared = {
        config.spelled(name): deepcopy(value)
        for name, value in rows["common"].items()
        if name in config.model_fields and name not in left_out
    }
    return {"model_type": model_type, **shared, **dict.fromkeys(own.pop("null", ())), **own}


@cache
def _rows() -> Mapping[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("tiny.toml"))
