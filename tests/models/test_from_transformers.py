"""Models that transformers computes: as transformers itself does, in each layout that is offered."""

import json
import random
from importlib.metadata import version

import pytest
import torch
from support import any_table
from support.any_model import (
    LAYOUTS,
    InFp64,
    draw,
    family,
    observed,
    plain,
    prove,
    reference,
    stepped,
    tiny,
)
from support.nightly import some
from support.refusals import Refused, refusals
from support.round_trips import assert_same, weights
from support.short_runs import losses, tiny_recipe, train, write_tokens
from support.versions import of_proved_transformers
from trilith.checkpoints import convert, differences, load, read_source
from trilith.cli.app import run
from trilith.layers import gather_logits
from trilith.models import FAMILIES, AdaptedFamily, family_of
from trilith.models.from_transformers import TransformersFamily, adopted_types
from trilith.models.from_transformers.attention import attention
from trilith.models.from_transformers.config import config_class, offered, proved
from trilith.models.from_transformers.cut import STYLES
from trilith.models.from_transformers.layers import OwnDraws, cut_embedding
from trilith.models.from_transformers.probe import on_meta, probed
from trilith.parallel_state import OWN, BadInput, Layout, ParallelState, declarations
from trilith.parallel_state.engine import local_data
from trilith.planner.dry_run import dry_run
from trilith.planner.search.generation_layouts import generation_layouts
from trilith.planner.search.request import request_of
from trilith.planner.time import machine_named
from trilith.ranks import run_parallel
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import LoraSection
from trilith.training.lora import plan_adapters
from trilith.training.run_plan import plan

pytestmark = of_proved_transformers
TABLE = proved()["types"]
SAME_VERSION = version("transformers").split(".")[:2] == proved()["transformers"].split(".")[:2]
of_this_version = pytest.mark.skipif(not SAME_VERSION, reason="the table is of another transformers")
OFFERED = sorted(kind for kind, row in TABLE.items() if "refused" not in row and kind not in FAMILIES)
#: Types whose forward has what could be computed twice, left out or cut wrongly.
CHOSEN = ["hyperclovax", "apertus", "granite_swa", "ernie4_5_moe"]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
#: Families of the zoo that transformers computes as well.
ZOO = random.Random(5).sample(sorted(offered().keys() & FAMILIES), 3)


@of_this_version
@pytest.mark.parametrize("kind", some(OFFERED, 0, always=CHOSEN))
def test_a_type_is_transformers_own_in_every_layout_of_the_table(kind):
    is_proved(kind, ["data", *offered()[kind]])


def built(kind, **changes):
    """Return the family, the config and the model of a type, with weights drawn by their names."""
    made = family(kind)
    config = made.from_hf(tiny(kind, **changes))
    model = made.build(config).to_empty(device="cpu").eval()
    draw(model, model.state)
    return made, config, model


def is_proved(kind, names):
    axes = {axis: LAYOUTS[axis] for axis in names}
    row = prove(kind, short(tiny(kind)), axes)
    assert row.proved.keys() == {"transformers", "gradients", *axes}, row.refused


@of_this_version
@pytest.mark.parametrize("kind", random.Random(11).sample(sorted({*OFFERED} - {*CHOSEN}), 4))
def test_a_type_is_transformers_own_in_two_layouts_by_a_seed(kind):
    is_proved(kind, random.Random(kind).sample(["data", *offered()[kind]], 2))


def short(raw):
    """Return the config of two blocks, if its blocks are all alike, or alike but for the first."""
    by_block = any(isinstance(value, list) and len(value) == 4 for value in raw.values())
    return raw if by_block else raw | {"num_hidden_layers": 2}


@of_this_version
@pytest.mark.parametrize("kind", [*ZOO, "gemma", "minicpm3", "roformer"])
def test_one_process_is_transformers_own_and_the_zoo_s(kind):
    """Every layout would agree without a factor of the embedding (Gemma), with rotations from bare memory
    (MiniCPM3), or with an output layer whose bias two modules name (RoFormer).
    """
    with InFp64():
        row, _ = reference(short(tiny(kind)))
    assert row.proved["gradients"] < 1e-9 and row.proved["transformers"] < 1e-9 and not row.refused
    assert ("zoo" in row.proved) == (kind in FAMILIES) and row.proved.get("zoo", 0.0) < 1e-6


