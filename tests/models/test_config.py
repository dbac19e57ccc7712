"""Check every case of a config.json that is refused, or accepted with a stated meaning.

The ids are those of the reliability contract's family D. D1 and D2 (no file, no JSON) and D17 to D19 (tensors
that contradict the config) are the checkpoint readers'; D3 and D4 are in test_family; D29 is the run's plan.
"""

import re
import sys
import warnings
from copy import deepcopy
from typing import ClassVar

import pytest
import torch
from support.configs import KEYS, MODELS, PUBLISHED, config
from support.families import TOKENS
from support.nightly import some
from support.refusals import Refused, refusals
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.layers import RMSNorm, routers
from trilith.models import FAMILIES, LlamaConfig, family_of
from trilith.models.base import keys
from trilith.models.base.keys import DENIED, Fixed
from trilith.parallel_state import BadInput

LLAMA, GPT2, MISTRAL, QWEN2, QWEN3 = (KEYS[name] for name in ("llama", "gpt2", "mistral", "qwen2", "qwen3"))
MIXTRAL, QWEN3_MOE, GEMMA2, GLM4_MOE = (KEYS[name] for name in ("mixtral", "qwen3_moe", "gemma2", "glm4_moe"))
GEMMA3 = {key: value for key, value in PUBLISHED["gemma-3-1b"].items() if key != "sliding_window"}
LINEAR, NOPE = ({"rope_type": kind, "factor": 2.0} for kind in ("linear", "nope"))
WINDOW = "sliding_attention"
NAN, INF = float("nan"), float("inf")
#: Stands for a key that is left out.
ABSENT = object()


def read(base, changes):
    raw = {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}
    where = "folder/config.json"
    return family_of(raw, where).from_hf(raw, where)


def of(base, why, key, changes):
    """Refuse this config in a line shorter than others, because whole configs stand in it."""
    says = rf"^(?=.{{1,399}}$)folder/config\.json: {re.escape(key)}: "
    return Refused(why, lambda _: read(base, changes), says)


def llama(why, key, changes):
    return of(LLAMA, why, key, changes)


def gpt2(why, key, changes):
    return of(GPT2, why, key, changes)


def scaled(why, key, **scaling):
    return llama(why, f"rope_scaling.{key}", {"rope_scaling": scaling})


def roped(base, why, key, **rope):
    return of(base, why, f"rope_parameters.{key}", {"rope_parameters": rope})


