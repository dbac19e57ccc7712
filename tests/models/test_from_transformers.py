"""Models that transformers computes: as transformers itself does, in each layout that is offered."""

import json
import random
from importlib.metadata import version
from inspect import signature
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from support import any_table
from support.any_model import LAYOUTS, InFp64, draw, family, observed, plain, prove, stepped, tiny
from support.command_lines import call_command
from support.configs import config
from support.nightly import some
from support.refusals import Refused, refusals
from support.round_trips import assert_same, weights
from support.short_runs import losses, tiny_recipe, train, write_tokens
from support.token_files import write_token_file
from support.versions import of_proved_transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.checkpoints import convert, differences, fingerprint, load, read_source
from trilith.cli.app import run
from trilith.layers import gather_logits
from trilith.models import FAMILIES, AdaptedFamily, family_of
from trilith.models.from_transformers import TransformersFamily, adopted_types
from trilith.models.from_transformers.attention import attention
from trilith.models.from_transformers.config import AdoptedConfig, config_class, offered, proved
from trilith.models.from_transformers.cut import STYLES
from trilith.models.from_transformers.layers import cut_embedding
from trilith.models.from_transformers.probe import Probed, _law, on_meta, probed
from trilith.parallel_state import (
    OWN,
    BadInput,
    Layout,
    Normal,
    ParallelState,
    Uniform,
    declarations,
    initialize,
)
from trilith.parallel_state.engine import local_data
from trilith.planner.dry_run import dry_run
from trilith.planner.search.generation_layouts import generation_layouts
from trilith.planner.search.request import request_of
from trilith.planner.time import machine_named
from trilith.ranks import run_parallel
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import LoraSection
from trilith.training.lora import plan_adapters
from trilith.training.run_plan import check_run

pytestmark = of_proved_transformers
TABLE = proved()["types"]
SAME_VERSION = version("transformers").split(".")[:2] == proved()["transformers"].split(".")[:2]
of_this_version = pytest.mark.skipif(not SAME_VERSION, reason="the table is of another transformers")
OFFERED = sorted(kind for kind, row in TABLE.items() if "refused" not in row and kind not in FAMILIES)
#: Types whose forward has what could be computed twice, left out or cut wrongly.
CHOSEN = ["hyperclovax", "apertus", "granite_swa", "ernie4_5_moe"]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16, "short_mscale": 1.1, "long_mscale": 1.2,
}  # fmt: skip
BY_KIND = {"full_attention": DYNAMIC, "sliding_attention": LONG}
#: Families of the zoo that transformers computes as well.
ZOO = random.Random(5).sample(sorted(offered().keys() & FAMILIES), 3)
TENSOR, PIPELINE, CONTEXT = (Layout(**{axis: 2}) for axis in ("tensor", "pipeline", "context"))


def short(raw):
    """Return the config of two blocks, if its blocks are all alike, or alike but for the first."""
    by_block = any(isinstance(value, list) and len(value) == 4 for value in raw.values())
    return raw if by_block else raw | {"num_hidden_layers": 2}


def is_proved(kind, layouts, **changes):
    is_short, raw = all(layout.stages <= 2 for layout in layouts.values()), tiny(kind, **changes)
    row = prove(kind, short(raw) if is_short else raw, layouts)
    assert layouts.keys() <= row.proved.keys() and not row.refused, row.refused
    assert row.proved["gradients"] < 1e-9 and row.proved["transformers"] < 1e-9
    assert ("zoo" in row.proved) == (kind in FAMILIES) and row.proved.get("zoo", 0.0) < 1e-6


def layouts_of(kind):
    return {axis: LAYOUTS[axis] for axis in ("data", *offered()[kind])}


@of_this_version
@pytest.mark.parametrize("kind", some(OFFERED, 0, always=CHOSEN))
def test_a_type_is_transformers_own_in_every_layout_of_the_table(kind):
    is_proved(kind, layouts_of(kind))


@of_this_version
@pytest.mark.parametrize("kind", random.Random(11).sample(sorted({*OFFERED} - {*CHOSEN}), 4))
def test_a_type_is_transformers_own_in_two_layouts_by_a_seed(kind):
    is_proved(kind, dict(random.Random(kind).sample([*layouts_of(kind).items()], 2)))