@of_this_version
@pytest.mark.parametrize(
    ("kind", "axis"),
    [
        ("electra", "pipeline"),  # whose embedding is narrower than its blocks
        ("bart", "pipeline"),  # whose table of positions is given no tokens on later stages
        ("bamba", "pipeline"),  # whose blocks give tuples
        ("llava_next", "pipeline"),  # with a parameter around its blocks that no text reads
        ("llama4_text", "tensor"),  # whose stacks of experts are transposed
        ("mimo_v2_flash", "tensor"),  # whose attention has a parameter for each head
        ("gpt2", "sequence"),  # which adds positions to embeddings, and views what the last block made
        ("opt", "sequence"),  # whose blocks flatten tokens
    ],
)
def test_an_axis_of_a_type_equals_one_process(kind, axis):
    row = prove(kind, short(tiny(kind)), {axis: LAYOUTS[axis]})
    assert axis in row.proved, row.refused


@of_this_version
@pytest.mark.parametrize(
    ("raw", "layout"),
    [
        # Code behind the blocks of a stage views them by the tokens' shape.
        (short(tiny("gpt_bigcode")), Layout.of(tensor=2, pipeline=2, sequence=True)),
        # A rank's second stage does not look up positions, whose table it has not gathered.
        (tiny("gpt2"), Layout.of(pipeline=2, virtual_stages=2, data=2, zero=3)),
        # Blocks give views, which a backward in two parts detaches in place.
        (tiny("opt"), Layout.of(pipeline=2, virtual_stages=2, v_shape=True)),
    ],
    ids=["sequence", "interleaved", "two parts"],
)
def test_several_axes_of_a_type_equal_one_process(raw, layout):
    row = prove(raw["model_type"], raw, {"several": layout})
    assert "several" in row.proved, row.refused


@torch.no_grad()
def logits_in(layout, raw):
    """Return the logits of a row of tokens by parameters as ``generate`` has them, without a step's FSDP."""
    state = ParallelState.start(layout) if layout.world > 1 else ParallelState.alone()
    made = family(raw["model_type"])
    model = made.build(made.from_hf(raw), state=state, dtype=torch.float64).to_empty(device="cpu")
    draw(model, state)
    with InFp64():
        return gather_logits(model.eval()(torch.arange(32)[None]), model.config.vocab_size, state=state)


def test_tensor_ranks_run_code_that_reads_the_embedding_itself_without_a_step():
    raw = tiny("gemma4")
    alone = logits_in(Layout(), raw)
    for logits in run_parallel(logits_in, 2, Layout.of(tensor=2), raw):
        torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)


def drop_and_train(raw, layout):
    """Train with dropout; return what this rank saw, and a number of each weight that it holds whole."""
    state = ParallelState.start(layout) if layout.world > 1 else ParallelState.alone()
    with InFp64(), torch.random.fork_rng():
        model, step = stepped(raw, state)
        torch.manual_seed(5)
        seen = observed(model.train(), step, state)
    whole = {name for name, stated in declarations(model).items() if stated.cut is None}
    return seen, {name: float(local_data(model.get_parameter(name)).sum()) for name in whole}


@pytest.mark.parametrize(
    ("kind", "changes", "same"),
    [
        # Each tensor rank has all heads.
        ("gpt2", {"n_layer": 2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}, True),
        ("arcee", {"num_hidden_layers": 2, "attention_dropout": 0.2}, False),  # each has heads of its own
    ],
)
def test_tensor_ranks_drop_the_same_of_what_they_all_have(kind, changes, same):
    raw = tiny(kind, **changes)
    alone, _ = drop_and_train(raw, Layout())
    kept_all, _ = drop_and_train(raw | {key: 0.0 for key in changes if "drop" in key}, Layout())
    (seen, weights), (_, others) = run_parallel(drop_and_train, 2, raw, Layout.of(tensor=2))
    assert weights == others
    assert seen.losses[0] != pytest.approx(kept_all.losses[0], rel=1e-6)
    assert (seen.losses == pytest.approx(alone.losses, rel=1e-9)) == same


