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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10_000.0), (64, 500_000.0), (128, 500_000.0)])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_rotation_is_transformers_bit_for_bit(scaling, head_dim, theta, dtype):
    q = torch.randn(2, 3, 40, head_dim).to(dtype)
    positions = torch.stack((torch.arange(40), torch.arange(100, 140)))
    expected = theirs(head_dim, theta, scaling)
    wanted, _ = apply_rotary_pos_emb(q, q, *expected(q, positions))
    ours = RotaryEmbedding(head_dim, theta, scaling)
    assert torch.equal(inverse_frequencies(head_dim, theta, scaling), expected.inv_freq)
    rope = ours(positions, dtype)
    assert rope(q).dtype == dtype and torch.equal(rope(q), wanted)
    # One sequence's positions serve the whole batch.
    assert torch.equal(ours(positions[0], dtype)(q)[0], wanted[0])


def test_fp64_stays_fp64():
    rope = RotaryEmbedding(16, 1e4)(torch.arange(100_000), torch.float64)
    angle = 99_999 * inverse_frequencies(16, 1e4).double()
    assert torch.equal(rope.cos[-1, :8], angle.cos()) and torch.equal(rope.sin[-1, 8:], angle.sin())
