"""Each family against transformers on one device, in fp32: logits and every gradient.

Norms and biases are random and shapes asymmetric: the default initialisation hides most mistakes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion
from trilith.layers import IGNORE, gather_logits, valid_tokens, vocab_parallel_cross_entropy
from trilith.models import CausalLM, Family, ModelConfig, family_of

VOCAB = 503
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 6},
    "grouped-query": {"num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "attention-bias": {"num_key_value_heads": 3, "attention_bias": True},
    "rope-linear": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "rope-llama3": {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "rope-theta": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "gelu": {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"},
}
GPT2S: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "inner": {"n_inner": 72, "activation_function": "relu"},
}


def llama(changes: dict[str, Any]) -> nn.Module:
    changes = dict(changes)
    rope = {"rope_theta": 1e4, "rope_type": "default", **changes.pop("rope_parameters", {})}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=88,
            num_hidden_layers=3,
            num_attention_heads=6,
            head_dim=10,  # not hidden / heads
            max_position_embeddings=128,
            rms_norm_eps=1e-3,
            rope_parameters=rope,
            **changes,
        )
    )


def gpt2(changes: dict[str, Any]) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            layer_norm_epsilon=1e-3,
            bos_token_id=0,
            eos_token_id=0,
            **changes,
        )
    )


def mistral(changes: dict[str, Any]) -> nn.Module:
    config = transformers.MistralConfig(**SHAPE, rope_parameters=ROPE, **changes)
    return transformers.MistralForCausalLM(config)


def qwen2(changes: dict[str, Any]) -> nn.Module:
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, rope_parameters=ROPE, **changes))


def qwen3(changes: dict[str, Any]) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, rope_parameters=ROPE, **changes))


def mixtral(changes: dict[str, Any]) -> nn.Module:
    shape = {**SHAPE, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": ROPE, **changes}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape))


def qwen3_moe(changes: dict[str, Any]) -> nn.Module:
    shape = {**SHAPE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, **changes}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, rope_parameters=ROPE))


def gemma2(changes: dict[str, Any]) -> nn.Module:
    """Caps low enough to bend, and a window shorter than the sequence."""
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 12}
    shape = {**SHAPE, "num_hidden_layers": 4, "sliding_window": 5, **caps, **changes}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, rope_parameters=ROPE))


def glm4_moe(changes: dict[str, Any]) -> nn.Module:
    shape = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "head_dim": 12,
        **changes,
    }
    rope = {**ROPE, **shape.pop("rope_parameters", {})}
    return transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(**{**SHAPE, **shape}, rope_parameters=rope)
    )


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
}
ROPE = {"rope_theta": 1e4, "rope_type": "default"}

CASES = [
    *(pytest.param(llama, changes, id=f"llama-{name}") for name, changes in LLAMAS.items()),
    *(pytest.param(gpt2, changes, id=f"gpt2-{name}") for name, changes in GPT2S.items()),
    pytest.param(mistral, {"sliding_window": None}, id="mistral"),
    pytest.param(mistral, {"sliding_window": 7}, id="mistral-window"),
    pytest.param(mistral, {"sliding_window": 40, "tie_word_embeddings": True}, id="mistral-wide-window"),
    pytest.param(qwen2, {}, id="qwen2"),
    pytest.param(qwen2, {"tie_word_embeddings": True}, id="qwen2-tied"),
    pytest.param(qwen3, {}, id="qwen3"),
    pytest.param(qwen3, {"attention_bias": True, "tie_word_embeddings": True}, id="qwen3-biases"),
    pytest.param(mixtral, {}, id="mixtral"),
    pytest.param(mixtral, {"sliding_window": 7, "num_experts_per_tok": 1}, id="mixtral-window"),
    pytest.param(qwen3_moe, {}, id="qwen3-moe"),
    pytest.param(qwen3_moe, {"norm_topk_prob": True, "decoder_sparse_step": 2}, id="qwen3-moe-some"),
    pytest.param(
        qwen3_moe,
        {"mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True},
        id="qwen3-moe-biases",
    ),
    pytest.param(gemma2, {}, id="gemma2"),
    pytest.param(
        gemma2,
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
        id="gemma2-no-caps",
    ),
    pytest.param(
        gemma2,
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "attention_bias": True},
        id="gemma2-layers",
    ),
    pytest.param(glm4_moe, {"attention_bias": True, "use_qk_norm": True}, id="glm4-moe"),
    pytest.param(
        glm4_moe,
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "rope_parameters": LLAMA3},
        id="glm4-moe-groups",
    ),
    pytest.param(
        glm4_moe,
        {"n_shared_experts": 2, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
        id="glm4-moe-shared",
    ),
]


def roughened(theirs: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in theirs.parameters():
        nn.init.normal_(p, 0.5 if p.ndim == 1 else 0.0, 0.3 if p.ndim == 1 else 0.1)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # as far apart as the scores, all between 0 and 1
            nn.init.normal_(buffer, 0.0, 0.2)
    return theirs


def ours_from(theirs: Any) -> tuple[Family, ModelConfig, CausalLM]:
    """Our model with their weights, through the table of names."""
    raw = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    family = family_of(raw)
    config = family.from_hf(raw)
    model = family.build(config, device="cpu")
    parameters, tensors = dict(model.named_parameters()), on_disk(theirs, theirs.state_dict())
    for link in family.links(config)[0]:
        piece = tensors[link.hf][link.hf_box.slices]
        parameters[link.ours].data[link.ours_box.slices] = piece.T if link.transpose else piece
    return family, config, model


def on_disk(theirs: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that files bear: transformers holds experts in stacks of its own."""
    found = revert_weight_conversion(theirs, tensors)
    return {name: tensor.detach() for name, tensor in found.items()}