THREE, ORIGINAL = MODELS["llama"]["rope_scaling"], "original_max_position_embeddings"
MANY = {"num_hidden_layers": 10**12}
#: Listed cases of keys that no family here computes with; all others are one.
CASES = {"sliding_window": "D23", "quantization_config": "D24"}
REFUSED = [
    of(MISTRAL, "mistral-window", "sliding_window", {"sliding_window": 0}),
    of(MISTRAL, "mistral-layer-types", "layer_types", {"layer_types": ["sliding_attention"]}),
    of(QWEN2, "qwen2-window", "use_sliding_window", {"use_sliding_window": True}),
    of(QWEN2, "qwen2-layer-types", "layer_types", {"layer_types": ["sliding_attention"] * 3}),
    of(QWEN2, "qwen2-bias", "attention_bias", {"attention_bias": False}),
    of(LLAMA, "llama-layer-types", "layer_types", {"layer_types": ["full_attention"] * 2}),
    of(QWEN3_MOE, "qwen3-moe-two-names", "num_local_experts", {"num_local_experts": 4}),
    of(QWEN3_MOE, "qwen3-moe-absent", "mlp_only_layers", {"mlp_only_layers": [0, 99]}),
    of(QWEN3_MOE, "qwen3-moe-step", "mlp_only_layers", {"decoder_sparse_step": 4}),
    of(QWEN3_MOE, "qwen3-moe-layers", "mlp_only_layers.0", {"mlp_only_layers": ["0"]}),
    of(QWEN3_MOE, "qwen3-moe-coef", "router_aux_loss_coef", {"router_aux_loss_coef": -1.0}),
    of(GLM4_MOE, "glm-top-k", "num_experts_per_tok", {"num_experts_per_tok": 9}),
    of(GLM4_MOE, "glm-groups", "n_group", {"n_group": 3}),
    of(GLM4_MOE, "glm-groups-of-one", "n_group", {"n_group": 8, "topk_group": 4}),
    of(GLM4_MOE, "glm-groups-kept", "topk_group", {"n_group": 4, "topk_group": 5}),
    of(GLM4_MOE, "glm-too-few", "topk_group", {"n_group": 4, "topk_group": 1}),
    of(GLM4_MOE, "glm-dense", "first_k_dense_replace", {"first_k_dense_replace": 3}),
    of(GLM4_MOE, "glm-rotary-odd", "partial_rotary_factor", {"partial_rotary_factor": 0.25}),
    of(GLM4_MOE, "glm-rotary-more", "partial_rotary_factor", {"partial_rotary_factor": 1.5}),
    roped(GLM4_MOE, "glm-rotary-two", "partial_rotary_factor", rope_theta=1e4, partial_rotary_factor=1.0),
    of(GEMMA3, "gemma3-windows", "sliding_window_attention_size", {"sliding_window": 8}),
    of(GEMMA3, "gemma3-pattern", "global_local_attention_pattern", {"sliding_window_pattern": 3}),
    of(GEMMA3, "gemma3-one-rope", "rope_parameters", {"rope_parameters": LINEAR}),
    roped(GEMMA3, "gemma3-window-rope", f"{WINDOW}.rope_type", **{WINDOW: NOPE}),
    roped(GEMMA3, "gemma3-two-thetas", f"{WINDOW}.rope_theta", **{WINDOW: {"rope_theta": 2e4}}),
    of(config("gpt_oss"), "gpt-oss-two-names", "experts_per_token", {"experts_per_token": 3}),
    of(config("gpt_oss"), "gpt-oss-context", "initial_context_length", {"initial_context_length": 7}),
    of(config("exaone4"), "exaone4-letters", "layer_types", {"sliding_window_pattern": "LLLG"}),
    *(
        of(config("qwen3_next"), f"qwen3-next-{len(kinds)}", "layer_types", {"layer_types": kinds})
        for kinds in (["full_attention"], ["full_attention", "sliding_attention"])
    ),
    *(
        of(config("qwen3_next"), f"interval-{n!r}", "full_attention_interval", {"full_attention_interval": n})
        for n in (0, "4", 2.0, True)
    ),
    of(MIXTRAL, "experts-in-all", "experts", {"num_local_experts": 4096, "num_hidden_layers": 512}),
    of(
        config("phi"),
        "two-shares",
        "partial_rotary_factor",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    llama("D5", "architectures", {"architectures": ["GPT2LMHeadModel"]}),
    llama("D5-number", "architectures", {"architectures": 5}),
    llama("D7", "num_key_value_heads", {"num_key_value_heads": 4}),
    llama("D8", "hidden_size", {"num_attention_heads": 5, "num_key_value_heads": 5}),
    gpt2("D8-gpt2", "n_embd", {"n_head": 5}),
    llama("D9", "num_attention_heads", {"num_attention_heads": 0}),
    llama("D9-kv", "num_key_value_heads", {"num_key_value_heads": 0}),
    llama("D9-layers", "num_hidden_layers", {"num_hidden_layers": 0}),
    llama("D10", "hidden_size", {"hidden_size": "48"}),
    llama("D10-float", "hidden_size", {"hidden_size": 48.0}),
    llama("D10-absent", "vocab_size", {"vocab_size": ABSENT}),
    *(llama(f"D11-{eps}", "rms_norm_eps", {"rms_norm_eps": eps}) for eps in (0, 1e3, NAN, INF, "1e-5")),
    gpt2("D11-gpt2", "layer_norm_epsilon", {"layer_norm_epsilon": 1e3}),
    llama("D12", "hidden_act", {"hidden_act": "swish2"}),
    llama("D12-number", "hidden_act", {"hidden_act": 3}),
    *(llama(f"D13-{t}", "rope_theta", {"rope_theta": t}) for t in (-1, 0, INF, NAN, "1e4", True)),
    scaled("D14", "rope_type", **NOPE),
    llama("D14-list", "rope_scaling", {"rope_scaling": [1]}),
    scaled("D14-two-types", "type", **LINEAR, type="yarn"),
    *(scaled(f"D15-{kind}", "factor", type=kind, factor="2") for kind in ("dynamic", "yarn", "linear")),
    scaled("D15-longrope", "short_factor", type="longrope"),
    scaled("D15-longrope-few", "short_factor", type="longrope", short_factor=[1.0], long_factor=[1.0] * 4),
    scaled("D15-yarn-text", "beta_fast", type="yarn", factor=2.0, beta_fast="32"),
    scaled("D15-proportional", "partial_rotary_factor", rope_type="proportional", partial_rotary_factor=2.0),
    scaled("D15-no-factor", "factor", rope_type="linear"),
    scaled("D15-llama3", "low_freq_factor", type="llama3", factor=8.0),
    scaled("D15-band", "low_freq_factor", **{**THREE, "low_freq_factor": 4.0}),
    scaled("D15-original", ORIGINAL, **{**THREE, ORIGINAL: 32.5}),
    roped(LLAMA, "D15-partial", "partial_rotary_factor", rope_type="default", partial_rotary_factor=0.5),
    llama("D16", "rope_parameters", {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}}),
    llama("D16-theta", "rope_parameters", {"rope_parameters": {"rope_theta": 2e4}}),
    llama("D20", "vocab_size", {"vocab_size": 10**12}),
    llama("D20-hidden", "hidden_size", {"hidden_size": 10**12, "head_dim": 8}),
    llama("D20-layers", "num_hidden_layers", {"num_hidden_layers": 10**9}),
    # No list of so many blocks is made before they are refused.
    of(GEMMA2, "D20-pattern", "num_hidden_layers", MANY | {"sliding_window_pattern": 2}),
    of(config("exaone4"), "D20-no-window", "num_hidden_layers", MANY | {"sliding_window": None}),
    llama("D21", "head_dim", {"head_dim": 7}),
    llama("D22-text", "attention_bias", {"attention_bias": "yes"}),
    *(llama(f"{CASES.get(key, 'D26')}-{key}", key, {key: 8}) for key in sorted(DENIED)),
    gpt2("D26-two-names", "hidden_size", {"hidden_size": 32}),
    *(llama(f"D27-{x}", "initializer_range", {"initializer_range": x}) for x in (NAN, INF, -1, "0.02")),
    *(llama(f"dtype-{value}", "torch_dtype", {"torch_dtype": value}) for value in ("float4", "int8", 16)),
    of(config("granitemoehybrid"), "chunk", "mamba_chunk_size", {"mamba_chunk_size": 0}),
    # transformers takes null for false here, and true for the default.
    of(config("granitemoehybrid"), "null-bool", "mamba_conv_bias", {"mamba_conv_bias": None}),
    gpt2("dropout", "attn_pdrop", {"attn_pdrop": 1.0}),
]


