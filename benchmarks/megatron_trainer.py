"""Train the benchmark's Llama with megatron-core on a CPU, cut over the tensor ranks.

It is no dependency of the project: ``pip install --no-deps megatron-core==0.16.1``. It asks for CUDA by name
also where it computes on the CPU. Its layers without Transformer Engine are used, whose attention writes the
scores out; weights, loss, clipping and AdamW are those of the other contenders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_checkpoints import megatron_tensors
from safetensors.torch import load_file
from torch import Tensor, nn
from trainers import CONFIG, LENGTH, MICRO, adamw


def megatron(folder: str, dtype: torch.dtype) -> Callable[[Tensor], float]:
    """Return a step of megatron-core's ``GPTModel``, with the weights of the Hugging Face folder."""
    from megatron.core import parallel_state

    _name_the_cpu()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model = _model(dtype, ranks)
    tensors = {
        name: one for file in Path(folder).glob("*.safetensors") for name, one in load_file(file).items()
    }
    parts = megatron_tensors(CONFIG, tensors, ranks)
    model.load_state_dict({name: each[rank] for name, each in parts.items()}, strict=False)
    assert parts.keys() == dict(model.named_parameters()).keys()
    optimizer = adamw(model)
    positions = torch.arange(LENGTH).expand(MICRO, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def step(rows: Tensor) -> float:
        total, parts = 0.0, rows.split(MICRO)
        for part in parts:
            losses = model(part[:, :-1], positions, hidden, labels=part[:, 1:].contiguous())
            (losses.mean() / len(parts)).backward()
            total += float(losses.detach().mean()) / len(parts)
        _clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _name_the_cpu() -> None:
    """Answer megatron-core's questions for a CUDA device with the CPU."""
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def _model(dtype: torch.dtype, ranks: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=CONFIG["num_hidden_layers"],
        hidden_size=CONFIG["hidden_size"],
        ffn_hidden_size=CONFIG["intermediate_size"],
        num_attention_heads=CONFIG["num_attention_heads"],
        num_query_groups=CONFIG["num_key_value_heads"],
        tensor_model_parallel_size=ranks,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=CONFIG["vocab_size"],
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def _clip(model: nn.Module) -> None:
    """Clip the gradient norm to 1: parts of cut weights are summed over the ranks, others are whole.

    megatron-core marks the cut weights while it initialises them, so its initialisation must not be skipped.
    """
    trained = [one for one in model.parameters() if one.grad is not None]
    cut, whole = (
        [one.grad for one in trained if getattr(one, "tensor_model_parallel", False) is kind]
        for kind in (True, False)
    )
    square = nn.utils.get_total_norm(cut) ** 2
    dist.all_reduce(square)
    norm = (square + nn.utils.get_total_norm(whole) ** 2).sqrt()
    nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
