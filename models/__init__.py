"""Floor 3: the zoo; a file has a family, or one and its successors: config, Hugging Face names, block.

Offers ``family_of``, which returns the ``Family`` of a config.json; a family builds a ``CausalLM`` for any
layout. ``adapted`` adds LoRA to a family. ``published_size`` finds a published model by name. A ``Rule`` is
a line of a table of names.
"""

from .base.causal_lm import CausalLM
from .base.config import ModelConfig
from .base.family import Family
from .base.hugging_face_names import Link, Rule, links_of, shapes_of
from .from_transformers import TransformersFamily
from .gpt2 import GPT2, GPT2Config
from .llama import LLAMA, Llama, LlamaConfig
from .lora.config import LoraConfig
from .lora.family import AdaptedFamily, adapted
from .lora.targets import PEFT_PREFIX, Site
from .sizes import Size, published_size, published_sizes, tiny_config
from .zoo import FAMILIES, Implementation, family_of, implementation_of, implemented_by
