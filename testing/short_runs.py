"""Whole training runs in miniature, for tests: a recipe over random tokens, run on the ranks of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..checkpoints import read_source
from ..data.token_writer import TokenWriter
from ..models import CausalLM, family_of
from ..parallel_state import Box, Layout, ParallelState, initialize
from ..recipes.recipe import parse_recipe
from ..runs.metrics import StepMetrics, read_metrics
from ..training.data_parallel import shard_over_data
from ..training.precision import Precision
from ..training.trainer import Trainer
from .ranks.pool import run_parallel

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "attention_bias": True,
}

TINY_MIXTRAL: dict[str, Any] = {
    **{key: value for key, value in TINY_LLAMA.items() if not key.endswith(("_bias", "_embeddings"))},
    "model_type": "mixtral",
    "max_position_embeddings": 64,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}

TINY_GLM: dict[str, Any] = {
    **{key: value for key, value in TINY_LLAMA.items() if not key.endswith("_embeddings")},
    "model_type": "glm4_moe",
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 2,
    "use_qk_norm": True,
}

TINY_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}

#: Two blocks, and an output layer that is the embedding.
TINIEST_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def write_tokens(name: Path, *, count: int = 4000, vocab_size: int = 131, seed: int = 0) -> Path:
    """A token file of random ids."""
    with TokenWriter(name, vocab_size=vocab_size) as writer:
        writer.add(np.random.default_rng(seed).integers(0, vocab_size, count))
        writer.commit()
    return name


def tiny_recipe(out: Path, tokens: Path, **changes: Any) -> dict[str, Any]:
    """A recipe as data: 6 steps in fp64 of a tiny Llama; ``changes`` replace keys of a section or the top."""
    recipe: dict[str, Any] = {
        "out": str(out),
        "steps": 6,
        "seed": 3,
        "dtype": "float64",
        "model": {"config": TINY_LLAMA},
        "layout": {},
        "data": {"tokens": str(tokens), "sequence_length": 16, "global_batch": 8, "micro_batch": 2},
        "optimizer": {"lr": 1e-2, "warmup": 2, "clip": 0.5},
        "checkpoint": {"keep": 10},
    }
    for key, value in changes.items():
        recipe[key] = recipe[key] | value if isinstance(value, dict) and key in recipe else value
    return recipe


def run_recipe(raw: dict[str, Any]) -> list[StepMetrics]:
    """Run it on the ranks that call this together, in their process group; the metrics of the steps."""
    recipe = parse_recipe(raw)
    return Trainer(recipe, ParallelState.start(recipe.layout), quiet=True).run()


def train(raw: dict[str, Any]) -> list[StepMetrics]:
    """Run it on ranks of the pool, as many as its layout has; rank 0's metrics of the steps."""
    metrics: list[StepMetrics] = run_parallel(run_recipe, parse_recipe(raw).layout.world, raw)[0]
    return metrics


def losses(out: Path) -> list[tuple[float, float]]:
    """The loss and the gradient norm of every step that the run's folder has noted."""
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(out / "metrics.jsonl")]


def whole_tensors(out: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, whole: weights and both moments."""
    source = read_source(out)
    tie = source.tie()
    return {name: source.read(name, Box.whole(whole.shape), tie) for name, whole in source.catalog.items()}


def built(layout: Layout, precision: Precision, config: dict[str, Any] = TINIEST_LLAMA) -> CausalLM:
    """This rank's part of a model with its initial weights, sharded over the data axes."""
    state = ParallelState.start(layout)
    family = family_of(config)
    model = family.build(family.from_hf(config), state=state, dtype=precision.master)
    shard_over_data(model, state, precision)
    model.to_empty(device="cpu")
    initialize(model, 3, state=state)
    return model
