"""Floor 3: the zoo; a file has a family, or one and its successors: config, Hugging Face names, block.

Offers ``family_of``, which returns the ``Family`` of a config.json; a family builds a ``CausalLM`` for any
layout. ``adapted`` adds LoRA to a family. ``published_size`` finds a published model by name. A ``Rule`` is
a line of a table of names.
"""

from .base.causal_lm import CausalLM as CausalLM
from .base.config import ModelConfig as ModelConfig
from .base.family import Family as Family
from .base.hugging_face_names import Link as Link
from .base.hugging_face_names import Rule as Rule
from .base.hugging_face_names import links_of as links_of
from .base.hugging_face_names import shapes_of as shapes_of
from .from_transformers import TransformersFamily as TransformersFamily
from .gpt2 import GPT2 as GPT2
from .gpt2 import GPT2Config as GPT2Config
from .llama import LLAMA as LLAMA
from .llama import Llama as Llama
from .llama import LlamaConfig as LlamaConfig
from .lora.config import LoraConfig as LoraConfig
from .lora.family import AdaptedFamily as AdaptedFamily
from .lora.family import adapted as adapted
from .lora.targets import PEFT_PREFIX as PEFT_PREFIX
from .zoo import FAMILIES as FAMILIES
from .zoo import Implementation as Implementation
from .zoo import Size as Size
from .zoo import family_of as family_of
from .zoo import implementation_of as implementation_of
from .zoo import implemented_by as implemented_by
from .zoo import published_size as published_size
from .zoo import published_sizes as published_sizes
from .zoo import tiny_config as tiny_config