test_a_config_is_refused_in_one_line_that_names_the_key = refusals(REFUSED)


ACCEPTED = [
    ("D6", LLAMA, {"num_key_value_heads": ABSENT}, {"num_key_value_heads": 6}),
    ("D6-null", LLAMA, {"num_key_value_heads": None}, {"num_key_value_heads": 6}),
    ("plain", LLAMA, {}, {"head_dim": 8, "rope_scaling": None}),
    ("mistral-no-window", MISTRAL, {"sliding_window": None}, {"window": None}),
    ("llama-layers", LLAMA, {"layer_types": ["full_attention"] * 3}, {"window": None}),
    ("mistral-layers", MISTRAL, {"layer_types": ["sliding_attention"] * 3}, {"window": 4096}),
    ("qwen2-layers", QWEN2, {"layer_types": ["full_attention"] * 3}, {"window": None}),
    ("gemma2-no-window", GEMMA2, {"sliding_window": None}, {"sliding_window": None}),
    ("gemma2-layers", GEMMA2, {"layer_types": ["full_attention"] * 3}, {"window": None}),
    (
        "gemma3-new",
        GEMMA3,
        {
            **dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"), ABSENT),
            "rope_parameters": {"full_attention": {"rope_theta": 2e4}, "sliding_attention": None},
        },
        {"rope_theta": 2e4, "rope_local_base_freq": 1e4, "rope_scaling": None},
    ),
    ("gemma2-no-cap", GEMMA2, {"attn_logit_softcapping": None}, {"attn_logit_softcapping": None}),
    ("qwen3", QWEN3, {"sliding_window": None}, {"head_norms": True, "head_dim": 128}),
    ("qwen3-moe", QWEN3_MOE, {}, {"routed_experts": 8, "normalized": True, "routers": 3}),
    ("qwen3-moe-new", QWEN3_MOE, {"num_experts": ABSENT, "num_local_experts": 4}, {"routed_experts": 4}),
    ("qwen3-moe-some", QWEN3_MOE, {"decoder_sparse_step": 2, "mlp_only_layers": [0]}, {"routers": 1}),
    (
        "glm",
        GLM4_MOE,
        {"output_router_logits": True},
        {"routed_experts": 8, "routers": 2, "rotary_dim": 6, "balance_factor": 0.0, "biased_routers": True},
    ),
    (
        "glm-new",
        GLM4_MOE,
        {
            **{
                key: ABSENT
                for key in ("n_routed_experts", "num_nextn_predict_layers", "partial_rotary_factor")
            },
            "num_local_experts": 4,
            "num_mtp_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1},
        },
        {"routed_experts": 4, "further_blocks": 0, "rotary_dim": 12},
    ),
    ("glm-rotary", GLM4_MOE, {"partial_rotary_factor": ABSENT}, {"rotary_dim": 6, "head_norms": False}),
    ("D13-whole", LLAMA, {"rope_theta": 500_000}, {"rope_theta": 5e5}),
    ("D13-absent", LLAMA, {"rope_theta": ABSENT}, {"rope_theta": 1e4}),
    ("D16-new", LLAMA, {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 2e4}}, {"rope_theta": 2e4}),
    ("D16-agree", LLAMA, {"rope_scaling": LINEAR, "rope_parameters": LINEAR}, {"rope_theta": 1e4}),
    ("D23-off", LLAMA, {"sliding_window": None, "use_sliding_window": False}, {}),
    ("D28-gpt2", GPT2, {}, {"tie_word_embeddings": True, "intermediate_size": 192}),
    ("gemma-gelu", config("gemma"), {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}),
    ("gpt2-inner-null", GPT2, {"n_inner": None}, {"intermediate_size": 192}),
    ("gpt2-both-names", GPT2, {"hidden_size": 48}, {"hidden_size": 48}),
]


