"""What all parity tests share: the models, and each model's run on one device, made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from trilith.parallel_state import Layout
from trilith.testing import run_parallel
from trilith.testing.training import Case, Outcome, first_difference, outcome, train_rank
from trilith.training.sections import MemorySection

#: The heads' width is not the hidden size; all biases, an odd vocabulary, a rope that is not the default.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 503,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
PLAIN = {key: value for key, value in LLAMA.items() if not key.endswith("_bias")}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-kv1": {**LLAMA, "num_key_value_heads": 1},
    "llama-tied-kv1": {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1},
    # The window is shorter than the sequence; Qwen has its biases by itself and no other.
    "mistral": {**PLAIN, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**PLAIN, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**PLAIN, "model_type": "qwen3"},
    "qwen3-kv1": {**PLAIN, "model_type": "qwen3", "num_key_value_heads": 1},
    "mixtral": {
        **PLAIN,
        "model_type": "mixtral",
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "qwen3_moe": {
        **PLAIN,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 503,
        "n_embd": 48,
        "n_layer": 5,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 88,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
}


@pytest.fixture(scope="session")
def models() -> dict[str, dict[str, Any]]:
    return MODELS


def run(case: Case) -> Outcome:
    return outcome(run_parallel(train_rank, case.layout.world, case, timeout=120))


@pytest.fixture(scope="session")
def one_device() -> Callable[[Case], Outcome]:
    """The same training on one device: one for every layout, split, schedule and micro-batch."""
    known: dict[str, Outcome] = {}

    def get(case: Case) -> Outcome:
        plain = replace(
            case,
            layout=Layout(),
            split=None,
            schedule="1f1b",
            micro_batch=1,
            memory=MemorySection(),
            compiled="",
        )
        if repr(plain) not in known:
            known[repr(plain)] = run(plain)
        return known[repr(plain)]

    return get


@pytest.fixture(scope="session")
def assert_same(one_device: Callable[[Case], Outcome]) -> Callable[..., None]:
    """``assert_same("gpt2", Layout.of(tensor=2))``: losses, gradients, norms, weights are one device's."""

    def check(model: str, layout: Layout, **changes: Any) -> None:
        case = Case(MODELS[model], layout, **changes)
        whole = one_device(case)
        # The clipping bites, or it would not be tested.
        assert min(whole.norms) > 2 * case.clip
        assert first_difference(whole, run(case), tolerance=1e-10) is None

    return check