@of_this_version
@pytest.mark.parametrize(
    "case",
    [
        ("electra", PIPELINE),  # whose embedding is narrower than its blocks
        ("bart", PIPELINE),  # whose table of positions is given no tokens on later stages
        ("bamba", PIPELINE),  # whose blocks give tuples
        ("llava_next", PIPELINE),  # with a parameter around its blocks that no text reads
        ("llama4_text", TENSOR),  # whose stacks of experts are transposed
        ("mimo_v2_flash", TENSOR),  # whose attention has a parameter for each head
        ("minicpm3", CONTEXT, {"v_head_dim": 32}),  # rotations from bare memory, values wider than keys
        ("phimoe", PIPELINE, {"rope_parameters": LONG}),  # whose rotation asks for the last place
        ("hunyuan_v1_dense", CONTEXT, {"rope_parameters": DYNAMIC | {"alpha": 9.0}}),  # for which it does not
        # With norms of heads that the plan forgets.
        ("qwen3_vl_moe", LAYOUTS["sequence"]),
        ("phi", TENSOR, {"qk_layernorm": True}),
        ("glm4_moe", TENSOR, {"use_qk_norm": True}),
        # Which adds positions, views what the last block made, and looks for padding.
        ("gpt2", LAYOUTS["sequence"], {"pad_token_id": 0}),
        ("opt", LAYOUTS["sequence"]),  # whose blocks flatten tokens
        # Code behind the blocks of a stage views them by the tokens' shape.
        ("gpt_bigcode", Layout.of(tensor=2, pipeline=2, sequence=True)),
        # A rank's second stage does not look up positions, whose table it has not gathered.
        ("gpt2", Layout.of(pipeline=2, virtual_stages=2, data=2, zero=3)),
        # Blocks give views, which a backward in two parts detaches in place.
        ("opt", Layout.of(pipeline=2, virtual_stages=2, v_shape=True)),
        # What every layout would have alike: no factor of the embedding, an output layer whose bias two
        # modules name; and what the zoo computes too.
        *((kind, None) for kind in ("gemma", "roformer", *ZOO)),
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_of_a_type_equals_one_process_and_transformers(case):
    kind, layout, *changes = case
    is_proved(kind, {} if layout is None else {"this": layout}, **dict(*changes))


def whole(kind, **changes):
    """Return the model of a type on the meta device."""
    made = family(kind)
    return made.on_meta(made.from_hf(tiny(kind, **changes)))


def built(kind, **changes):
    """Return the family, the config and the model of a type, with weights drawn by their names."""
    made = family(kind)
    config = made.from_hf(tiny(kind, **changes))
    model = made.build(config).to_empty(device="cpu").eval()
    draw(model, model.state)
    return made, config, model


def saved(folder, kind, **changes):
    """Save transformers' model of a type in fp32; return it, and what ``built`` returns."""
    made, config, model = built(kind, **changes)
    theirs = plain(config, made, model).float()
    theirs.save_pretrained(folder)
    return theirs, made, config, model


@torch.no_grad()
def logits_in(layout, raw):
    """Return the logits of a row of tokens by parameters as ``generate`` has them, without a step's FSDP."""
    state = ParallelState.start(layout)
    made = family(raw["model_type"])
    model = made.build(made.from_hf(raw), state=state, dtype=torch.float64).to_empty(device="cpu")
    draw(model, state)
    with InFp64():
        return gather_logits(model.eval()(torch.arange(32)[None]), model.config.vocab_size, state=state)


def test_tensor_ranks_run_code_that_reads_the_embedding_itself_without_a_step():
    (alone,), ranks = (run_parallel(logits_in, n, Layout(tensor=n), tiny("gemma4")) for n in (1, 2))
    for logits in ranks:
        torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)


def drop_and_train(layout, raw):
    """Train with dropout; return the losses, and a number of each weight that each rank holds whole."""
    state = ParallelState.start(layout)
    with InFp64(), torch.random.fork_rng():
        model, step = stepped(raw, state)
        torch.manual_seed(5)
        seen = observed(model.train(), step, state)
    whole = {name for name, stated in declarations(model).items() if stated.cut is None}
    return seen.losses, {name: float(local_data(model.get_parameter(name)).sum()) for name in whole}


def test_tensor_ranks_drop_the_same_of_what_they_all_have():
    """As of all heads of GPT-2, whose attention is whole on each."""
    drops = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    raw = tiny("gpt2", n_layer=2, **drops)
    ((expected, _),) = run_parallel(drop_and_train, 1, Layout(), raw)
    for key in drops:
        ((others, _),) = run_parallel(drop_and_train, 1, Layout(), raw | {key: 0.0})
        assert others[0] != pytest.approx(expected[0], rel=1e-6), key
    (found, weights), (_, others) = run_parallel(drop_and_train, 2, TENSOR, raw)
    assert weights == others and found == pytest.approx(expected, rel=1e-9)


def masks_of_own_features(raw):
    """Return which of its own features a rank drops between cut linears, and what it draws behind them."""
    state, masks, drawn, drop = ParallelState.start(TENSOR), [], [], nn.Dropout(0.5)
    drop.register_forward_hook(lambda module, args, output: masks.append(output.detach() == 0))
    with InFp64(), torch.random.fork_rng():
        model, step = stepped(raw, state)
        mlp = model.blocks[-1].mlp
        mlp.act_fn = drop
        mlp.down_proj.register_forward_hook(lambda *_: drawn.append(float(torch.rand(()))))
        torch.manual_seed(5)
        observed(model.train(), step, state, 1)
        return masks[-1], [*drawn, float(torch.rand(()))]


def test_tensor_ranks_drop_others_of_the_features_that_each_has_alone():
    """The share is stated for the part of the model that makes text."""
    raw = tiny("gemma3")
    raw["text_config"]["attention_dropout"] = 0.2
    (mask, after), (other, after_other) = run_parallel(masks_of_own_features, 2, raw)
    assert len(after) > 1 and after == after_other and 0.4 < float((mask == other).double().mean()) < 0.6


@of_this_version
def test_the_page_is_that_of_the_table():
    page = any_table.PAGE.read_text(encoding="utf-8")
    assert any_table.written(page, proved()) == page
    readme = (any_table.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(offered().keys() - FAMILIES)} [more types](docs/any_model.md)" in readme


def test_every_style_of_transformers_plans_has_a_row():
    plans = [getattr(config_class(kind), "base_model_tp_plan", None) or {} for kind in adopted_types()]
    assert {style for plan in plans for style in plan.values()} <= STYLES.keys()


def test_what_logits_of_tokens_do_not_read_is_kept_and_not_trained():
    """Stages but the first have none of it; the list of blocks is the decoder's, not the image encoder's."""
    made = family("gemma3")
    config = made.from_hf(tiny("gemma3"))
    shown, model = probed(config), made.on_meta(config)
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert shown.blocks == "model.language_model.layers"
    parts = {"model.vision_tower", "model.multi_modal_projector"}
    assert {".".join(name.split(".")[:2]) for name in still} == parts
    assert all(name in still for name, _ in model.named_parameters() if name.startswith(tuple(parts)))
    _, last = made.stages_on_meta(config, Layout.of(pipeline=2))
    assert not [name for name, _ in last.named_parameters() if "vision" in name]
    assert not probed(family("doge").from_hf(tiny("doge"))).idle  # whose attention masks have gradients


def test_first_values_follow_transformers_laws():
    """By mean and standard deviation of each tensor, against transformers' own draw of it."""
    from transformers import AutoModelForCausalLM

    made = family("hyperclovax")
    config = made.from_hf(tiny("hyperclovax", initializer_range=0.05, pad_token_id=None))
    torch.manual_seed(0)
    model = made.build(config, device="cpu")
    theirs = AutoModelForCausalLM.from_config(config.in_transformers())
    for name, tensor in theirs.named_parameters():
        parameter, ours = tensor.detach(), model.get_parameter(name).detach()[: len(tensor)]
        assert abs(float(ours.mean() - parameter.mean())) < 0.01, name
        assert float(ours.std()) == pytest.approx(float(parameter.std()), rel=0.2, abs=1e-6), name
    assert OWN not in {declaration.initial for declaration in declarations(model).values()}


@pytest.mark.parametrize(
    ("name", "arguments", "law"),
    [
        ("trunc_normal_", {"std": 0.02}, Normal(0.02)),
        ("trunc_normal_", {"std": 1.0}, OWN),
        ("uniform_", {"a": -0.5, "b": 0.5}, Uniform(0.5)),
        ("uniform_", {}, OWN),
    ],
)
def test_a_law_of_torch_is_one_of_ours_where_it_is_the_same(name, arguments, law):
    assert _law(name, signature(getattr(nn.init, name)).bind(torch.empty(2), **arguments)) == law


def test_adapters_pass_over_what_is_not_trained(tmp_path):
    *_, config, _ = saved(tmp_path / "hf", "gemma3")
    for excluded in (None, ("q_proj",), ".*q_proj"):
        family, _ = plan_adapters(LoraSection(r=2, exclude_modules=excluded), read_source(tmp_path / "hf"))
        names = {site.name for site in family.sites(config)}
        assert names and not any("vision" in name for name in names), excluded
        assert any(name.endswith("q_proj") for name in names) == (excluded is None), excluded


def test_adapters_of_an_image_encoder_are_merged_and_not_trained(tmp_path):
    """PEFT names them by transformers' modules, which Gemma 3's files call otherwise."""
    from peft import LoraConfig, get_peft_model

    theirs, *_ = saved(tmp_path / "hf", "gemma3")
    shape = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(theirs, shape)
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(BadInput, match=r"lora\.init_from: expected adapters of modules"):
        plan_adapters(LoraSection(init_from=str(tmp_path / "adapter")), read_source(tmp_path / "hf"))
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    assert run(["merge-lora", *(str(tmp_path / name) for name in ("hf", "adapter", "merged"))]) == 0
    expected, merged = (read_source(tmp_path / name).hf for name in ("expected", "merged"))
    assert expected.keys() == merged.keys()
    assert all(torch.allclose(merged[name].read(), tensor.read()) for name, tensor in expected.items())


def test_the_fingerprint_of_a_base_with_scalars_is_that_of_its_parts(tmp_path):
    saved(tmp_path / "hf", "apertus")
    convert(tmp_path / "hf", tmp_path / "cut", tensor=2)
    assert fingerprint(read_source(tmp_path / "hf")) == fingerprint(read_source(tmp_path / "cut"))


# With an image encoder, with experts, with a table of integers; at night of further kinds of files.
@pytest.mark.parametrize("kind", some(
    ["gemma3", "ernie4_5_moe", "deepseek_v4", "olmoe", "glm", "olmo_hybrid"], 0,
    always=["gemma3", "ernie4_5_moe", "deepseek_v4"],
))  # fmt: skip
def test_files_of_transformers_load_and_come_back_bitwise(kind, tmp_path):
    """Without what transformers leaves out as well, be it a constant or what its class lists; and from files
    with the names of its modules.
    """
    theirs, _, config, model = saved(tmp_path / "hf", kind)
    theirs.save_pretrained(tmp_path / "modules", save_original_format=False)
    convert(tmp_path / "modules", tmp_path / "same", to="hf")
    assert_same(weights(tmp_path / "same"), weights(tmp_path / "hf"))
    beside = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    if kind == "ernie4_5_moe":
        beside["model.mtp_block.0.mlp.weight"] = torch.ones(8)
    save_file({**weights(tmp_path / "hf"), **beside}, tmp_path / "hf" / "model.safetensors")
    loaded = load(tmp_path / "hf").model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)[: len(parameter)]), name
    convert(tmp_path / "hf", tmp_path / "cut", tensor=2, pipeline=1 if probed(config).no_pipeline else 2)
    convert(tmp_path / "cut", tmp_path / "back", to="hf")
    expected = weights(tmp_path / "hf")
    assert_same(
        weights(tmp_path / "back"), {name: expected[name] for name in expected.keys() - beside.keys()}
    )


