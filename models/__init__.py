"""Floor 3: the zoo, one file per family: config, Hugging Face names, block.

Offers ``family_of``, from a config.json to its ``Family``, which builds a ``CausalLM`` for any layout;
``adapted``, the same with LoRA; ``published_size``, a known model by its name; and the rules of which a table
of names is made.
"""

from .base.config import ModelConfig
from .base.family import CausalLM, Family
from .base.names import Link, Rename, Rule, Split, Stack, Transpose
from .gpt2 import GPT2, GPT2Config
from .llama import LLAMA, Llama, LlamaConfig
from .lora.config import LoraConfig
from .lora.family import AdaptedFamily, adapted
from .lora.targets import PEFT_PREFIX, Site
from .sizes import Size, published_size, published_sizes
from .zoo import FAMILIES, family_of

__all__ = [
    "AdaptedFamily",
    "CausalLM",
    "FAMILIES",
    "Family",
    "GPT2",
    "GPT2Config",
    "LLAMA",
    "Link",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "ModelConfig",
    "PEFT_PREFIX",
    "Rename",
    "Rule",
    "Site",
    "Size",
    "Split",
    "Stack",
    "Transpose",
    "adapted",
    "family_of",
    "published_size",
    "published_sizes",
]
