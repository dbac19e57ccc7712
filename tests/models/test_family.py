"""Which layouts a family refuses and accepts, what it declares about its parameters, its published sizes."""

import re
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import KEYS, MODELS
from support.draws import drawn
from support.refusals import Refused, refusals
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.models import FAMILIES, LLAMA, family_of, published_size, published_sizes
from trilith.parallel_state import BadInput, Layout, ParallelState, declarations

#: A config of each family.
BASES = {raw["model_type"]: raw for raw in MODELS.values()}

CONFIG = KEYS["llama"]


def build(**layout):
    return LLAMA.build(LLAMA.from_hf(CONFIG), state=ParallelState.stand_in(Layout.of(**layout)))


OWN = "Take the config.json that came with the model"
REFUSED = {
    "E1": (lambda: build(tensor=4), "num_attention_heads=6, found 4. Nearest legal tensor: 1 or 2"),
    "E3": (lambda: build(tensor=3), "intermediate_size=88, found 3. Nearest legal tensor: 1 or 2"),
    "E5": (lambda: build(pipeline=4), "at most 3, one block a stage, found 4. Nearest legal pipeline: 3"),
    **{
        why: (lambda raw=raw: family_of(raw, "here.json"), "^here.json: model_type: expected .*" + says)
        for why, raw, says in (
            ("D3", {}, "found an object without any key.*`trilith models` lists the types"),
            ("no type", {"hidden_size": 8}, f"found no such key.*{OWN}"),
            ("D3-null", {"model_type": None}, f"found no such key.*{OWN}"),
            ("misspelled", {"model_type": "lama"}, "found 'lama'.*Nearest: llama"),
            ("D4-list", {"model_type": ["llama"]}, r"found \['llama'\].*Nearest: llama"),
            ("D4", {"model_type": "vit"}, f"one of the {len(FAMILIES)} types .*transformers', found 'vit'"),
        )
    },
}
test_a_layout_or_a_type_that_cannot_be_is_refused = refusals(
    [Refused(why, lambda _, call=call: call(), says) for why, (call, says) in REFUSED.items()]
)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=drawn(48), deadline=None)
@given(st.data())
def test_a_width_that_tensor_does_not_divide_is_refused_with_the_nearest_that_are_legal_E3(name, data):
    family, raw = FAMILIES[name], BASES[name]
    config = family.from_hf(raw)
    tensor = data.draw(st.integers(1, 12))
    heads, width = data.draw(st.integers(1, 4)) * tensor, data.draw(st.integers(1, 60))
    fields = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * 4}
    fields |= {"intermediate_size": width, "moe_intermediate_size": width, "head_dim": 4}
    fields |= {"shared_expert_intermediate_size": width, "linear_num_key_heads": heads}
    fields |= {"mamba_n_heads": heads, "shared_intermediate_size": width}

    def legal(tensor, width):
        changed = fields | {key: width for key in fields if key.endswith("intermediate_size")}
        known = {key: value for key, value in changed.items() if key in type(config).model_fields}
        try:
            config.model_copy(update=known).check_layout(Layout(tensor=tensor))
        except BadInput as error:
            return error
        return None

    error = legal(tensor, width)
    assert (error is None) == (width % tensor == 0)
    if error is None:
        return
    first, second = error.todo.split(". ")
    assert all(legal(int(n), width) is None for n in re.findall(r"\d+", first.split(":")[1]))
    assert all(legal(tensor, int(n)) is None for n in re.findall(r"\d+", second.split(":")[1]))


def test_layers_over_stages_that_do_not_divide_them_and_shared_key_heads_are_accepted():  # E2, E6
    config = LLAMA.from_hf({**CONFIG, "num_attention_heads": 8, "num_key_value_heads": 2})
    stages = LLAMA.declarations(config, Layout.of(tensor=4, pipeline=2))
    blocks = [{name.split(".")[1] for name in stage if name.startswith("layers.")} for stage in stages]
    assert blocks == [{"0", "1"}, {"2"}]
    assert stages[0]["layers.0.attention.qkv.k.weight"].cut is None


def test_a_family_is_found_by_its_model_type_and_has_a_tiny_model():
    for name, family in FAMILIES.items():
        assert family_of({"model_type": name, "architectures": [family.architecture]}) is family
    assert {raw["model_type"] for raw in MODELS.values()} == FAMILIES.keys()


def test_a_table_of_names_that_lacks_a_parameter_is_refused():
    """Or the parameter would be left out of what is written."""
    (norm,) = [rule for rule in LLAMA.rules if rule.ours == "norm"]
    family = replace(LLAMA, rules=tuple(rule for rule in LLAMA.rules if rule is not norm))
    with pytest.raises(AssertionError, match=r"the name table lacks \['norm.weight'\]"):
        family.links(LLAMA.from_hf(CONFIG))


def test_building_leaves_torchs_defaults_alone():
    config = LLAMA.from_hf(CONFIG)
    model = LLAMA.build(config, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and next(model.parameters()).is_meta
    with pytest.raises(BadInput):
        LLAMA.build(config, split=(1, 1), dtype=torch.float64)
    assert torch.get_default_dtype() == torch.float32 and torch.zeros(1).device.type == "cpu"


SIZES = published_sizes()
FIRST = {size.family.model_type: name for name, size in reversed(SIZES.items())}
ROWS = [
    pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.slow, id=name) for name in SIZES
]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_builds_and_has_the_published_number_of_parameters(name):
    size = SIZES[name]
    model = size.family.on_meta(size.config)
    shapes = [stated.shape for stated in declarations(model).values() if not stated.buffer]
    assert sum(map(prod, shapes)) == size.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_transformers_counts_the_same_from_the_config_that_is_written(name):
    size = SIZES[name]
    raw = size.family.to_hf(size.config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    assert theirs.num_parameters() == size.parameters


def test_every_family_has_a_published_size():
    assert {size.family.model_type for size in SIZES.values()} == FAMILIES.keys()


def test_every_key_of_a_row_is_one_that_its_family_reads(recwarn):
    """A misspelled key is unknown, and an unknown key gives a warning."""
    for size in SIZES.values():
        assert size.config.num_hidden_layers > 0
    assert [str(warning.message) for warning in recwarn] == []


def test_mistral_has_a_window_in_its_first_version_alone():
    windows = [published_size(f"mistral-7b-v0.{n}").config.sliding_window for n in (1, 3)]
    assert windows == [4096, None]


def test_an_unknown_name_is_refused_with_the_nearest_names():
    with pytest.raises(BadInput, match=r"found 'llama-3\.1-9b'. Nearest: llama-3\.1-8b, "):
        published_size("llama-3.1-9b")
    with pytest.raises(BadInput, match=r"found 'zzz'. `trilith models` lists them"):
        published_size("zzz")
    assert published_size("Llama-3.1-8B").parameters == 8_030_261_248