def test_a_tied_output_layer_that_files_repeat_is_the_embedding(tmp_path):
    """Also where a tensor of another name comes first in transformers' files."""
    theirs, *_ = saved(tmp_path / "hf", "hrm_text", tie_word_embeddings=True)
    head = theirs.get_input_embeddings().weight
    for more, code in ((0, 0), (1, 2)):
        beside = {"lm_head.weight": head.detach() + more}
        save_file({**weights(tmp_path / "hf"), **beside}, tmp_path / "hf" / "model.safetensors")
        assert run(["verify", str(tmp_path / "hf")]) == code


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("arcee", {"pipeline": 2}),
        ("glm46v", {"data": 2, "zero": 3}),  # with an image encoder, which has no moments
        pytest.param("arcee", {"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("arcee", {"context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_recipe_trains_an_adopted_model_alike_in_every_layout(kind, layout, tmp_path):
    """And goes on alone where ranks stopped."""
    tokens, model = write_tokens(tmp_path / "tokens", vocab_size=100), {"config": tiny(kind)}
    alone, cut = (tiny_recipe(tmp_path / name, tokens, model=model, steps=3) for name in ("alone", "cut"))
    train(alone)
    train(cut | {"layout": layout, "stop_after": 2})
    train(cut)
    expected, seen = (torch.tensor(losses(tmp_path / name)) for name in ("alone", "cut"))
    assert torch.allclose(seen, expected, rtol=1e-9, atol=0)


def test_a_recipe_trains_a_family_of_the_zoo_by_transformers_code_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved("hf", "llama", vocab_size=512)
    tokens = write_tokens(tmp_path / "tokens")

    def trained(way, out, **changes):
        chosen = {"init_from": f"{tmp_path}/hf", "config": None, "implementation": way}
        return [step.loss for step in train(tiny_recipe(tmp_path / out, tokens, model=chosen, **changes))]

    def ends(*lines, code=0):
        for line in lines:
            assert run(line.split()) == code, (line, capsys.readouterr())

    losses = trained("transformers", "theirs", steps=2)
    assert losses == pytest.approx(trained("auto", "zoo", steps=2), rel=1e-6)
    assert isinstance(read_source("theirs").family, TransformersFamily)
    convert("theirs", "back", to="hf")
    assert read_source("zoo").family is read_source("back").family is FAMILIES["llama"]
    convert("hf", "cut", tensor=2, implementation="transformers")
    assert not [*differences(read_source("hf", implementation="transformers"), read_source("cut"))]
    with pytest.raises(BadInput, match="expected transformers' names, found the zoo's names") as refusal:
        read_source("zoo", implementation="transformers")
    assert "\n" not in str(refusal.value)
    # A Hugging Face folder is the same for both.
    ends("convert cut compared --to hf --verify", "diff cut hf", "diff hf cut")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"hidden_act": "tanh"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))  # which the zoo does not have
    ends("parity hf --implementation auto", code=2)
    convert("hf", "tanh", implementation="transformers")
    ends("parity hf --implementation transformers", "diff hf tanh", "diff tanh hf")
    trained("transformers", "lora", steps=1, lora={"r": 2, "target_modules": ["q_proj"]})
    assert isinstance(load("lora").model.family, AdaptedFamily)
    ends("merge-lora hf lora merged")


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0.5, float("inf")]], ids=["usual", "another"])
def test_infinite_numbers_are_in_checkpoints_as_transformers_writes_them(limit):
    made = family("mamba2")
    config = made.from_hf(tiny("mamba2", time_step_limit=limit))
    assert config.in_transformers().time_step_limit == limit
    written = json.loads(config.in_transformers().to_json_string(use_diff=False))
    assert written["time_step_limit"] == config.to_hf()["time_step_limit"] and made.from_hf(written) == config
    json.dumps(config.to_hf(), allow_nan=False)  # no other program reads a bare Infinity