@pytest.mark.parametrize("name", MODELS)
def test_no_key_of_ours_is_written_beside_the_family_s_own(name):
    """But for the experts of Qwen3-MoE: transformers 4 reads the one key, transformers 5 the other."""
    family = family_of(MODELS[name])
    config = family.from_hf(MODELS[name])
    written = family.to_hf(config).keys()
    twice = {ours for theirs, ours in config.OWN_NAMES.items() if {theirs, ours} <= written}
    assert not written & config.NOT_KEYS
    assert twice == ({"num_local_experts"} if name == "qwen3_moe" else set())


@pytest.mark.parametrize(
    ("base", "changes", "meaning"), [pytest.param(*rest, id=name) for name, *rest in ACCEPTED]
)
def test_a_config_is_accepted_and_means_this(base, changes, meaning):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read(base, changes)
    assert {key: means(config, key) for key in meaning} == meaning


def means(config, key):
    """A field of the config, or a property of the last block of the model that is built from it."""
    if key not in BUILT and key != "routers":
        return getattr(config, key)
    family = next(family for family in FAMILIES.values() if family.config is type(config))
    model = family.on_meta(config)
    if key == "routers":
        return sum(1 for _ in routers(model))
    return BUILT[key](list(model.layers.values())[-1])


BUILT = {
    "window": lambda block: block.attention.window,
    "qkv_bias": lambda block: block.attention.qkv.q.bias is not None,
    "out_bias": lambda block: block.attention.out.bias is not None,
    "head_norms": lambda block: isinstance(block.attention.q_norm, RMSNorm),
    "normalized": lambda block: block.mlp.router.normalize,
    "routed_experts": lambda block: block.mlp.router.num_experts,
    "experts_of_token": lambda block: block.mlp.router.top_k,
    "biased_routers": lambda block: block.mlp.router.bias is not None,
}


