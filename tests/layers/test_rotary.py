"""Rotary positions against those that transformers computes."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from trilith.layers import RotaryEmbedding, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.3},
    "llama3": LLAMA3,
    "llama3.1-405b": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3.2-1b": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
}


def theirs(head_dim, theta, scaling):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": head_dim}
    rope = {"max_position_embeddings": 131_072, "rope_parameters": {"rope_theta": theta, **scaling}}
    return LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * head_dim, **heads, **rope))


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_transformers_bit_for_bit(scaling, head_dim, theta):
    assert torch.equal(
        inverse_frequencies(head_dim, theta, scaling), theirs(head_dim, theta, scaling).inv_freq
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_rotation_is_transformers(scaling, dtype):
    q = torch.randn(2, 3, 40, 16).to(dtype)
    positions = torch.stack((torch.arange(40), torch.arange(100, 140)))
    cos, sin = theirs(16, 1e4, scaling)(q, positions)
    wanted, _ = apply_rotary_pos_emb(q, q, cos, sin)
    rope = RotaryEmbedding(16, 1e4, scaling)(positions, dtype)
    assert rope(q).dtype == dtype and torch.equal(rope(q), wanted)
    # One sequence's positions serve the whole batch.
    assert torch.equal(RotaryEmbedding(16, 1e4, scaling)(positions[0], dtype)(q)[0], wanted[0])


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    ratio = inverse_frequencies(64, 1e4) / inverse_frequencies(64, 1e4, LLAMA3)
    assert float(ratio[0]) == 1.0 and float(ratio[-1]) == pytest.approx(8.0)
    assert bool((ratio.diff() >= -1e-5).all()) and bool(((ratio > 1.01) & (ratio < 7.99)).any())


def test_fp64_stays_fp64():
    rope = RotaryEmbedding(16, 1e4)(torch.arange(100_000), torch.float64)
    angle = 99_999 * inverse_frequencies(16, 1e4).double()
    assert torch.equal(rope.cos[-1, :8], angle.cos()) and torch.equal(rope.sin[-1, 8:], angle.sin())


def test_a_rotary_embedding_has_no_state_and_survives_the_meta_device():
    with torch.device("meta"):
        rotary = RotaryEmbedding(16, 1e4, LLAMA3)
    assert not rotary.state_dict()
    assert torch.equal(
        rotary(torch.arange(8), torch.float32).cos,
        RotaryEmbedding(16, 1e4, LLAMA3)(torch.arange(8), torch.float32).cos,
    )
    assert "16, theta=10000.0" in repr(rotary)
