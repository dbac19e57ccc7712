"""From a Hugging Face folder to a rank and to a checkpoint, as CONTRIBUTING.md draws the way of a weight."""

import re
import sys
from pathlib import Path
from unittest import mock

import trilith
from support.configs import TINIEST_LLAMA
from support.families import family_and_config
from support.pages import Page
from trilith.checkpoints import convert, load, save
from trilith.checkpoints.convert import plan
from trilith.machine.random_files import write_hf_folder
from trilith.models.base import family as family_module
from trilith.storage import output_places, safetensors_reader

ROOT = Path(trilith.__path__[0]).resolve()

#: Files of `checkpoints/` that the drawing leaves out: they name a user's module, find and check what is
#: there, say what a manifest may, and do what comes after a save.
HELPERS = {
    *("described", "user_module_family", "find", "verify"),
    *("mirror", "manifest_checks", "stored_tensor"),
}


def entered(work):
    """Return the package's files that are entered while ``work`` runs."""
    files = set()
    family_module._links.cache_clear()  # else the links are those that an earlier test made

    def enter(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            files.add(str(file.relative_to(ROOT)))

    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(None)
    return files


def test_a_weight_passes_the_stations_that_are_drawn(tmp_path):
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    family, config = family_and_config(TINIEST_LLAMA)
    model = family.build(config, device="cpu")
    (drawing,) = re.findall(
        r"## The way of a weight.*?```\n(.*?)```", Page.read("CONTRIBUTING.md").text, re.DOTALL
    )
    others = set()
    works = {"load": lambda: load(tmp_path / "hf", model), "save": lambda: save(tmp_path / "run", model)}
    for (name, work), part in zip(works.items(), drawing.split("\n\n"), strict=True):
        files, drawn = entered(work), {*re.findall(r"\S+\.py", part)}
        assert drawn <= files, f"{name} does not enter {drawn - files}"
        others |= {Path(file).stem for file in files - drawn if file.startswith("checkpoints/")}
    assert others == HELPERS


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
