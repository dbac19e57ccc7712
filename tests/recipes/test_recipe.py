"""Recipes: what they accept, the sizes that they name, and one line for what they do not accept."""

import json
import tomllib
from operator import attrgetter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.configs import TINY_LLAMA
from support.draws import drawn
from support.refusals import Refused, refusals
from support.short_runs import run_and_listen, tiny_recipe, train
from trilith.checkpoints import read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.models import GPT2Config, published_size
from trilith.recipes import load_recipe
from trilith.recipes.recipe import parse_recipe, read_config
from trilith.recipes.recipe_text import commented_recipe
from trilith.testing import run_parallel

RECIPE = """
out = "run"
steps = 10
[model]
init_from = "somewhere"
[data]
tokens = "tokens"
sequence_length = 32
global_batch = 8
"""


#: The last phase of a schedule that begins after a warm-up of 7 of 10 steps.
WSD = "optimizer.schedule=wsd optimizer.warmup=7"
IN_SHARDS = "layout.data=4 layout.zero=2 layout.data_replicate=2"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        # Values are TOML, or bare words.
        ("layout.tensor=2", "layout.tensor", 2),
        ("layout.split=[1,2]", "layout_section.split", [1, 2]),
        ("out=other/run", "out", "other/run"),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("stop_after=3", "stop_after", 3),
        # Short names of data types are those of torch.
        ("dtype=fp32", "dtype", "float32"),
        ("compute=bf16", "compute", "bfloat16"),
        ("compute=fp8", "compute", "float8"),
        ("reduce=torch.float32", "reduce", "float32"),
        ("layout.data=4", "layout.data_replicate", 4),
        (IN_SHARDS, "layout.data_replicate", 2),
        (IN_SHARDS, "layout.data_shard", 2),
        ("optimizer.clip=none", "optimizer.clip", 0.0),
        ("optimizer.clip=0", "optimizer.clip", 0.0),
        # At the limits of what is refused.
        ("layout.context=4", "layout.context", 4),
        ("layout.context=2 layout.ring=true", "layout.ring", True),
        ("compute=float16", "dtype", "float32"),
        (f"{WSD} optimizer.decay=3", "optimizer.decay", 3),
        ("memory.checkpoint_every=2 memory.checkpointing=every", "memory.checkpoint_every", 2),
        ("memory.checkpointing=every", "memory.checkpointing", "every"),
        ("watch.norms=5", "watch.norms", 5),
        ("watch.activation_norms=true watch.norms=5", "watch.activation_norms", True),
    ],
)
def test_what_a_recipe_accepts_is_what_it_says(words, key, value, tmp_path):
    write_recipe(tmp_path)
    assert attrgetter(key)(load_recipe(tmp_path / "recipe.toml", words.split())) == value


values = st.recursive(
    st.one_of(
        st.text(st.characters(codec="utf-8")), st.integers(-(2**53), 2**53), st.booleans(), st.floats(-9, 9)
    ),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner | st.none()),
    max_leaves=6,
)


def without_none(value):
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [*map(without_none, value)] if isinstance(value, list) else value


@settings(max_examples=drawn(100), deadline=None)
@given(value=values, head=st.text(st.characters(codec="utf-8")))
@example(value={}, head="a\0")
def test_a_recipe_that_is_written_says_what_its_data_said(value, head):
    raw = {"out": "a\x7f\U0001f600", "optimizer": {"skip_spikes": {}, "lr": None}}
    raw |= {"model": {"arguments": value}, "loss": {"arguments": {"key": value}}}
    assert tomllib.loads(commented_recipe(raw, head)) == without_none(raw)


def write_recipe(folder):
    (folder / "recipe.toml").write_text(RECIPE)


def refused(why, words, says):
    def call(folder):
        load_recipe(folder / "recipe.toml", words.split(" "))

    return Refused(why, call, says, given=write_recipe)


def refused_model(why, model, says):
    def read(folder):
        read_config(parse_recipe({**tiny_recipe(folder / "run", folder / "tokens"), "model": model}).model)

    return Refused(why, read, says)