def masks_between_cut_linears(raw, layout):
    """Return which numbers one rank drops in a feed-forward of its own features, and what it draws next."""
    from transformers.models.arcee.modeling_arcee import ArceeMLP

    def forward(module, x):
        dropped = torch.nn.functional.dropout(module.up_proj(x), 0.5, module.training)
        masks.append(dropped.detach() == 0)
        return module.down_proj(module.act_fn(dropped))

    masks, state = [], ParallelState.start(layout)
    with InFp64(), torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArceeMLP, "forward", forward)
        model, step = stepped(raw, state)
        torch.manual_seed(5)
        observed(model.train(), step, state, 1)
        return masks[-1], float(torch.rand(()))


def test_the_dropout_of_the_part_that_makes_text_is_of_each_rank_s_own_heads():
    raw, made = tiny("gemma3"), family("gemma3")
    raw["text_config"]["attention_dropout"] = 0.2
    model = made.stages_on_meta(made.from_hf(raw), Layout.of(tensor=2))[0]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert any(isinstance(getattr(hook, "__self__", None), OwnDraws) for hook in hooks)


@pytest.mark.slow
def test_tensor_ranks_drop_others_of_the_features_that_each_has_alone():
    raw = tiny("arcee", num_hidden_layers=2, attention_dropout=0.2)
    ranks = run_parallel(masks_between_cut_linears, 2, raw, Layout.of(tensor=2))
    (mask, after), (other, after_other) = ranks
    assert after == after_other and 0.4 < float((mask == other).double().mean()) < 0.6


@of_this_version
def test_the_page_is_that_of_the_table():
    page = any_table.PAGE.read_text(encoding="utf-8")
    assert any_table.written(page, proved()) == page
    readme = (any_table.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(offered().keys() - FAMILIES)} [more types](docs/any_model.md)" in readme


def test_every_style_of_transformers_plans_has_a_row():
    plans = [getattr(config_class(kind), "base_model_tp_plan", None) or {} for kind in adopted_types()]
    assert {style for plan in plans for style in plan.values()} <= STYLES.keys()


def test_a_style_without_a_row_is_refused(monkeypatch):
    monkeypatch.setattr(config_class("arcee"), "base_model_tp_plan", {"layers.*.mlp.up_proj": "diagonal"})
    made = family("arcee")
    with pytest.raises(BadInput, match=r"model.layers.*: its plan's style diagonal is not known"):
        made.stages_on_meta(made.from_hf(tiny("arcee", num_hidden_layers=3)), Layout.of(tensor=2))


@of_this_version
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "sequence", "expert"])
def test_an_axis_that_is_not_proved_is_refused_in_one_line(axis):
    layout = LAYOUTS.get(axis) or Layout.of(data=2, expert=2)
    kind = next(kind for kind in OFFERED if axis not in offered()[kind])
    made = family_of({"model_type": kind})
    with pytest.raises(BadInput, match=f"layout: {axis}") as refusal:
        made.check_layout(made.from_hf(tiny(kind)), layout)
    assert "\n" not in str(refusal.value)


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


@pytest.mark.parametrize("excluded", [None, ("q_proj",), ".*q_proj"], ids=str)
def test_adapters_pass_over_what_is_not_trained(excluded, tmp_path):
    made, config, model = built("gemma3")
    plain(config, made, model).save_pretrained(tmp_path / "hf")
    base = read_source(tmp_path / "hf")
    family, _ = plan_adapters(LoraSection(r=2, exclude_modules=excluded), base)
    names = {site.name for site in family.sites(config)}
    assert names and not any("vision" in name for name in names)
    assert any(name.endswith("q_proj") for name in names) == (excluded is None)


def test_adapters_of_an_image_encoder_are_merged_and_not_trained(tmp_path):
    """PEFT names them by transformers' modules, which Gemma 3's files call otherwise."""
    from peft import LoraConfig, get_peft_model

    made, config, model = built("gemma3")
    theirs = plain(config, made, model)
    theirs.save_pretrained(tmp_path / "hf")
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


@pytest.mark.parametrize(
    ("kind", "name"), [("apertus", "act_fn.alpha_p"), ("gemma3", "model.vision_tower.+weight")]
)
def test_a_model_whose_first_values_are_not_known_starts_from_weights_only(kind, name, tmp_path):
    raw = tiny_recipe(
        tmp_path / "run",
        write_tokens(tmp_path / "tokens", vocab_size=100),
        model={"config": tiny(kind)},
        steps=1,
    )
    with pytest.raises(Exception, match=f"{name}: expected an initial"):
        train(raw)