#: A config of each family.
BY_TYPE = {raw["model_type"]: raw for raw in reversed(MODELS.values())} | KEYS


@pytest.mark.parametrize("kind", [kind for kind in sorted(FAMILIES) if FAMILIES[kind].config.HARMLESS])
def test_a_key_that_says_what_the_family_does_anyway_changes_nothing(kind):
    base = BY_TYPE[kind]
    for key, legal in FAMILIES[kind].config.HARMLESS.items():
        plain = read(base, {key: ABSENT})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(read(base, {key: value}) == plain for value in (*legal, None)), key
        for value in (True, False, 1, 3, 0.5, "x", [], {"a": 1}):
            if not any(type(value) is type(other) and value == other for other in legal):
                expected = rf"config\.json: {key}: .*this family has no other, .*--implementation transf"
                with pytest.raises(BadInput, match=expected):
                    read(base, {key: value})
        assert key not in FAMILIES[kind].to_hf(plain)


NOT_KEYS = [
    (kind, key) for kind, family in sorted(FAMILIES.items()) for key in sorted(family.config.NOT_KEYS)
]


@pytest.mark.parametrize(("kind", "key"), NOT_KEYS)
def test_our_name_of_a_field_is_no_key_and_may_only_repeat_what_the_family_s_own_key_says(kind, key):
    """transformers reads the own key alone: a config that says something else under ours is two models."""
    base = BY_TYPE[kind]
    plain = read(base, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (None, getattr(plain, key)):
            assert read(base, {key: value}) == plain
    with pytest.raises(BadInput, match=rf"config\.json: {key}: expected absent or .*, as ") as error:
        read(base, {key: {"rope_type": "linear", "factor": 2.0} if "scaling" in key else 7})
    assert error.value.todo == (
        f"transformers does not read this key: state it as {FAMILIES[kind].config.spelled(key)}"
    )
    assert FAMILIES[kind].config.spelled(key) != key


@pytest.mark.parametrize("kind", some(sorted(FAMILIES), 12))
def test_switches_change_the_parameters_exactly_as_in_transformers(kind):
    """Every boolean field of the config and of the table changes the same biases and norms."""

    def asked(names):
        return {name for name in names if name.endswith("bias") or "_norm." in name}

    config = FAMILIES[kind].config
    table = {key: legal for key, legal in config.HARMLESS.items() if legal and isinstance(legal[0], bool)}
    unread = {key for key, legal in config.HARMLESS.items() if not legal}
    fields = {name for name, one in config.model_fields.items() if one.annotation is bool}
    for key in (fields | table.keys()) - unread - {"mtp"}:  # blocks that transformers leaves out
        for value in table.get(key, (False, True)):
            raw = {**BY_TYPE[kind], key: value}
            try:
                links, _ = FAMILIES[kind].links(read(raw, {}))
            except BadInput:
                assert (kind, key, value) == ("falcon", "parallel_attn", False)  # not in the new architecture
                continue
            with torch.device("meta"):
                theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(TOKENS | deepcopy(raw))))
            assert asked(link.hf for link in links) == asked(theirs.state_dict()), (key, value)


