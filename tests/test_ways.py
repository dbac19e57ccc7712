"""A batch and a weight pass few files on their ways, which CONTRIBUTING.md draws."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import trilith
from support.configs import TINIEST_LLAMA
from support.families import family_and_config
from support.pages import Page
from support.short_runs import tiny_recipe
from trilith.checkpoints import convert, load, save
from trilith.checkpoints.convert import plan
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models.base import family as family_module
from trilith.parallel_state import ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.storage import output_places, safetensors_reader
from trilith.testing import run_parallel
from trilith.training import Callback, Trainer

ROOT = Path(trilith.__path__[0]).resolve()
MOST = 9

#: The model's own arithmetic, and what a rank is; the drawing names some of their files.
ROOMS = ("layers/", "models/", "parallel_state/")

#: Files that a step also enters, and why the drawing leaves them out.
OF_BATCHES = {
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
#: Files of `checkpoints/` that the drawing leaves out: they name a user's module, find and check what is
#: there, say what a manifest may, and do what comes after a save.
OF_WEIGHTS = {
    *("described", "user_module_family", "find", "verify"),
    *("mirror", "manifest_checks", "stored_tensor"),
}


def entering(files):
    """Return what notes the package's files that are entered, for ``sys.settrace``."""

    def enter(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            files.add(str(file.relative_to(ROOT)))

    return enter


def drawing_of(way):
    heading = rf"## The way of a {way}.*?```\n(.*?)```"
    (drawing,) = re.findall(heading, Page.read("CONTRIBUTING.md").text, re.DOTALL)
    return drawing


class Watch(Callback):
    """Note the files that the second step enters, until the optimizer steps; imports are done."""

    def __init__(self):
        self.files = set()

    @contextmanager
    def around(self, number):
        if number == 1:
            sys.settrace(entering(self.files))
        yield


def entered_by_a_step(raw):
    recipe, watch = parse_recipe(raw), Watch()
    trainer = Trainer(recipe, ParallelState.start(recipe.layout), quiet=True, callbacks=[watch])
    trainer.optimizer.register_step_pre_hook(lambda *arguments: sys.settrace(None))
    trainer.run()
    return watch.files


def test_a_batch_passes_the_stations_that_are_drawn_and_they_are_few(tmp_path):
    raw = tiny_recipe(tmp_path / "out", write_tokens(tmp_path / "tokens"), steps=2, data={"prefetch": 0})
    (files,) = run_parallel(entered_by_a_step, 1, raw)
    drawn = re.findall(r"\S+\.py", drawing_of("batch"))
    stations = {file for file in files if not file.startswith(ROOMS)}
    assert {file for file in drawn if not file.startswith(ROOMS)} == stations - OF_BATCHES.keys()
    assert {*drawn} <= files and OF_BATCHES.keys() <= stations
    assert len(stations - OF_BATCHES.keys()) <= MOST


def test_a_weight_passes_the_stations_that_are_drawn(tmp_path):
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    family, config = family_and_config(TINIEST_LLAMA)
    model, others = family.build(config, device="cpu"), set()
    works = {"load": lambda: load(tmp_path / "hf", model), "save": lambda: save(tmp_path / "run", model)}
    for (name, work), part in zip(works.items(), drawing_of("weight").split("\n\n"), strict=True):
        family_module._links.cache_clear()  # else the links are those that an earlier test made
        files, drawn = set(), {*re.findall(r"\S+\.py", part)}
        sys.settrace(entering(files))
        try:
            work()
        finally:
            sys.settrace(None)
        assert drawn <= files, f"{name} does not enter {drawn - files}"
        others |= {Path(file).stem for file in files - drawn if file.startswith("checkpoints/")}
    assert others == OF_WEIGHTS


def test_a_conversion_parses_each_header_once_plans_shards_once_and_checks_its_place_once(tmp_path):
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    convert(tmp_path / "hf", tmp_path / "cut", tensor=2)
    parsing = mock.patch.object(safetensors_reader, "parse_header", wraps=safetensors_reader.parse_header)
    planning = mock.patch.object(plan, "plan_shards", wraps=plan.plan_shards)
    placing = mock.patch.object(output_places, "check_outside", wraps=output_places.check_outside)
    with parsing as parse, planning as plan_once, placing as place_once:
        convert(tmp_path / "cut", tmp_path / "back", to="hf")
    parsed = [call.args[2].name for call in parse.call_args_list]
    assert len(parsed) == len({*parsed}) == 2 and plan_once.call_count == 1
    assert place_once.call_count == 1
