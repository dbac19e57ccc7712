"""A whole run on a device that is not there: it trains, evaluates, saves and resumes. Generation, too."""

import torch
from support.configs import TINIEST_LLAMA
from support.short_runs import tiny_recipe
from support.short_training import Case, build_rank
from trilith.checkpoints import Described, begin_moments, load
from trilith.checkpoints.rank_files import write_file
from trilith.checkpoints.saver import Contents, Saver
from trilith.generation import Sampling, generate
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import Layout
from trilith.recipes.recipe import parse_recipe
from trilith.simulation import WAITS, simulated_rank
from trilith.training.trainer import Trainer


def run(raw):
    """Run a recipe on one rank; the number of its steps."""
    with simulated_rank(Layout(), 0, WAITS) as (state, _):
        steps = []
        Trainer(parse_recipe(raw), state, quiet=True).run(steps.append)
        return len(steps)


def whole_run(folder):
    tokens = write_tokens(folder / "tokens")
    raw = tiny_recipe(
        folder / "run",
        tokens,
        steps=4,
        dtype="float32",
        compute="bfloat16",
        model={"config": TINIEST_LLAMA},
        data={"global_batch": 4, "prefetch": 1},
        evaluation={"tokens": str(tokens), "every": 2, "samples": 3},
        watch={"norms": 2},
    )
    assert run(raw | {"stop_after": 3}) == 3
    assert run(raw) == 1  # goes on from the checkpoint of the third
    newest = folder / "run/checkpoints/step-00000004"
    for layout in (Layout.of(tensor=2, data=2, zero=3), Layout.of(pipeline=2)):
        load_and_save(newest, layout, folder)


def load_and_save(checkpoint, layout, folder):
    """Load a checkpoint on the last rank of a layout, and write that rank's file of a new one."""
    with simulated_rank(layout, layout.world - 1, WAITS) as (state, _):
        parts = build_rank(Case(TINIEST_LLAMA, layout, dtype=torch.float32), state)
        begin_moments(parts.model, parts.optimizer)
        progress = load(checkpoint, parts.model, parts.optimizer)
        assert progress.step == 4
        contents = Contents(Described(parts.family, parts.config), TINIEST_LLAMA)
        saver = Saver(folder / str(layout), parts.model, parts.optimizer, contents)
        written = write_file(folder, state.rank, layout.world, 4, saver._own_tensors(), frozenset())
        assert written is not None and written[0].size > 1000


def text():
    for layout in (Layout(), Layout.of(tensor=2), Layout.of(pipeline=2)):
        with simulated_rank(layout, layout.world - 1, WAITS) as (state, _):
            model = build_rank(Case(TINIEST_LLAMA, layout, dtype=torch.float32), state).model
            prompts = [[1, 2, 3], [4]]
            for sampling in (Sampling(), Sampling(temperature=0.8, top_k=5, top_p=0.9)):
                rows = generate(model, prompts, max_new_tokens=3, sampling=sampling)
                assert [len(row) for row in rows] == [3, 3]
            generate(model, prompts, max_new_tokens=2, cached=False)


def test_a_run_starts_evaluates_saves_and_resumes(alone, tmp_path):
    alone(whole_run, tmp_path)


def test_text_is_generated_on_one_rank_and_on_several(alone):
    alone(text)
