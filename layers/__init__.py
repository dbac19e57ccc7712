"""Floor 2: parallel layers. With ``state=None`` each is its ``torch.nn`` counterpart on one device.

Offers linear layers, embeddings, norms, attention, experts, dropout and losses. Given a ``ParallelState``,
each holds only one rank's part. Also offers activation checkpointing, LoRA and compilation for blocks.
"""
# mypy: implicit-reexport

from .activation_checkpointing import (
    Checkpointing,
    checkpoint_blocks,
    checkpointed,
    keep_aside,
    recomputes_operators,
)
from .attention.attention import (
    Attention,
    AttentionLayer,
    attention_calls,
    attention_kinds,
    set_attention_backend,
)
from .attention.backends import AttentionCall, PinnedBackend
from .attention.causal import causal_attention, merge_heads, split_heads
from .attention.inputs import AttentionInputs
from .attention.kernel_checks import checked_backend
from .attention.key_value_cache import KeyValueCache
from .attention.latent import MultiHeadLatentAttention
from .attention.mask import AttentionScope
from .attention.scores import Alibi, alibi_slopes
from .chunked_loss import automatic_chunk, chunked_cross_entropy
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
from .compile import compile_blocks
from .context_chunks import cut_sequence, default_positions, sum_over_context, token_places
from .dropout import Dropout, own_random
from .embedding import (
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
    padded_vocabulary,
)
from .experts.dispatch import Dispatch
from .experts.experts import ClampedExperts, Experts, attach_expert_lora, stacks_of_experts
from .experts.grouped_matmul import grouped_mm
from .experts.load_balancing import (
    Balance,
    Balancing,
    routers,
    set_auxiliary_losses,
    set_auxiliary_scale,
    uncounted,
)
from .experts.moe import GatedShared, MoE
from .experts.router import TopKRouter
from .float8 import Scaling, use_float8
from .lora import attach_lora, linears, lora_scale
from .loss import IGNORE, bounded, valid_tokens, vocab_parallel_cross_entropy
from .mlp import ACTIVATIONS, MLP, GatedMLP, activation
from .norm import HeadsLayerNorm, HeadsRMSNorm, LayerNorm, RMSNorm
from .parallel_linear import ColumnParallelLinear, ParallelLinear, ReplicatedLinear, RowParallelLinear
from .recurrent.gated_delta_net import GatedDeltaNet
from .recurrent.mamba2 import Mamba2
from .rope import Rope, RotaryEmbedding, inverse_frequencies, yarn_scale
from .stage import Stage, all_stages, find_blocks, numbered_blocks, split_blocks, stage_parts, unshared_blocks
