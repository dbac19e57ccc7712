"""Parameter groups: which parameters a pattern takes, what then differs."""

import re

import pytest
import torch
from support.configs import MODELS, TINY_GLM, TINY_GPT2, TINY_LLAMA
from support.refusals import Refused, refusals
from trilith.models import family_of
from trilith.recipes.section import ParameterGroup
from trilith.training import make_adamw
from trilith.training.optimizer import assign, freeze, groups_of, names_of, set_learning_rate

FAMILY = family_of(TINY_LLAMA)
NAMES = names_of(FAMILY, FAMILY.from_hf(TINY_LLAMA))
ROUTED = names_of(family_of(TINY_GLM), family_of(TINY_GLM).from_hf(TINY_GLM))


def test_a_pattern_finds_their_names_and_ours_and_the_first_group_counts():
    groups = [
        ParameterGroup(match=r"self_attn\.q_proj\.weight$", lr_scale=2),
        ParameterGroup(match=r"^layers\.1\.", lr_scale=3),
        ParameterGroup(match="embed_tokens", freeze=True),
    ]
    found = assign(groups, NAMES)
    assert found["layers.1.attention.qkv.q.weight"].lr_scale == 2
    assert found["layers.0.attention.qkv.q.weight"].lr_scale == 2
    assert found["layers.1.attention.qkv.q.bias"].lr_scale == 3
    assert found["embed.weight"].freeze
    assert "layers.0.mlp.down.weight" not in found and "norm.weight" not in found
    assert sum(name.startswith("layers.1.") for name in found) == 13


def test_without_groups_no_name_is_made():
    """Those of a large mixture take a second."""
    assert groups_of([], None, None) == {}


def test_a_fused_tensor_of_theirs_is_all_of_ours_that_lie_in_it():
    family = family_of(TINY_GPT2)
    found = assign(
        [ParameterGroup(match=r"h\.0\.attn\.c_attn\.weight")], names_of(family, family.from_hf(TINY_GPT2))
    )
    assert sorted(found) == [f"layers.0.attention.qkv.{one}.weight" for one in "kqv"]


def test_a_routers_bias_is_in_no_group():
    """Rate and decay do not apply to a buffer, which no gradient moves; it does not count as trained."""
    found = assign([ParameterGroup(match="router|e_score_correction_bias", freeze=True)], ROUTED)
    assert sorted(found) == [f"layers.{i}.mlp.router.weight" for i in (1, 2)]


def taking(why, says, *patterns, names=NAMES):
    """Patterns of groups, of which one takes nothing; what ``.`` takes is frozen."""
    groups = [ParameterGroup(match=pattern, freeze=pattern == ".") for pattern in patterns]
    return Refused(why, lambda _: assign(groups, names), says)


test_a_pattern_that_takes_nothing_is_refused = refusals(
    taking("near-theirs", r"groups\[0\].*Near names: .*self_attn", "self_atn"),
    taking("near-ours", r"groups\[1\].*Near names: layers\.0\.att", "layers.*", r"qkv\.z\.weight"),
    taking("no-pattern", r"expected a regular expression, found 'norm\.\(weight': ", "norm.(weight"),
    taking("taken", r"groups\[1\].*no group before it takes.*narrower", "layers", "q_proj"),
    taking("all-frozen", "expected a parameter that is not frozen", "."),
    taking("a-router-s-bias", r"groups\[0\]\.match", "e_score_correction_bias", names=ROUTED),
    taking("all-frozen-but-a-router-s-bias", "all of them frozen", ".", names=ROUTED),
)


def test_each_parameter_gets_its_rate_and_its_decay_and_the_update_is_adamws():
    groups = assign(
        [
            ParameterGroup(match="down_proj", lr_scale=0.5, weight_decay=0.3),
            ParameterGroup(match="layernorm", weight_decay=0.2),
            ParameterGroup(match="embed", freeze=True),
        ],
        NAMES,
    )
    torch.manual_seed(0)
    model = FAMILY.build(FAMILY.from_hf(TINY_LLAMA), device="cpu", dtype=torch.float64)
    freeze(model, groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_adamw(model, lr=1.0, eps=1e-8, weight_decay=0.1, groups=groups)
    set_learning_rate(optimizer, 1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name == "embed.weight":
            assert parameter not in optimizer.state and torch.equal(parameter, before[name])
            continue
        rate = 0.5e-2 if "mlp.down.weight" in name else 1e-2
        decay = 0.3 if "mlp.down.weight" in name else 0.2 if "_norm" in name else 0.1
        decay = 0.0 if parameter.ndim == 1 and "_norm" not in name else decay
        assert parameter.grad is not None
        first = parameter.grad / (parameter.grad.abs() + 1e-8)  # Adam's first step: the gradient's sign
        torch.testing.assert_close(
            parameter, before[name] * (1 - rate * decay) - rate * first, rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("name", ["gpt_oss", "stablelm", "cohere"])
def test_biases_and_norms_do_not_decay_those_of_a_stack_of_experts_or_heads_included(name):
    family = family_of(MODELS[name])
    model = family.build(family.from_hf(MODELS[name]), device="cpu")
    parts = make_adamw(model, lr=1.0, weight_decay=0.1).param_groups
    still = {parameter for part in parts if not part["weight_decay"] for parameter in part["params"]}
    vector = re.compile(r"bias$|(^|[._])norm\.|sinks")
    for ours, parameter in model.named_parameters():
        assert (parameter in still) == bool(vector.search(ours)), ours