def test_a_key_is_unknown_if_neither_transformers_config_nor_its_code_reads_it():
    raw = config("glm4_moe")
    assert {"head_dim", "partial_rotary_factor"} < raw.keys() - config_class("glm4_moe")().to_dict().keys()
    assert AdoptedConfig.unknown_keys(raw | {"num_nothing": 1}) == ["num_nothing"]


def test_a_balance_loss_that_is_not_computed_is_named():
    family("olmoe").from_hf(tiny("olmoe", quantization_config=None))  # null: none is stated
    with pytest.warns(UserWarning, match="output_router_logits is ignored; the balance loss"):
        family("olmoe").from_hf(tiny("olmoe", output_router_logits=True))


def declared(why, kind, changes, says, *, change=lambda call: call, **layout):
    """State what a config, or with ``None`` all defaults of its type, is refused for, or a layout of it;
    ``change`` decorates the call.
    """

    def call(folder):
        made, cut = family(kind), Layout.of(**layout)
        raw = {"model_type": kind} if changes is None else tiny(kind) | changes
        config = made.from_hf(raw, "here.json")
        made.check_layout(config, cut)
        made.declarations(config, cut)
        made.links(config)

    return Refused(why, change(call), says)


def written(folder):
    write_token_file(folder / "tokens", [range(9)] * 9, vocab_size=9)
    write_token_file(folder / "chats", [range(4)] * 9, [[0, 1, 1, 1]] * 9, vocab_size=9)


