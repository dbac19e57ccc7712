"""Floor 3: the zoo. One file a family: config, names, attention, block, model."""

from .adapted import AdaptedFamily, adapted
from .config import ModelConfig
from .family import CausalLM, Family
from .generate import generate
from .gpt2 import GPT2, GPT2Config
from .links import Link, Rename, Rule, Split, Stack, Transpose
from .llama import LLAMA, Llama, LlamaConfig
from .lora import LoraConfig
from .relay import through_stages
from .sampling import Sampling
from .sites import PEFT_PREFIX, Site
from .zoo import FAMILIES, family_of

__all__ = [
    "FAMILIES",
    "GPT2",
    "LLAMA",
    "PEFT_PREFIX",
    "AdaptedFamily",
    "CausalLM",
    "Family",
    "GPT2Config",
    "Link",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "ModelConfig",
    "Rename",
    "Rule",
    "Sampling",
    "Site",
    "Split",
    "Stack",
    "Transpose",
    "adapted",
    "family_of",
    "generate",
    "through_stages",
]