@pytest.mark.parametrize(
    "kind",
    [
        "gemma3",
        "ernie4_5_moe",
        "deepseek_v4",  # with a table of integers
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("olmoe", "glm", "olmo_hybrid")),
    ],
)
def test_files_of_transformers_load_and_come_back_bitwise(kind, tmp_path):
    made, config, model = built(kind)
    theirs = plain(config, made, model).float()
    theirs.save_pretrained(tmp_path / "hf")
    loaded = load(tmp_path / "hf").model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)[: len(parameter)]), name
    convert(tmp_path / "hf", tmp_path / "cut", tensor=2, pipeline=1 if probed(config).no_pipeline else 2)
    convert(tmp_path / "cut", tmp_path / "back", to="hf")
    assert_same(weights(tmp_path / "back"), weights(tmp_path / "hf"))


def test_a_rule_that_keeps_no_boxes_is_refused(monkeypatch):
    from transformers import core_model_loading

    def shifted(self, input_dict, **named):
        return {name: tensors[0].roll(1) for name, tensors in input_dict.items()}

    monkeypatch.setattr(core_model_loading.SplitModulelist, "convert", shifted)
    made = family("olmoe")
    with pytest.raises(BadInput, match="made by renaming, splitting, stacking"):
        made.links(made.from_hf(tiny("olmoe", num_hidden_layers=2)))


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


def test_a_recipe_trains_a_family_of_the_zoo_by_transformers_code_too(tmp_path, capsys):
    made, config, model = built("llama", vocab_size=512)
    plain(config, made, model).save_pretrained(tmp_path / "hf")
    tokens, runs = write_tokens(tmp_path / "tokens"), {}
    for way in ("auto", "transformers"):
        chosen = {"init_from": str(tmp_path / "hf"), "config": None, "implementation": way}
        runs[way] = [step.loss for step in train(tiny_recipe(tmp_path / way, tokens, model=chosen, steps=2))]
    assert runs["transformers"] == pytest.approx(runs["auto"], rel=1e-6)
    assert isinstance(read_source(tmp_path / "transformers").family, TransformersFamily)
    assert read_source(tmp_path / "auto").family is FAMILIES["llama"]
    convert(tmp_path / "transformers", tmp_path / "back", to="hf")
    assert read_source(tmp_path / "back").family is FAMILIES["llama"]
    convert(tmp_path / "hf", tmp_path / "cut", tensor=2, implementation="transformers")
    whole = read_source(tmp_path / "hf", implementation="transformers")
    assert not [*differences(whole, read_source(tmp_path / "cut"))]
    with pytest.raises(BadInput, match="expected transformers' names, found the zoo's names") as refusal:
        read_source(tmp_path / "auto", implementation="transformers")
    assert "\n" not in str(refusal.value)
    words = ["convert", str(tmp_path / "cut"), str(tmp_path / "compared"), "--to", "hf", "--verify"]
    assert run(words) == 0, capsys.readouterr()
    for pair in (("cut", "hf"), ("hf", "cut")):  # a Hugging Face folder is the same for both
        assert run(["diff", *(str(tmp_path / name) for name in pair)]) == 0, capsys.readouterr()
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"hidden_act": "tanh"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))  # which the zoo does not have
    words = ["parity", str(tmp_path / "hf"), "--implementation"]
    assert [run([*words, way]) for way in ("auto", "transformers")] == [2, 0], capsys.readouterr()
    convert(tmp_path / "hf", tmp_path / "tanh", implementation="transformers")
    for pair in (("hf", "tanh"), ("tanh", "hf")):
        assert run(["diff", *(str(tmp_path / name) for name in pair)]) == 0, capsys.readouterr()
    chosen = {"init_from": str(tmp_path / "hf"), "config": None, "implementation": "transformers"}
    lora = {"r": 2, "target_modules": ["q_proj"]}
    train(tiny_recipe(tmp_path / "lora", tokens, model=chosen, steps=1, lora=lora))
    assert isinstance(load(tmp_path / "lora").model.family, AdaptedFamily)
    merged = ["merge-lora", *(str(tmp_path / name) for name in ("hf", "lora", "merged"))]
    assert run(merged) == 0, capsys.readouterr()


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0.5, float("inf")]], ids=["usual", "another"])
def test_infinite_numbers_are_in_checkpoints_as_transformers_writes_them(limit):
    made = family("mamba2")
    config = made.from_hf(tiny("mamba2", time_step_limit=limit))
    assert config.in_transformers().time_step_limit == limit
    written = json.loads(config.in_transformers().to_json_string(use_diff=False))
    assert written["time_step_limit"] == config.to_hf()["time_step_limit"] and made.from_hf(written) == config
    json.dumps(config.to_hf(), allow_nan=False)  # no other program reads a bare Infinity


