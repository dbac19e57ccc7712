"""List the families by Hugging Face's ``model_type``."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from ..parallel_state import BadInput
from .base.family import Family
from .bloom import BLOOM
from .cohere import COHERE, COHERE2
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .exaone4 import EXAONE4
from .falcon import FALCON
from .from_transformers import family_of_type
from .gemma import GEMMA, GEMMA2, GEMMA3
from .glm import GLM4, GLM4_MOE
from .gpt2 import GPT2_FAMILY
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .gptj import GPTJ_FAMILY
from .granite import GRANITE, GRANITE_HYBRID
from .llama import LLAMA
from .mistral import MISTRAL, MIXTRAL
from .olmo import OLMO2, OLMO3
from .opt import OPT_FAMILY
from .phi import PHI
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3
from .qwen_hybrid import QWEN3_5, QWEN3_NEXT
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .stablelm import STABLELM
from .starcoder2 import STARCODER2

_EVERY = (
    *(LLAMA, GPT2_FAMILY, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, GLM4_MOE),
    *(GEMMA, GEMMA2, GRANITE, OLMO2, PHI3, STARCODER2, STABLELM, COHERE, COHERE2, QWEN2_MOE),
    *(GPT_NEOX, GPTJ_FAMILY, PHI, FALCON, OPT_FAMILY, BLOOM),
    GEMMA3,
    OLMO3,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    QWEN3_NEXT,
    SMOLLM3,
    QWEN3_5,
    GRANITE_HYBRID,
    GLM4,
    SEED_OSS,
    EXAONE4,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _EVERY}


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