def batch() -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(VOCAB, (2, 40)), torch.randint(VOCAB, (2, 40))
    labels[0, :5] = IGNORE
    return ids, labels


@pytest.mark.parametrize(("make", "changes"), CASES)
def test_logits_and_gradients_are_transformers(
    make: Any, changes: dict[str, Any]
) -> None:  # D7 of section 5, D15
    theirs = roughened(make(changes))
    family, config, model = ours_from(theirs)
    ids, labels = batch()
    logits, wanted = model(ids), theirs(ids).logits
    assert float(wanted.detach().abs().max()) > 0.5
    assert float((gather_logits(logits, VOCAB) - wanted).detach().abs().max()) <= 1e-5

    loss = vocab_parallel_cross_entropy(logits, labels, VOCAB, label_smoothing=0.1).sum() / valid_tokens(
        labels
    )
    other = F.cross_entropy(wanted.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert loss.item() == pytest.approx(other.item(), abs=2e-6)
    loss.backward()
    other.backward()
    grads = on_disk(theirs, {name: p.grad for name, p in theirs.named_parameters()})
    largest = max(float(grad.abs().max()) for grad in grads.values())
    parameters = dict(model.named_parameters())
    for link in family.links(config)[0]:
        if not parameters[link.ours].requires_grad:
            assert link.hf not in grads and parameters[link.ours].grad is None
            continue
        wanted_grad = grads[link.hf][link.hf_box.slices]
        found = parameters[link.ours].grad[link.ours_box.slices]
        # A key bias shifts all scores alike (without rotation), so its gradient is zero but for rounding.
        scale = max(float(wanted_grad.abs().max()), 0.01 * largest)
        found = (found.T if link.transpose else found).view(wanted_grad.shape)
        assert float((found - wanted_grad).abs().max()) <= 1e-5 * scale, link


@pytest.mark.parametrize(("make", "changes"), CASES)
def test_the_table_of_names_covers_every_element_of_both_sides_once(
    make: Any, changes: dict[str, Any]
) -> None:
    with torch.device("meta"):
        theirs = make(changes)
    raw = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    family = family_of(raw)
    config = family.from_hf(raw)
    links, shapes = family.links(config)
    with torch.device("meta"):
        named = on_disk(theirs, theirs.state_dict(keep_vars=True))
        if theirs.config.tie_word_embeddings:
            del named["lm_head.weight"]
    assert shapes == {name: tuple(p.shape) for name, p in named.items()}
    ours = {name: stated.shape for name, stated in family.declarations(config)[0].items()}
    for side, wanted in (("ours", ours), ("hf", shapes)):
        counts = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in wanted.items()}
        for link in links:
            counts[getattr(link, side)][getattr(link, f"{side}_box").slices] += 1
        assert all(bool((count == 1).all()) for count in counts.values())
    for link in links:
        assert link.to_hf(link.ours_box) == link.hf_box and link.to_ours(link.hf_box) == link.ours_box


@pytest.mark.parametrize(("make", "changes"), CASES)
def test_what_to_hf_writes_transformers_reads_as_the_same_model(make: Any, changes: dict[str, Any]) -> None:
    theirs = make(changes)
    family, config, _ = ours_from(theirs)
    written = family.to_hf(config)
    assert family_of(written) is family and family.from_hf(written) == config
    again = type(theirs)(type(theirs.config).from_dict(written))
    again.load_state_dict(theirs.state_dict())
    ids, _ = batch()
    assert torch.equal(again.eval()(ids).logits, theirs.eval()(ids).logits)


def test_new_weights_have_the_spread_that_the_papers_state() -> None:
    family, config, _ = ours_from(gpt2({}))
    model = family.build(config, device="cpu")
    parameters = dict(model.named_parameters())
    inner = parameters["layers.1.mlp.up.weight"].detach()
    joining = parameters["layers.1.mlp.down.weight"].detach()
    assert float(inner.std()) == pytest.approx(0.02, rel=0.05)
    assert float(joining.std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert float(parameters["layers.1.mlp.up.bias"].detach().abs().max()) == 0.0