def test_a_balance_loss_that_is_not_computed_is_named():
    with pytest.warns(UserWarning, match="output_router_logits is ignored; the balance loss"):
        family("olmoe").from_hf(tiny("olmoe", output_router_logits=True))


def refused(why, kind, changes, layout, says):
    def declare(_):
        made, cut = family(kind), Layout.of(**layout)
        config = made.from_hf(
            tiny(kind) | changes if changes is not None else {"model_type": kind}, "here.json"
        )
        made.check_layout(config, cut)
        made.declarations(config, cut)

    return Refused(why, declare, says)


NOT_ALONE = "expected a decoder alone, found another model. "
PARTS = "Models that are made of others .audio_encoder, decoder, text_encoder. are not taken"
SHARED = "layout: pipeline: .*its blocks are given %s beside hidden states"
SECOND_KEYS = "DiffLlamaAttention gives attention a second set of keys"
CONTEXT, STAGES = {"context": 2}, {"pipeline": 2}
test_what_is_not_read_or_would_be_computed_otherwise_is_refused = refusals(
    refused(
        "text for a width", "arcee", {"hidden_size": "wide"}, {}, "expected what transformers' arcee reads"
    ),
    refused("no blocks", "arcee", {"num_hidden_layers": 0}, {}, "num_hidden_layers"),
    refused(
        "quantized", "arcee", {"quantization_config": {"quant_method": "gptq"}}, {}, "quantization_config"
    ),
    refused("no padding", "camembert", {"pad_token_id": None}, {}, "pad_token_id: expected a token's number"),
    refused("an encoder", "bert", None, {}, NOT_ALONE + "Set is_decoder"),
    refused("encoder and decoder", "bart", None, {}, NOT_ALONE + ".* its decoder trains alone"),
    refused("three models", "musicgen", None, {}, NOT_ALONE + PARTS),
    refused("indices between blocks", "glm_moe_dsa", {}, STAGES, SHARED % "prev_topk_indices"),
    refused("inputs of each block", "gemma4_text", {}, STAGES, SHARED % "per_layer_input"),
    refused("no list of blocks", "hrm_text", {}, STAGES, "layout: pipeline: .*blocks in its code"),
    refused("its own attention", "qwen3_next", {}, CONTEXT, "its attention is not transformers' common one"),
    refused("a convolution", "lfm2", {}, CONTEXT, "Lfm2ShortConv mixes tokens outside of attention"),
    refused("its own mask", "phimoe", {}, CONTEXT, "its mask is not causal: query 8, key 0"),
    refused("second keys", "diffllama", {}, CONTEXT, SECOND_KEYS),
    refused("dynamic", "arcee", {"rope_parameters": DYNAMIC}, CONTEXT, "context: expected 1 for arcee"),
    refused(
        "heads", "arcee", {}, {"tensor": 4}, r"^model.layers.0.self_attn.k_proj.weight: 2 units of 16 on"
    ),
    refused("experts", "olmoe", {}, {"data": 2, "expert": 2}, "the experts of adopted models are not spread"),
    refused(
        "stages", "arcee", {}, {"pipeline": 8}, "pipeline: expected at most 4, one block a stage, found 8"
    ),
)


def test_attention_of_a_module_whose_name_only_looks_like_another_mixer_is_ours():
    assert probed(family("seed_oss").from_hf(tiny("seed_oss"))).no_context == ""


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("arcee", {"memory": {"loss_chunk": 64}}, r"memory.loss_chunk: expected 0 or auto"),
        ("olmoe", {"experts": {"balance": 0.1}}, "experts: expected a model of the zoo: .*, found olmoe"),
    ],
)
def test_losses_that_need_more_of_a_model_than_its_logits_are_refused(kind, changes, says, tmp_path):
    """Code may follow the output layer; and routers are transformers' own."""
    tokens, model = write_tokens(tmp_path / "tokens"), {"config": tiny(kind, vocab_size=512)}
    with pytest.raises(BadInput, match=says) as refusal:
        plan(parse_recipe(tiny_recipe(tmp_path / "run", tokens, model=model, **changes)))
    assert "\n" not in str(refusal.value)