ROW = r"data\.sequence_length"
GPIPE = "layout.pipeline=2 layout.schedule=gpipe"
SCALE = {"loss_scale.minimum": 2}
ROW_OF_30 = "data.sequence_length=30"
LLAMA_1B = {"size": "llama-3.2-1b"}
UNREAD = "recipe: model.config: rope_thetta: expected a key that llama reads, .*Nearest: rope_theta"
PATHS = ["out", *(f"model.{key}" for key in ("init_from", "config", "tokenizer"))]
PATHS += ["data.tokens", "evaluation.tokens", "lora.init_from"]
test_a_bad_recipe_is_refused = refusals(
    refused("unknown key", "stepz=1", r"stepz: expected a known key"),
    refused("unknown key in a section", "data.batch=1", r"data\.batch: expected a known key"),
    refused("two keys in one", "steps=1\nseed=5", r"override: steps: expected one key's value, found 2 keys"),
    refused("no number", "steps=ten", r"steps: .*found 'ten'"),
    refused("E11 zero", "steps=0", r"steps"),
    *(refused(f"E11 {key}", f"{key}=0", key) for key in ("data.global_batch", "data.sequence_length")),
    refused("negative seed", "seed=-1", "seed"),
    refused("E11 negative", "layout.tensor=-1", r"layout\.tensor"),
    refused("E14 ZeRO stage", "layout.zero=4", r"layout\.zero"),
    refused("E13 global batch", "layout.data=3", r"data\.global_batch: expected a multiple of data=3"),
    refused("E12 few micro-batches", "layout.pipeline=16", "a step: expected at least 16 with 1f1b"),
    refused("decay without wsd", "optimizer.decay=3", r"optimizer\.decay: expected schedule"),
    refused("half a rule", "optimizer.scale_lr=sqrt", "scale_lr and reference_batch together"),
    refused("loss scale", "loss_scale.initial=1000", "expected a power of two, found 1000"),
    refused("loss scale below its range", "loss_scale.initial=0.5", "between minimum=1 and"),
    *(
        refused(f"{key} of several types", f"{key}={number}", f"toml: {key}: expected")
        for key, number in (("optimizer.clip", -1), ("memory.loss_chunk", -1), ("lora.target_modules", 3))
    ),
    refused("no value", "nonsense", "expected key=value"),
    refused("no section", "steps.more=1", "expected a section"),
    refused("E9", f"layout.tensor=4 layout.sequence=true {ROW_OF_30}", rf"{ROW}: .* multiple of tensor=4"),
    refused("E7", f"layout.context=4 {ROW_OF_30}", rf"2 x context=4, found 30.* legal {ROW}: 24 or 32$"),
    *(
        refused(f"an address in {key}", f"{key}=s3://b/x", rf"{key}: .*of this machine, not an address")
        for key in ("out", "model.config", "model.tokenizer")
    ),
    *(
        refused(f"half an address in {key}", f"{key}=s3://", rf"{key}: .*a whole address, such as s3://")
        for key in ("model.init_from", "data.tokens", "checkpoint.mirror")
    ),
    refused("ring", "layout.ring=circle", r"layout\.ring: expected a valid boolean, found 'circle'"),
    refused("a last phase in the warm-up", f"{WSD} optimizer.decay=4", "most the 3 steps after the warm-up"),
    refused(
        "no step after the warm-up", f"{WSD} steps=7", r"found 1, a tenth of the run.*lower optimizer\.warm"
    ),
    refused("masters", "compute=float16 dtype=bfloat16", "dtype: .* with compute = float16, found bfloat16"),
    *(
        refused(f"{key} alone", f"{key}={text}", f"{key}: expected .* beside it, found")
        for key, text in {"memory.checkpoint_every": 2, "watch.activation_norms": "true", **SCALE}.items()
    ),
    refused("loss", f"memory.loss_chunk=64 {GPIPE}", "loss_chunk: .* 0 with layout.schedule=gpipe, or 1f1b"),
    # As other trainers write them.
    refused("learning rate", "optimizer.learning_rate=1", r"Nearest: optimizer\.lr$"),
    refused("batch size", "data.batch_size=1", r"Nearest: data\.global_batch$"),
    *(
        refused(f"{key}={text!r}", f"{key}={json.dumps(text)}", rf"{key}\S*: expected .*a path, not empty")
        for key in PATHS
        for text in ("", "a\0b")
    ),
    refused_model("two models", LLAMA_1B | {"init_from": "x"}, "model.size: expected no init_from beside it"),
    refused_model("a config beside a size", LLAMA_1B | {"config": "a.json"}, "size: .* path in model.config"),
    refused_model("no size", {"size": "llama-3.2-2b"}, "model.size: .* a published size, .* llama-3.2-1b"),
    refused_model("no model", {}, "model: expected init_from, config, size or module"),
    refused_model("a key that a size does not read", LLAMA_1B | {"config": {"rope_thetta": 5e5}}, UNREAD),
    refused_model("a key that a config does not read", {"config": TINY_LLAMA | {"rope_thetta": 5e5}}, UNREAD),
    Refused("no file", lambda folder: load_recipe(folder / "a.toml"), r"a\.toml: .* a file, found nothing"),
    Refused("no recipe's name", lambda folder: load_recipe("zzz"), "neither. These come with trilith: gpt3"),
    Refused(
        "no TOML",
        lambda folder: load_recipe(folder / "bad.toml"),
        r"bad\.toml: expected TOML",
        given=lambda folder: (folder / "bad.toml").write_text("out = ["),
    ),
)