def held_out_chats(folder):
    model, held_out = {"config": tiny("gpt_neo", vocab_size=512)}, {"tokens": str(folder / "chats")}
    check_run(parse_recipe(tiny_recipe(folder / "run", folder / "tokens", model=model, evaluation=held_out)))


def model_and_chats(folder):
    theirs = AutoConfig.for_model(**tiny("gpt_neo", vocab_size=512))
    AutoModelForCausalLM.from_config(theirs).save_pretrained(folder / "m")
    written(folder)


def planned(why, kind, says, **changes):
    def call(folder):
        model = {"config": tiny(kind, vocab_size=512)}
        check_run(parse_recipe(tiny_recipe(folder / "run", folder / "tokens", model=model, **changes)))

    return Refused(why, call, says, given=written)


def shifted(self, input_dict, **named):
    return {name: tensors[0].roll(1) for name, tensors in input_dict.items()}


def named_as_modules(folder):
    saved(folder / "hf", "mixtral")[0].save_pretrained(folder / "hf", save_original_format=False)


NOT_ALONE = "expected a decoder alone, found another model. "
PARTS = "Models that are made of others .audio_encoder, decoder, text_encoder. are not taken"
SHARED = "layout: pipeline: .*its blocks are given %s beside hidden states"
OWN_ATTENTION = "its attention is not transformers' common one"
ROLLED = patch("transformers.core_model_loading.SplitModulelist.convert", shifted)
DROPPED = patch(
    "transformers.core_model_loading.revert_weight_conversion",
    lambda model, tensors: {name: x for name, x in tensors.items() if name != "model.norm.weight"},
)
UNKNOWN_STYLE = patch.object(
    config_class("arcee"), "base_model_tp_plan", {"layers.*.mlp.up_proj": "diagonal"}
)