def test_a_recipe_is_planned_as_it_sets_the_model_up():
    """Frozen groups, recomputation and adapters; ``tests/layouts/test_held.py`` measures what ranks hold."""

    def planned(rank=0, **changes):
        model = {"config": tiny("arcee", vocab_size=512)}
        more = {"model": model, "layout": {"pipeline": 2}, "dtype": "float32"} | changes
        raw = tiny_recipe("run", "tokens", data={"global_batch": 8}, **more)
        return dry_run(parse_recipe(raw), rank=rank).rank

    made = family("arcee")
    model = made.on_meta(made.from_hf(tiny("arcee", vocab_size=512)))
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
    "kind",
    [
        "deepseek_v4",  # products of experts in fp32
        "lfm2",  # attention of grouped heads with a mask
        "hrm_text",  # blocks that are not known
    ],
)
def test_a_type_that_makes_its_masks_itself_is_planned(kind):
    raw = tiny_recipe("run", "tokens", model={"config": tiny(kind)}, dtype="float32")
    run = dry_run(parse_recipe(raw))
    assert run.rank.memory.activations > 0


@pytest.mark.parametrize("kind", ["gemma", "minicpm3", "roformer"])
def test_one_process_is_transformers_own(kind):
    """Every layout would agree without a factor of the embedding, with rotations from bare memory, or with an
    output layer whose bias two modules name.
    """
    with InFp64():
        row, _ = reference(short(tiny(kind)))
    assert row.proved["transformers"] < 1e-9 and row.proved["gradients"] < 1e-9 and not row.refused


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_neo",  # whose blocks give weights of attention besides
        pytest.param("idefics3", marks=pytest.mark.slow),  # of text and images
        pytest.param("jamba", marks=pytest.mark.slow),  # whose cache takes no blocks without attention
    ],
)
def test_parity_compares_a_type_of_any_kind_with_transformers(kind, tmp_path, capsys):
    made, config, model = built(kind)
    plain(config, made, model).float().save_pretrained(tmp_path / "hf")
    assert run(["parity", str(tmp_path / "hf")]) == 0, capsys.readouterr()


def test_a_type_with_attention_of_its_own_refuses_packed_documents_and_caches():
    *_, model = built("gpt_neo")
    with pytest.raises(BadInput, match="one document a row"):
        model(torch.zeros(1, 8, dtype=torch.int64), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]))


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


@pytest.mark.parametrize(("mask", "found"), [(None, "NoneType"), (torch.ones(1, 1, 4, 4), "Tensor")])
def test_attention_that_is_called_without_this_forwards_mask_is_refused_in_one_line(mask, found):
    with pytest.raises(BadInput, match=f"^Identity: attention_mask: expected the mask .*, found {found}$"):
        attention(torch.nn.Identity(), *torch.zeros(3, 1, 2, 4, 8), mask)


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_an_embedding_with_an_option_that_ours_lacks_is_refused(option):
    module = torch.nn.Embedding(8, 4, **{option: True})
    with pytest.raises(BadInput, match=rf"embedding: .*{option}.*, found Embedding\(8, 4, {option}=True\)"):
        cut_embedding(module, "arcee", ends=False, state=None)


@of_this_version
def test_a_buffer_that_cannot_be_declared_is_named_itself_in_the_refusal(monkeypatch):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as code

    config, made = family("deepseek_v4").from_hf(tiny("deepseek_v4")), code.DeepseekV4HashRouter.__init__

    def with_mask(self, config):
        made(self, config)
        self.register_buffer("tid2eid", self.tid2eid.bool())

    monkeypatch.setattr(code.DeepseekV4HashRouter, "__init__", with_mask)
    with pytest.raises(BadInput, match=r"^deepseek_v4: model\.layers\.0\..*: expected floating numbers or"):
        on_meta(config, ours=False)


def test_a_type_that_no_test_has_tried_is_refused(monkeypatch):
    monkeypatch.delitem(TABLE, "arcee")
    with pytest.raises(BadInput, match="no test has tried it"):
        family_of({"model_type": "arcee"}).from_hf({"model_type": "arcee"})
