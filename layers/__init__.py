"""Floor 2: parallel layers. With ``state=None`` each is its ``torch.nn`` counterpart on one device."""

from .attention import SharedHeads, causal_attention, merge_heads, split_heads
from .balancing import Balance, Balancing, routers, set_auxiliary_losses, set_auxiliary_scale
from .checkpointing import Checkpointing, checkpoint_blocks, checkpointed, keep_aside
from .chunked_loss import chunked_cross_entropy
from .collectives import (
    copy_to_tensor,
    enter_tensor,
    gather_from_tensor,
    gather_sequence,
    leave_tensor,
    reduce_from_tensor,
    scatter_sequence,
    split_to_tensor,
)
from .compiling import compile_blocks
from .dispatch import Dispatch
from .dropout import Dropout, own_random
from .embedding import (
    VOCABULARY_MULTIPLE,
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    default_positions,
    gather_logits,
    padded_vocabulary,
)
from .experts import Experts
from .grouped import grouped_mm
from .linear import ColumnParallelLinear, RowParallelLinear, linears
from .lora import attach_lora, lora_scale
from .loss import IGNORE, valid_tokens, vocab_parallel_cross_entropy
from .mlp import ACTIVATIONS, MLP, GatedMLP, activation
from .moe import GatedShared, MoE
from .norm import LayerNorm, RMSNorm
from .rotary import Rope, RotaryEmbedding, inverse_frequencies
from .router import TopKRouter
from .scope import AttentionScope, KeyValueCache, documents
from .stage import Stage, all_stages, split_blocks
from .zigzag import cut_sequence, token_places

__all__ = [
    "set_auxiliary_scale",
    "set_auxiliary_losses",
    "routers",
    "grouped_mm",
    "TopKRouter",
    "MoE",
    "GatedShared",
    "Experts",
    "Dispatch",
    "Balancing",
    "Balance",
    "ACTIVATIONS",
    "IGNORE",
    "MLP",
    "AttentionScope",
    "Checkpointing",
    "ColumnParallelLinear",
    "Dropout",
    "GatedMLP",
    "KeyValueCache",
    "LayerNorm",
    "PositionEmbedding",
    "RMSNorm",
    "Rope",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SharedHeads",
    "Stage",
    "all_stages",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "activation",
    "attach_lora",
    "causal_attention",
    "checkpoint_blocks",
    "checkpointed",
    "chunked_cross_entropy",
    "compile_blocks",
    "copy_to_tensor",
    "cut_sequence",
    "default_positions",
    "documents",
    "enter_tensor",
    "gather_from_tensor",
    "gather_logits",
    "gather_sequence",
    "inverse_frequencies",
    "keep_aside",
    "leave_tensor",
    "linears",
    "lora_scale",
    "merge_heads",
    "own_random",
    "VOCABULARY_MULTIPLE",
    "padded_vocabulary",
    "reduce_from_tensor",
    "scatter_sequence",
    "split_blocks",
    "split_heads",
    "split_to_tensor",
    "token_places",
    "valid_tokens",
    "vocab_parallel_cross_entropy",
]
