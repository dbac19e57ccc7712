"""Recipes: what they accept, and one line for what they do not."""

import json

import pytest
from trilith.parallel_state import BadInput
from trilith.recipes import load_recipe

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


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_overrides_are_toml_values_and_bare_words(recipe):
    loaded = load_recipe(
        recipe,
        ["layout.tensor=2", "layout.split=[1, 2]", "out=other/run", "optimizer.lr=1e-4", "stop_after=3"],
    )
    assert (loaded.layout.tensor, loaded.split, loaded.out) == (2, [1, 2], "other/run")
    assert (loaded.optimizer.lr, loaded.stop_after) == (1e-4, 3)


def test_zero_puts_the_data_ranks_on_the_right_axis(recipe):
    plain = load_recipe(recipe, ["layout.data=4"]).layout
    sharded = load_recipe(recipe, ["layout.data=4", "layout.zero=2", "layout.data_replicate=2"]).layout
    assert (plain.data_replicate, plain.data_shard) == (4, 1)
    assert (sharded.data_replicate, sharded.data_shard) == (2, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("stepz=1", r"stepz: expected a known key", id="unknown-key"),
        pytest.param("data.batch=1", r"data\.batch: expected a known key", id="unknown-key-inside"),
        pytest.param("steps=ten", r"steps: .*found 'ten'", id="not-a-number"),
        pytest.param("steps=0", r"steps", id="E11-zero"),
        pytest.param("layout.tensor=-1", r"layout\.tensor", id="E11-negative"),
        pytest.param("layout.zero=4", r"layout\.zero", id="E14-zero-stage"),
        pytest.param(
            "layout.data=3", r"data\.global_batch: expected a multiple of data=3", id="E13-global-batch"
        ),
        pytest.param(
            "layout.pipeline=16", r"micro-batches a step: expected at least 16 with 1f1b", id="E12-few"
        ),
        pytest.param("optimizer.decay=3", r"optimizer\.decay: expected schedule", id="decay-of-no-wsd"),
        pytest.param("optimizer.scale_lr=sqrt", r"scale_lr and reference_batch together", id="half-a-rule"),
        pytest.param("loss_scale.initial=1000", r"expected a power of two, found 1000", id="loss-scale"),
        pytest.param("loss_scale.initial=0.5", r"between minimum=1 and", id="loss-scale-range"),
        pytest.param("optimizer.clip=-1", r"optimizer\.clip", id="clip"),
        pytest.param("nonsense", r"expected key=value", id="no-value"),
        pytest.param("steps.more=1", r"expected a section", id="not-a-section"),
    ],
)
def test_what_is_wrong_is_named(recipe, override, message):
    with pytest.raises(BadInput, match=message) as error:
        load_recipe(recipe, [override])
    assert "\n" not in str(error.value)


def test_sequence_parallelism_needs_a_sequence_that_divides_E9(recipe):
    with pytest.raises(BadInput, match=r"data\.sequence_length: expected a multiple of tensor=4"):
        load_recipe(recipe, ["layout.tensor=4", "layout.sequence=true", "data.sequence_length=30"])


def test_context_ranks_need_a_sequence_of_as_many_pairs_of_chunks_E7(recipe):
    assert load_recipe(recipe, ["layout.context=4"]).layout.context == 4
    with pytest.raises(BadInput) as error:
        load_recipe(recipe, ["layout.context=4", "data.sequence_length=30"])
    assert "sequence_length: expected a multiple of 2 x context=4, found 30" in str(error.value)
    assert str(error.value).endswith("Nearest legal data.sequence_length: 24 or 32")
    ring = load_recipe(recipe, ["layout.context=2", "layout.ring=true"])
    assert ring.layout.ring
    with pytest.raises(BadInput, match=r"layout\.ring: expected a valid boolean, found 'circle'"):
        load_recipe(recipe, ["layout.ring=circle"])


def test_a_recipe_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"none\.toml: expected a file, found nothing"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("out = [")
    with pytest.raises(BadInput, match=r"bad\.toml: expected TOML"):
        load_recipe(tmp_path / "bad.toml")


def test_a_last_phase_must_fit_between_warmup_and_end(recipe):
    wsd = ["optimizer.schedule=wsd", "optimizer.warmup=7"]
    assert load_recipe(recipe, [*wsd, "optimizer.decay=3"]).optimizer.decay == 3
    with pytest.raises(BadInput, match=r"optimizer\.decay: expected at most the 3 steps after the warm-up"):
        load_recipe(recipe, [*wsd, "optimizer.decay=4"])


def test_fp16_keeps_masters_that_hold_what_it_cannot(recipe):
    assert load_recipe(recipe, ["compute=float16"]).dtype == "float32"
    with pytest.raises(BadInput, match=r"dtype: expected float32 with compute = float16, found bfloat16"):
        load_recipe(recipe, ["compute=float16", "dtype=bfloat16"])


def test_clipping_is_turned_off_by_zero_or_its_name(recipe):
    assert load_recipe(recipe, ["optimizer.clip=none"]).optimizer.clip == 0.0
    assert load_recipe(recipe, ["optimizer.clip=0"]).optimizer.clip == 0.0


@pytest.mark.parametrize(
    ("idle", "beside"),
    [
        ("memory.checkpoint_every=2", "memory.checkpointing=every"),
        ("watch.activation_norms=true", "watch.norms=5"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(recipe, idle, beside):
    with pytest.raises(BadInput, match=f"{idle.split('=')[0]}: expected .* beside it, found"):
        load_recipe(recipe, [idle])
    load_recipe(recipe, [beside])
    load_recipe(recipe, [idle, beside])


PATHS = [
    *("out", "model.init_from", "model.config", "model.tokenizer", "data.tokens", "evaluation.tokens"),
    "lora.init_from",
]


@pytest.mark.parametrize("text", ["", "a\0b"], ids=["empty", "NUL"])
@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_names_no_file_is_refused_by_its_key(recipe, key, text):
    with pytest.raises(BadInput, match=rf"{key.replace('.', '[.]')}\S*: expected .*a path, not empty"):
        load_recipe(recipe, [f"{key}={json.dumps(text)}"])
