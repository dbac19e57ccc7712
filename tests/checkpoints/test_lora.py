"""LoRA adapters between here and PEFT: the same modules, logits, gradients; files bit for bit; refusals."""

import json

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trilith.checkpoints import load_model, read_adapter, read_source
from trilith.layers import gather_logits, vocab_parallel_cross_entropy
from trilith.models import PEFT_PREFIX, LoraConfig, adapted, family_of
from trilith.parallel_state import BadInput

LLAMA = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attention_bias=True,
)  # fmt: skip
GPT2 = GPT2Config(
    vocab_size=131, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
    attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
)  # fmt: skip

TARGETS = {
    "llama": (LLAMA, {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "llama-all": (LLAMA, {"target_modules": "all-linear", "r": 3, "use_rslora": True}),
    "llama-patterns": (
        LLAMA,
        {
            "target_modules": r".*\.(1|2)\..*(o_proj|down_proj|k_proj)",
            "r": 4,
            "rank_pattern": {r"2\.self_attn\.o_proj": 2, "down_proj": 6},
            "alpha_pattern": {"o_proj": 32},
        },
    ),
    "llama-layers": (
        LLAMA,
        {
            "target_modules": ["gate_proj", "layers.0.self_attn.q_proj", "up_proj"],
            "exclude_modules": ["layers.2.mlp.up_proj"],
            "layers_to_transform": [0, 2],
        },
    ),
    "gpt2": (GPT2, {"target_modules": ["c_attn"], "r": 4, "lora_alpha": 8}),
    "gpt2-all": (GPT2, {"target_modules": "all-linear", "r": 3}),
}


def base_model(config):
    torch.manual_seed(0)
    model = (LlamaForCausalLM if isinstance(config, LlamaConfig) else GPT2LMHeadModel)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return model


def peft_model(config, lora):
    """Make a PEFT model with random B: a B of zero would hide A's effect."""
    theirs = peft.get_peft_model(base_model(config), peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return theirs


@pytest.fixture(params=TARGETS)
def name(request):
    return str(request.param)


@pytest.fixture
def theirs(name, tmp_path):
    config, lora = TARGETS[name]
    base_model(config).save_pretrained(tmp_path / "base")
    model = peft_model(config, lora)
    model.save_pretrained(tmp_path / "adapter")
    return model


def test_pefts_adapter_gives_the_same_logits_and_gradients_here(theirs, tmp_path):
    ours = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    torch.manual_seed(1)
    ids, labels = torch.randint(131, (2, 20)), torch.randint(131, (2, 20))
    expected = theirs(ids).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    logits = ours(ids)
    loss = vocab_parallel_cross_entropy(logits, labels, 131).mean()
    loss.backward()
    torch.testing.assert_close(gather_logits(logits, 131), expected, rtol=1e-5, atol=1e-5)
    gradients = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    parameters = dict(ours.named_parameters())
    source = read_adapter(tmp_path / "adapter", read_source(tmp_path / "base"))
    links, _ = source.family.links(source.model_config)
    assert {link.hf for link in links} == gradients.keys()
    assert {link.ours for link in links} == {n for n, p in parameters.items() if p.requires_grad}
    for link in links:
        found, wanted = parameters[link.ours].grad, gradients[link.hf][link.hf_box.slices]
        assert found is not None
        assert float((found - wanted).abs().max()) <= 1e-5 * float(gradients[link.hf].abs().max()), link.hf
    assert not [n for n, p in parameters.items() if not p.requires_grad and p.grad is not None]


def test_a_config_as_written_means_the_modules_that_peft_takes(name, theirs):
    raw = theirs.config.to_dict() | {"architectures": None}
    family = family_of(raw)
    sites = adapted(family, LoraConfig.model_validate(TARGETS[name][1])).sites(family.from_hf(raw))
    named = {key.rpartition(".lora_A")[0] for key, _ in theirs.named_parameters() if ".lora_A" in key}
    assert {PEFT_PREFIX + site.name for site in sites} == named


def logits_of(model, ids):
    with torch.no_grad():
        return gather_logits(model(ids), 131)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "blocks", [{"layers_to_transform": 1}, {"layers_to_transform": [0, 2], "layers_pattern": ["h", "layers"]}]
)
def test_all_linear_of_some_blocks_is_exported_so_that_peft_takes_the_same(tmp_path, config, blocks):
    """PEFT refuses a choice of blocks together with all-linear, so the export lists the names."""
    theirs = base_model(config)
    theirs.save_pretrained(tmp_path / "base")
    base = read_source(tmp_path / "base")
    family = adapted(base.family, LoraConfig.model_validate({"r": 3, **blocks}))
    family.check(base.model_config, "lora")
    wanted = blocks["layers_to_transform"]
    numbers = {name.split(".")[2] for name in (site.name for site in family.sites(base.model_config))}
    assert numbers == {str(one) for one in (wanted if isinstance(wanted, list) else [wanted])}

    shapes = family.links(base.model_config)[1]
    weights = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    (tmp_path / "adapter").mkdir()
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    said = family.to_peft(base.model_config, str(tmp_path / "base"))
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    ids = torch.randint(131, (2, 20))
    plain = theirs.eval()(ids).logits.detach()
    with_adapter = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert {
        name.replace(".default", "") for name, _ in with_adapter.named_parameters() if "lora_" in name
    } == {*weights}
    expected = logits_of(load_model(tmp_path / "base", adapter=tmp_path / "adapter"), ids)
    torch.testing.assert_close(with_adapter(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert float((plain - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("target", ["all-linear", r".*q_proj"])
@pytest.mark.parametrize("key", ["layers_to_transform", "layers_pattern"])
def test_what_peft_refuses_beside_a_string_of_targets_is_refused_here(target, key):
    raw = {
        "peft_type": "LORA",
        "target_modules": target,
        key: [1] if key == "layers_to_transform" else "layers",
    }
    with pytest.raises(ValueError, match=f"`{key}` cannot be used when `target_modules` is a str"):
        peft.LoraConfig(**{name: value for name, value in raw.items() if name != "peft_type"})
    with pytest.raises(BadInput, match=f"{key}: expected absent: peft refuses it"):
        LoraConfig.from_peft(raw)
