"""FLOPs of a token, against torch's own counter, and MFU from them."""

import pytest
import torch
from support.configs import MODELS, TINY_GLM, TINY_GPT2, TINY_LLAMA, TINY_MIXTRAL
from support.families import family_and_config
from support.short_runs import run_recipe, tiny_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from trilith.machine.random_files import write_tokens
from trilith.models import FAMILIES, LoraConfig, adapted, family_of
from trilith.runs.metrics import read_metrics
from trilith.simulation import operators
from trilith.simulation.model_flops import flops_per_token, peak_flops, peak_named
from trilith.testing import run_parallel

LENGTH, SAMPLES = 16, 3
CONFIGS = {
    "llama": TINY_LLAMA,
    "llama-untied": TINY_LLAMA | {"tie_word_embeddings": False},
    "gpt2": TINY_GPT2,
    "mixtral": TINY_MIXTRAL,
    "glm4_moe": TINY_GLM,
    # Narrower values are brought to the width of queries with zeros, which torch would count.
    "deepseek_v2": MODELS["deepseek_v2"] | {"v_head_dim": 16},
}
#: Families whose products torch counts otherwise than the formula: bounded scores, sinks and slopes take
#: attention of our own, narrow values are filled with zeros, and recurrent blocks run in chunks.
IN_PARTS = {*("gemma2", "gpt_oss", "bloom", "deepseek_v3", "qwen3_next", "qwen3_5_text", "granitemoehybrid")}
for row, raw in MODELS.items():
    if raw["model_type"] == row and row not in IN_PARTS:
        CONFIGS.setdefault(row, raw)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_that_torch_counts(name, backward):
    """Without a state nothing is padded; the plain backend multiplies out all of attention."""
    raw = CONFIGS[name]
    family, config = family_and_config(raw)
    model = family.build(config, device="cpu").eval()
    ids = torch.randint(131, (SAMPLES, LENGTH))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(ids)
        if backward:
            logits.sum().backward()
    flops = flops_per_token(model, LENGTH)
    expected = flops.full if backward else flops.matrices + flops.attention
    assert counter.get_total_flops() == SAMPLES * LENGTH * expected


def test_every_family_is_counted_by_torch_or_computes_in_parts():
    assert CONFIGS.keys() - {"llama-untied"} == FAMILIES.keys() - IN_PARTS


def test_zeros_behind_narrow_values_do_not_count():
    found = []
    for width in (16, 8):
        family, raw = family_of(MODELS["deepseek_v2"]), MODELS["deepseek_v2"] | {"v_head_dim": width}
        found.append(flops_per_token(family.on_meta(family.from_hf(raw)), LENGTH).attention)
    assert found[0] - found[1] == 2 * LENGTH * 3 * 4 * 8  # of 3 blocks with 4 heads


def test_what_is_frozen_costs_no_gradient_of_its_weights():
    family, config = family_and_config(TINY_LLAMA)
    whole, model = flops_per_token(family.on_meta(config), LENGTH), family.build(config)
    for i in range(3):
        model.get_parameter(f"layers.{i}.mlp.down.weight").requires_grad_(False)
    assert whole.full - flops_per_token(model, LENGTH).full == 2 * 3 * 32 * 48
    lora = adapted(family, LoraConfig(r=2, target_modules=("down_proj",)))
    tuned, adapters = flops_per_token(lora.on_meta(config), LENGTH), 3 * 2 * (32 + 48)
    assert tuned.full == whole.full - whole.trained + 6 * adapters


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_a_device_s_peak_follows_from_its_whole_name(name, peak):
    assert peak_named(name) == peak


def test_a_run_on_a_cpu_has_mfu_only_where_its_peak_is_stated(tmp_path):
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    tokens = write_tokens(tmp_path / "tokens")
    for name, watch in (("silent", {}), ("stated", {"peak_flops": 1e9})):
        raw = tiny_recipe(tmp_path / name, tokens, steps=1, watch=watch)
        (metrics,) = run_parallel(run_recipe, 1, raw)[0]
        (line,) = read_metrics(tmp_path / name / "metrics.jsonl")
        assert line["memory"] > 1e7
        assert ("mfu_full" in line) == (metrics.mfu_full is not None) == bool(watch)
    family = family_of(TINY_LLAMA)
    flops = flops_per_token(family.on_meta(family.from_hf(TINY_LLAMA)), LENGTH)
    assert line["mfu_causal"] == pytest.approx(line["tokens_per_second"] * flops.causal / 1e9)


def test_attention_of_grouped_queries_is_counted_where_torch_counts_equal_heads_alone(monkeypatch):
    """Torch 2.11's formula refuses fewer heads of keys than of queries."""
    q, k = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")

    def strict(query, key, value):
        assert query[1] == key[1] == value[1]
        return 1

    monkeypatch.setattr(operators, "sdpa_flop_count", strict)
    for kernel in ("flash_attention", "cudnn_attention", "efficient_attention"):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
        assert operators.facts_of(operator).flops((q, k, k), {}, None) == 1
