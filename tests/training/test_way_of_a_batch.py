"""From `trilith train` to `optimizer.step` a batch passes few files, and CONTRIBUTING.md draws them."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import trilith
from support.pages import Page
from support.short_runs import tiny_recipe
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_parallel
from trilith.training import Callback, Trainer

ROOT = Path(trilith.__path__[0]).resolve()
MOST = 9

#: The model's own arithmetic, and what a rank is; the drawing names some of their files.
ROOMS = ("layers/", "models/", "parallel_state/")

#: Files that a step also enters, and why the drawing leaves them out.
HELPERS = {
    "data/sample_order.py": "numbers: which row of which token file comes next",
    "data/token_file.py": "reads the ids of a row",
    "data/token_sums.py": "compares bytes that are read with their checksums",
    "training/optimizer.py": "sets the learning rate",
    "system/errors.py": "checks, whose refusals are written there",
    "training/loss.py": "whether a function is a loss, asked of a user's",
    "training/learning_rate.py": "the step's learning rate",
    "training/callbacks.py": "measurements, which change nothing",
    "training/precision.py": "the weights' copies in another dtype, of which this run has none",
    "training/samples.py": "cuts rows over context ranks, of which there is one",
}


class Watch(Callback):
    """Note the package's files that the second step enters, until the optimizer steps; imports are done."""

    def __init__(self):
        self.files = set()

    @contextmanager
    def around(self, number):
        if number == 1:
            sys.settrace(self.enter)
        yield

    def enter(self, frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            self.files.add(str(file.relative_to(ROOT)))


def entered(raw):
    recipe, watch = parse_recipe(raw), Watch()
    trainer = Trainer(recipe, ParallelState.start(recipe.layout), quiet=True, callbacks=[watch])
    trainer.optimizer.register_step_pre_hook(lambda *arguments: sys.settrace(None))
    trainer.run()
    return watch.files


def test_a_batch_passes_the_stations_that_are_drawn_and_they_are_few(tmp_path):
    raw = tiny_recipe(tmp_path / "out", write_tokens(tmp_path / "tokens"), steps=2, data={"prefetch": 0})
    (files,) = run_parallel(entered, 1, raw)
    (drawing,) = re.findall(
        r"## The way of a batch.*?```\n(.*?)```", Page.read("CONTRIBUTING.md").text, re.DOTALL
    )
    drawn = re.findall(r"\S+\.py", drawing)
    stations = {file for file in files if not file.startswith(ROOMS)}
    assert {file for file in drawn if not file.startswith(ROOMS)} == stations - HELPERS.keys()
    assert {*drawn} <= files and HELPERS.keys() <= stations
    assert len(stations - HELPERS.keys()) <= MOST