def test_a_qwen2_config_that_was_written_with_every_field_is_still_read():
    plain = read(QWEN2, {})
    assert read(QWEN2 | plain.model_dump() | {"attention_bias": False, "mlp_bias": False}, {}) == plain


@pytest.mark.parametrize(
    "scaling", [LINEAR, MODELS["llama"]["rope_scaling"]], ids=["D15-linear", "D15-llama3"]
)
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_a_scaling_is_read_from_either_form_and_written_back(form, scaling):
    config = read(LLAMA, {form: scaling})
    assert config.to_hf()["rope_scaling"] == scaling
    assert FAMILIES["llama"].from_hf(FAMILIES["llama"].to_hf(config)) == config


def test_an_unknown_key_is_ignored_with_a_warning_of_few_characters_D26():
    for key, shown in (("some_text", "some_text='x' is"), ("k" * 5000, "is")):
        with pytest.warns(UserWarning, match=f"{shown} unknown and ignored") as told:
            read(LLAMA, {key: "x" if shown != "is" else "v" * 5000})
        assert len(str(told[0].message)) < 250


def test_no_code_of_a_checkpoint_runs_D25():
    watched = []
    active = True

    def hook(event, _):
        if active and event in ("import", "exec", "open", "os.system", "subprocess.Popen"):
            watched.append(event)

    read(LLAMA, {})  # whatever is loaded lazily is loaded
    sys.addaudithook(hook)
    with pytest.warns(UserWarning, match="auto_map is ignored"):
        read(LLAMA, {"auto_map": {"AutoModel": "modeling_evil.Model"}})
    active = False
    assert watched == []


OF_LLAMA = KEYS["llama"] | {"rope_theta": 2e4}


class Parent(LlamaConfig):
    """Fix two keys, and give two fields keys of the family's own."""

    FIXED: ClassVar[Fixed] = {"first": (True,), "second": (1,)}

    hidden_act: str = keys.key("activation", default="silu")
    rope_theta: float = keys.key("base", "rope_theta", default=1e4)
    span: int | None = 7
    kinds: tuple[str, ...] = ()


class Child(Parent):
    """Make one of the fixed keys a field, fix a field, and state one field anew."""

    FIXED: ClassVar[Fixed] = {"rope_theta": (2e4,)}

    second: int = 2
    hidden_act: str = "gelu"


def test_keys_are_inherited_one_by_one_and_a_field_takes_its_key_off_the_fixed_ones():
    assert Child.HARMLESS == LlamaConfig.HARMLESS | {"first": (True,), "rope_theta": (2e4,)}
    assert {"hidden_act"} == Child.NOT_KEYS
    child = Child.from_hf({**OF_LLAMA, "second": 3, "activation": "relu"})
    assert (child.second, child.hidden_act) == (3, "relu")
    with pytest.raises(BadInput, match=r"first: expected true: this family has no other, found false"):
        Child.from_hf({**OF_LLAMA, "first": False})


def test_all_keys_of_a_field_are_read_and_the_first_is_written():
    assert Parent.from_hf(OF_LLAMA).rope_theta == Parent.from_hf(OF_LLAMA | {"base": 2e4}).rope_theta == 2e4
    with pytest.raises(BadInput, match=r"base: expected 20000\.0, as rope_theta has under its other name"):
        Parent.from_hf(OF_LLAMA | {"base": 3e4})
    with pytest.raises(BadInput, match=r"activation: expected one of .*, found 'x'"):
        Parent.from_hf(OF_LLAMA | {"activation": "x"})
    written = Parent.from_hf(OF_LLAMA).to_hf()
    assert (written["base"], written["activation"]) == (2e4, "silu")
    assert not {"rope_theta", "hidden_act"} & written.keys()


def test_null_is_a_value_where_the_type_has_none_and_else_as_if_absent():
    child = Parent.from_hf(OF_LLAMA | {"span": None, "kinds": None, "activation": None})
    assert (child.span, child.kinds, child.hidden_act) == (None, (), "silu")
    assert Parent.from_hf(OF_LLAMA | {"kinds": ["a"]}).kinds == ("a",)
