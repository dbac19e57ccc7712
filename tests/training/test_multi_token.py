"""Runs with multi-token prediction: they train its blocks, save, export and start from them."""

import pytest
import torch
from support.configs import TINY_GLM, TINY_LLAMA
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from trilith.cli.app import run as command
from trilith.machine.random_files import write_tokens
from trilith.models import family_of
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.pipeline.runner import schedule_of_model
from trilith.recipes.recipe import parse_recipe
from trilith.training.run_plan import plan

SCRATCH = {"config": TINY_GLM, "mtp": 0.3}


def test_a_run_trains_its_blocks_and_another_layout_goes_on_from_the_export(tmp_path):
    tokens, first = write_tokens(tmp_path / "tokens"), tmp_path / "first"
    pipeline = {"pipeline": 2, "tensor": 1}
    train(tiny_recipe(first, tokens, model=SCRATCH, layout=pipeline, steps=2))
    assert command(["convert", str(first), str(tmp_path / "hf"), "--to", "hf"]) == 0
    start = {"config": None, "init_from": str(tmp_path / "hf"), "mtp": 0.3}
    for name, layout in (("alone", {}), ("pipeline", pipeline)):
        train(tiny_recipe(tmp_path / name, tokens, model=start, layout=layout, steps=2))
    begun, *ended = (whole_tensors(tmp_path / name) for name in ("first", "alone", "pipeline"))
    one, two = (losses(tmp_path / name)[-1] for name in ("alone", "pipeline"))
    assert one == pytest.approx(two, rel=1e-12)
    assert begun.keys() == ended[0].keys() == ended[1].keys()
    moved = [name for name in begun if name.startswith("mtp.") and not name.endswith("router.bias")]
    assert len(moved) > 15
    for name in moved:
        assert not (begun[name] == ended[0][name]).all(), name
        assert float((ended[0][name] - ended[1][name]).abs().max()) < 1e-12, name


@pytest.mark.parametrize(
    ("model", "words", "more"),
    [
        ({"config": TINY_LLAMA, "mtp": 0.3}, "absent: the model of .* has no blocks of multi-token", {}),
        ({"config": TINY_GLM | {"num_nextn_predict_layers": 0}, "mtp": 0.3}, "1 or more with mtp", {}),
        (SCRATCH, "gpipe, 1f1b or interleaved with", {"layout": {"pipeline": 2, "schedule": "zbv"}}),
        ({"config": TINY_GLM | {"mtp": True}}, r"a factor: .* has 1 blocks of multi-token prediction", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*mtp=True is unknown")  # Llama has no such field
def test_a_factor_and_blocks_come_together(model, words, more, tmp_path):
    raw = tiny_recipe(tmp_path / "run", tmp_path / "none") | {"model": model} | more
    with pytest.raises(BadInput, match=words):
        plan(parse_recipe(raw))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_nextn_predict_layers": 2}, "with 2 blocks"),
        ({"tie_word_embeddings": True}, "with a tied embedding"),
    ],
)
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved-zero-bubble"])
def test_what_a_backward_in_two_parts_would_go_through_twice_is_refused(fields, words, schedule):
    layout = Layout.of(pipeline=2, virtual_stages=2, v_shape=schedule != "interleaved-zero-bubble")
    family = family_of(TINY_GLM)
    config = family.from_hf(TINY_GLM | {"num_hidden_layers": 4, "mtp": True} | fields)
    model = family.build(config, state=ParallelState.stand_in(layout))
    with pytest.raises(BadInput) as error:
        schedule_of_model(
            model, lambda a, b: a, name=schedule, microbatches=4, shape=(1, 8), dtype=torch.float32
        )
    said = str(error.value)
    assert said.startswith(
        f"layout: schedule: expected a whole backward, because multi-token prediction {words} uses the "
        f"embedding twice, found {schedule}. "
    )
    assert "\n" not in said
