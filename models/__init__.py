"""Floor 3: the zoo. One file a family: config, names, attention, block, model."""

from .config import ModelConfig
from .family import CausalLM, Family
from .generate import generate
from .gpt2 import GPT2, GPT2Config
from .links import Link
from .llama import LLAMA, Llama, LlamaConfig
from .zoo import FAMILIES, family_of

__all__ = [
    "FAMILIES",
    "GPT2",
    "LLAMA",
    "CausalLM",
    "Family",
    "GPT2Config",
    "Link",
    "Llama",
    "LlamaConfig",
    "ModelConfig",
    "family_of",
    "generate",
]