SMALL = {"vocab_size": 131, "num_hidden_layers": 2}


def recipe_of(tmp_path, model, **changes):
    return {**tiny_recipe(tmp_path / "run", tmp_path / "tokens", **changes), "model": model}


def test_fields_beside_a_size_replace_its_own_under_each_of_their_names(tmp_path):
    for fields in ({"n_layer": 3}, {"num_hidden_layers": 3}):
        model = parse_recipe(recipe_of(tmp_path, {"size": "gpt2", "config": fields})).model
        config = GPT2Config.from_hf(read_config(model))
        assert config == published_size("gpt2").config.model_copy(update={"num_hidden_layers": 3})


def test_a_run_says_which_keys_of_its_layout_do_nothing(tmp_path):
    write_tokens(tmp_path / "tokens")
    raw = tiny_recipe(tmp_path / "run", tmp_path / "tokens", steps=1, layout={"sequence": True})
    _, lines = run_parallel(run_and_listen, 1, raw)[0]
    assert lines.splitlines().count("layout.sequence has no effect with tensor = 1") == 1


def test_a_run_of_a_size_writes_every_field_into_its_checkpoints(tmp_path):
    write_tokens(tmp_path / "tokens")
    train(recipe_of(tmp_path, {"size": "smollm2-135m", "config": SMALL}, steps=1, dtype="float32"))
    source = read_source(tmp_path / "run")
    wanted = published_size("smollm2-135m")
    assert source.model_config == wanted.config.model_copy(update=SMALL)
    assert set(wanted.config.model_dump(exclude=set(type(wanted.config).HARMLESS))) <= {
        *source.config,
        "rope_scaling",
    }
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert {key: written[key] for key in wanted.fields} == {**wanted.fields, **SMALL}


@pytest.mark.parametrize("model", [{"size": "llama-3.2-1b"}, {"config": TINY_LLAMA}], ids=["size", "config"])
def test_keys_that_a_family_reads_or_knows_to_be_harmless_are_accepted(tmp_path, model):
    more = {"rope_theta": 5e5, "use_sliding_window": False, "bos_token_id": 1}
    config = {"config": model.get("config", {}) | more}
    assert read_config(parse_recipe(recipe_of(tmp_path, model | config)).model)["rope_theta"] == 5e5
