"""List the families by Hugging Face's ``model_type``."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

from ..parallel_state import BadInput
from .base.family import Family
from .from_transformers import family_of_type

#: Files of this folder that have a family, or one and its successors.
_FILES = """
    llama gpt2 mistral qwen qwen_moe glm gemma granite olmo phi starcoder2 stablelm cohere gpt_neox
    falcon opt bloom gpt_oss deepseek qwen_hybrid
"""
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
    zoo = isinstance(kind, str) and kind in FAMILIES
    mine = zoo and implementation_of(raw) == "auto"
    adopted = family_of_type(kind) if isinstance(kind, str) and not mine else None
    if adopted is None and not zoo:
        near = get_close_matches(str(kind).lower(), FAMILIES, n=1, cutoff=0.7)
        expected = (
            f"one of the {len(FAMILIES)} types that `trilith models` lists, or another of transformers'"
        )
        todo = f"Nearest: {near[0]}" if near else ""
        raise BadInput(where, "model_type", expected=expected, found=repr(kind)[:80], todo=todo)
    family = FAMILIES[kind] if adopted is None else adopted
    architectures = raw.get("architectures")
    if architectures and architectures != [family.architecture]:
        expected = f"[{family.architecture!r}], which predicts the next token"
        todo = "A checkpoint that was saved as another class has another output layer or other blocks"
        actual = repr(architectures)[:80]
        raise BadInput(where, "architectures", expected=expected, found=actual, todo=todo)
    return family
