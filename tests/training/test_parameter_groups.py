"""Parameter groups: which parameters a pattern takes, what then differs, the same in every layout."""

import pytest
import torch
from support.configs import MODELS, TINY_GLM, TINY_GPT2, TINY_LLAMA
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from trilith.checkpoints import convert
from trilith.machine.random_files import write_tokens
from trilith.models import family_of
from trilith.parallel_state import BadInput
from trilith.recipes.optimizer_sections import ParameterGroup
from trilith.testing import RankError
from trilith.training import make_adamw
from trilith.training.adamw import set_learning_rate
from trilith.training.parameter_groups import assign, freeze, names_of

FAMILY = family_of(TINY_LLAMA)
NAMES = names_of(FAMILY, FAMILY.from_hf(TINY_LLAMA))


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


def test_a_fused_tensor_of_theirs_is_all_of_ours_that_lie_in_it():
    family = family_of(TINY_GPT2)
    found = assign(
        [ParameterGroup(match=r"h\.0\.attn\.c_attn\.weight")], names_of(family, family.from_hf(TINY_GPT2))
    )
    assert sorted(found) == [f"layers.0.attention.qkv.{one}.weight" for one in "kqv"]


def test_a_routers_bias_is_in_no_group():
    """Rate and decay do not apply to a buffer, which no gradient moves; it does not count as trained."""
    family = family_of(TINY_GLM)
    names = names_of(family, family.from_hf(TINY_GLM))
    found = assign([ParameterGroup(match="router|e_score_correction_bias", freeze=True)], names)
    assert sorted(found) == [f"layers.{i}.mlp.router.weight" for i in (1, 2)]
    with pytest.raises(BadInput, match=r"groups\[0\]\.match"):
        assign([ParameterGroup(match="e_score_correction_bias")], names)
    with pytest.raises(BadInput, match="all of them frozen"):
        assign([ParameterGroup(match=".", freeze=True)], names)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        pytest.param(["self_atn"], r"groups\[0\].*Near names: .*self_attn", id="near"),
        pytest.param(["layers.*", r"qkv\.z\.weight"], r"groups\[1\].*Near names: layers\.0\.att", id="near"),
        pytest.param(["norm.(weight"], r"expected a regular expression, found 'norm\.\(weight': ", id="none"),
        pytest.param(["layers", "q_proj"], r"groups\[1\].*no group before it takes.*narrower", id="taken"),
        pytest.param(["."], r"expected a parameter that is not frozen", id="all-frozen"),
    ],
)
def test_a_pattern_that_takes_nothing_is_refused(patterns, says):
    with pytest.raises(BadInput, match=says) as error:
        assign([ParameterGroup(match=one, freeze=one == ".") for one in patterns], NAMES)
    assert "\n" not in str(error.value)


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


def test_biases_do_not_decay_those_of_a_stack_of_experts_included():
    family = family_of(MODELS["gpt_oss"])
    model = family.build(family.from_hf(MODELS["gpt_oss"]), device="cpu")
    parts = make_adamw(model, lr=1.0, weight_decay=0.1).param_groups
    still = {parameter for part in parts if not part["weight_decay"] for parameter in part["params"]}
    found = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter in still}
    assert found == {"weight", "bias", "logit_bias", "gate_up_bias", "down_bias"}
    flat = [one for name, one in model.named_parameters() if one in still and "_bias" not in name]
    assert all(one.ndim == 1 for one in flat)


GROUPS = {
    "optimizer": {
        "groups": [
            {"match": "down_proj", "lr_scale": 0.1, "weight_decay": 0.5},
            {"match": r"layers\.0\.|embed", "freeze": True},
            {"match": "norm", "weight_decay": 0.2},
        ]
    }
}


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor": 2}, id="tp2"),
        pytest.param({"pipeline": 2, "split": [1, 2]}, id="pp2-first-stage-frozen-but-for-one"),
        pytest.param({"data": 2, "zero": 3}, id="zero3"),
    ],
)
def test_groups_train_alike_in_every_layout(tmp_path, tokens, layout):
    """Resumed on the way; against one process, to 1e-10; frozen parameters bit for bit."""
    train(tiny_recipe(tmp_path / "whole", tokens, steps=4, **GROUPS))
    train(tiny_recipe(tmp_path / "parts", tokens, steps=4, layout=layout, stop_after=2, **GROUPS))
    train(tiny_recipe(tmp_path / "parts", tokens, steps=4, layout=layout, **GROUPS))
    train(tiny_recipe(tmp_path / "usual", tokens, steps=4))
    assert losses(tmp_path / "whole") == [
        pytest.approx(pair, rel=1e-10) for pair in losses(tmp_path / "parts")
    ]
    assert losses(tmp_path / "usual")[-1] != pytest.approx(losses(tmp_path / "whole")[-1], rel=1e-4)
    whole, parts, usual = (whole_tensors(tmp_path / name) for name in ("whole", "parts", "usual"))
    assert whole.keys() == parts.keys() < usual.keys()
    frozen = {name.removeprefix("optimizer.exp_avg.") for name in usual.keys() - whole.keys()}
    assert "embed.weight" in frozen and "layers.0.mlp_norm.weight" in frozen
    assert "layers.0.mlp.down.weight" not in frozen and "layers.1.mlp_norm.weight" not in frozen
    for name, tensor in whole.items():
        exact = 0.0 if name in frozen else 1e-10 * float(tensor.abs().max())
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=exact, msg=name)


def test_groups_resume_bitwise_and_convert(tmp_path, tokens):
    layout = {"tensor": 2}
    train(tiny_recipe(tmp_path / "whole", tokens, layout=layout, **GROUPS))
    train(tiny_recipe(tmp_path / "parts", tokens, layout=layout, stop_after=3, **GROUPS))
    train(tiny_recipe(tmp_path / "parts", tokens, layout=layout, **GROUPS))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = whole_tensors(tmp_path / "whole"), whole_tensors(tmp_path / "parts")
    assert not [name for name in whole if not torch.equal(whole[name], parts[name])]
    convert(tmp_path / "whole" / "checkpoints" / "step-00000006", tmp_path / "other", pipeline=3)
    other = whole_tensors(tmp_path / "other")
    assert other.keys() == whole.keys()
    assert not [name for name in whole if not torch.equal(whole[name], other[name])]


def test_a_run_goes_on_only_with_what_it_trained(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2, **GROUPS))
    with pytest.raises(RankError, match=r"optimizer\.exp_avg\.embed\.weight.*it was frozen"):
        train(tiny_recipe(tmp_path / "run", tokens))


def test_a_stage_of_which_nothing_is_trained(tmp_path, tokens):
    only_last = {
        "optimizer": {"groups": [{"match": r"layers\.2\.", "lr_scale": 1.0}, {"match": ".", "freeze": True}]}
    }
    for name, layout in (("whole", {}), ("parts", {"pipeline": 2, "split": [1, 2]})):
        raw = tiny_recipe(tmp_path / name, tokens, steps=2, layout=layout, **only_last)
        raw["model"] = {"config": TINY_LLAMA | {"tie_word_embeddings": False}}
        train(raw)
    assert losses(tmp_path / "whole") == [
        pytest.approx(pair, rel=1e-10) for pair in losses(tmp_path / "parts")
    ]