def having(add):
    """Return what makes a model of which each MLP has something more."""

    def call(folder):
        from transformers.models.arcee.modeling_arcee import ArceeMLP

        made = ArceeMLP.__init__

        def with_more(self, *args, **named):
            made(self, *args, **named)
            add(self)

        with patch.object(ArceeMLP, "__init__", with_more):
            on_meta(family("arcee").from_hf(tiny("arcee")), ours=False)

    return call


NORM_AS_LINEAR = patch.object(
    config_class("arcee"), "base_model_tp_plan", {"layers.*.input_layernorm": "colwise"}
)
test_what_is_not_read_or_would_be_computed_otherwise_is_refused = refusals(
    Refused("modules' names in the zoo", lambda folder: convert(folder / "hf", folder / "cut"),
            "--to hf --implementation transformers. reads them", given=named_as_modules),
    declared("text for a width", "arcee", {"hidden_size": "wide"}, "expected what transformers' arcee reads"),
    declared("no blocks", "arcee", {"num_hidden_layers": 0}, "num_hidden_layers"),
    declared("quantized", "arcee", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    declared("no padding", "camembert", {"pad_token_id": None}, "pad_token_id: expected a token's number"),
    declared("blocks that are left out", "biogpt", {"layerdrop": 0.1}, "json: layerdrop: expected 0: all"),
    declared("blocks of a decoder", "bart", {"decoder_layerdrop": 0.1}, "decoder_layerdrop: expected 0"),
    declared("an encoder", "bert", None, NOT_ALONE + "Set is_decoder"),
    declared("encoder and decoder", "bart", None, NOT_ALONE + ".* its decoder trains alone"),
    declared("three models", "musicgen", None, NOT_ALONE + PARTS),
    declared("indices between blocks", "glm_moe_dsa", {}, SHARED % "prev_topk_indices", pipeline=2),
    declared("inputs of each block", "gemma4_text", {}, SHARED % "per_layer_input", pipeline=2),
    declared("keys of earlier blocks", "gemma4_unified_text",
             {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
             SHARED % "what model.layers.0.self_attn.v_proj.weight makes", pipeline=2),
    declared("no list of blocks", "hrm_text", {}, "layout: pipeline: .*blocks in its code", pipeline=2),
    declared("its own attention", "qwen3_next", {}, OWN_ATTENTION, context=2),
    declared("tokens cut", "qwen3_next", {}, f"sequence: .*{OWN_ATTENTION}", tensor=2, sequence=True),
    declared("a convolution", "lfm2", {}, "Lfm2ShortConv mixes tokens outside of attention", context=2),
    declared("its own mask", "phimoe", {}, "its mask is not causal: query 8, key 0", context=2),
    declared("keys", "diffllama", {}, "DiffLlamaAttention gives attention a second set of keys", context=2),
    declared("dynamic", "arcee", {"rope_parameters": DYNAMIC}, "context: expected 1 for arcee", context=2),
    declared("by kind of block", "mellum", {"rope_parameters": BY_KIND}, "rotation of type dyn", context=2),
    declared("heads", "arcee", {}, r"^model.layers.0.self_attn.k_proj.weight: 2 units of 16 on", tensor=4),
    declared("no shared experts", "dots1", {"n_shared_experts": 0}, "shared_experts.* Some count in conf"),
    declared("experts", "olmoe", {}, "the experts of adopted models are not spread", data=2, expert=2),
    declared("stages", "arcee", {}, "pipeline: expected at most 4, one block a stage, found 8", pipeline=8),
    declared("a style without a row", "arcee", {"num_hidden_layers": 3},
             "model.layers.*: its plan's style diagonal is not known", change=UNKNOWN_STYLE, tensor=2),
    declared("a style of a linear for a norm", "arcee", {"num_hidden_layers": 3}, "expected a linear for the "
             "style colwise, found ArceeRMSNorm. Take tensor=1", change=NORM_AS_LINEAR, tensor=2),
    declared("an output layer of its own", "dory", {}, "output layer: expected nn.Linear, found DoryLMHead"),
    declared("a block of two places", "zamba2", {}, "expected one place for each parameter, found .* again"),
    declared("no text alone", "blip", {}, "expected a model with an embedding and an output layer"),
    declared("norms of heads", "cohere", {"use_qk_norm": True, "rope_parameters": DYNAMIC},
             "q_norm.weight meets a rank's", tensor=2),
    declared("a rule of files that keeps no boxes", "olmoe", {"num_hidden_layers": 2},
             "made by renaming, splitting, stacking", change=ROLLED),
    declared("a rule of files that drops a parameter", "arcee", {"num_hidden_layers": 2},
             r"arcee: model\.norm\.weight: expected a tensor of files that holds it", change=DROPPED),
    # Code may follow the output layer; and routers are transformers' own.
    planned("chunks", "arcee", "memory.loss_chunk: expected 0 or auto", memory={"loss_chunk": 64}),
    planned("documents in a row", "gpt_neo", "data.tokens: expected one document a row: its attention is not",
            data={"documents": "separate"}),
    Refused("held-out documents in a row", held_out_chats, "evaluation.tokens: expected one document a row",
            given=written),
    Refused("documents in a row to evaluate", lambda folder: call_command(folder, "evaluate", "m", "chats"),
            "chats: expected one document a row: .* Eval", given=model_and_chats),
    planned("balance", "olmoe", "expected a model of the zoo: .*, found olmoe", experts={"balance": 0.1}),
    # First values that are not known.
    *(Refused(name, lambda folder, kind=kind: initialize(whole(kind), 3), f"{name}: expected an initial")
      for kind, name in {"apertus": "act_fn.alpha_p", "gemma3": "model.vision_tower.+weight"}.items()),
    Refused("documents in a row that attention of its own would join",
            lambda folder: built("gpt_neo")[2](*torch.tensor([[[0] * 8], [[0, 1, 2, 3] * 2]])),
            "one document a row"),
    *(Refused(option, lambda folder, module=nn.Embedding(8, 4, **{option: True}):
              cut_embedding(module, "arcee", ends=False, state=None),
              rf"embedding: .*{option}.*, found Embedding\(8, 4, {option}=True\)")
      for option in ("max_norm", "sparse", "scale_grad_by_freq")),
    Refused("a keyword of attention", lambda folder:
            attention(nn.Identity(), *torch.zeros(3, 1, 2, 4, 8), None, odd=1),
            "^Identity: odd: expected no keyword that"),
    declared("an older transformers", "arcee", {}, "transformers: version: expected at least .* for arcee",
             change=patch("trilith.models.from_transformers.model.version", lambda name: "4.57.1")),
    planned("a backend for attention of its own", "gpt_neo",
            "gpt_neo: attention_backend: expected auto, found flex. its attention is not",
            attention_backend="flex"),
    Refused("a tensor that is no buffer", having(lambda module: vars(module).update(odd=torch.ones(2))),
            r"^arcee: model\.layers\.0\.mlp\.odd: expected no tensor, found one"),
    Refused("a buffer that nothing sets",
            having(lambda module: module.register_buffer("odd", torch.ones(2), persistent=False)),
            r"^arcee: ArceeMLP\.odd: expected values that transformers' _init_weights sets"),
    # Attention that is called without this forward's mask.
    *(Refused(f"mask: {found}", lambda folder, mask=mask:
              attention(nn.Identity(), *torch.zeros(3, 1, 2, 4, 8), mask),
              f"^Identity: attention_mask: expected the mask .*, found {found}$")
      for found, mask in {"NoneType": None, "Tensor": torch.ones(1, 1, 4, 4)}.items()),
)  # fmt: skip


def declare_unproved(folder):
    kind = next(kind for kind in OFFERED if "tensor" not in offered()[kind])
    made = family_of({"model_type": kind})
    made.check_layout(made.from_hf(tiny(kind)), TENSOR)


def declare_unseen(folder):
    made = family_of({"model_type": "arcee"})
    with patch.object(Probed, "_watch", side_effect=RuntimeError("no numbers")):
        made.check_layout(made.from_hf(tiny("arcee", vocab_size=99)), TENSOR)


def hold_a_mask(folder):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    made = DeepseekV4HashRouter.__init__

    def with_mask(self, config):
        made(self, config)
        self.register_buffer("tid2eid", self.tid2eid.bool())

    with patch.object(DeepseekV4HashRouter, "__init__", with_mask):
        on_meta(family("deepseek_v4").from_hf(tiny("deepseek_v4")), ours=False)


test_what_the_table_or_this_transformers_lacks_is_refused = of_this_version(refusals(
    Refused("an axis that no test has proved", declare_unproved, "layout: tensor"),
    Refused("gradients of a rank's part that no forward has shown", declare_unseen,
            "layout: tensor: .*its code does not run without memory .RuntimeError: no numbers"),
    Refused("a type that no test has tried", patch.dict(TABLE, clear=True)(
            lambda folder: family_of({"model_type": "arcee"}).from_hf({"model_type": "arcee"})),
            "no test has tried it"),
    Refused("a buffer that cannot be declared", hold_a_mask,
            r"^deepseek_v4: model\.layers\.0\..*: expected floating numbers or"),
))  # fmt: skip


def test_attention_of_a_module_whose_name_only_looks_like_another_mixer_is_ours():
    assert probed(family("seed_oss").from_hf(tiny("seed_oss"))).no_context == ""


def test_a_recipe_is_planned_as_it_sets_the_model_up():
    """Frozen groups, recomputation and adapters; ``tests/layouts/test_held.py`` measures what ranks hold."""

    def planned(rank=0, **changes):
        model = {"config": tiny("arcee", vocab_size=512)}
        more = {"model": model, "layout": {"pipeline": 2}, "dtype": "float32"} | changes
        raw = tiny_recipe("run", "tokens", data={"global_batch": 8}, **more)
        return dry_run(parse_recipe(raw), rank=rank).rank

    model = whole("arcee", vocab_size=512)
    ranks = [planned(rank) for rank in range(2)]
    assert sum(rank.trained for rank in ranks) == sum(weight.numel() for weight in model.parameters())
    assert all(rank.memory.moments == 8 * rank.trained for rank in ranks)
    assert sum(sent.bytes for sent in ranks[0].traffic if sent.axis == "pipeline") == 4 * 2 * 16 * 64 * 4
    frozen = planned(optimizer={"groups": [{"match": "mlp", "freeze": True}]})
    mlp = sum(weight.numel() for weight in model.layers["0"].mlp.parameters())
    assert frozen.trained == ranks[0].trained - 3 * mlp  # of the four blocks the first stage has three
    again = planned(memory={"checkpointing": "full"})
    assert again.memory.activations < ranks[0].memory.activations / 2
    lora = planned(model={"init_from": "none", "implementation": "transformers"}, lora={"r": 2})
    assert 0 < lora.memory.moments == 8 * lora.trained < ranks[0].memory.moments / 4
    raw = tiny_recipe("run", "tokens", model={"config": tiny("arcee", vocab_size=512)}, dtype="float32")
    request = request_of("arcee", raw, machine_named("h100-80gb"), 2)
    with pytest.raises(BadInput, match="--generate: expected a family of the zoo, found arcee"):
        generation_layouts(request, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *(("deepseek_v4", {"dtype": dtype}) for dtype in ("float32", "float64")),
        ("deepseek_v4", {"dtype": "float32", "compute": "float16"}),
        *((kind, {"dtype": "float32"}) for kind in ("lfm2", "hrm_text")),
    ],
    ids=str,
)
def test_a_type_that_makes_its_masks_itself_is_planned(kind, precision):
    """With products of experts, attention of grouped heads with a mask, blocks that are not known."""
    raw = tiny_recipe("run", "tokens", model={"config": tiny(kind)}, **precision)
    assert dry_run(parse_recipe(raw)).rank.memory.activations > 0


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_neo",  # whose blocks give weights of attention besides
        pytest.param("idefics3", marks=pytest.mark.slow),  # of text and images
        pytest.param("jamba", marks=pytest.mark.slow),  # whose cache takes no blocks without attention
    ],
)
def test_parity_compares_a_type_of_any_kind_with_transformers(kind, tmp_path, capsys):
    saved(tmp_path / "hf", kind)
    assert run(["parity", str(tmp_path / "hf")]) == 0, capsys.readouterr()


def test_attention_that_another_model_set_to_eager_stays_ours():
    """transformers keeps the choice on the config object: eager would take our mask for no mask."""
    made, _, model = built("arcee")
    ids = torch.randint(3, 100, (1, 16))
    before = model(ids)
    made.from_hf(tiny("arcee")).in_transformers()._attn_implementation = "eager"
    assert torch.equal(model(ids), before)
    model.hf.config._attn_implementation = "eager"
    with pytest.raises(RuntimeError, match="meta"):  # the mask has no numbers, so it cannot be added
        model(ids)
