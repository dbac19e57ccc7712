"""A checkpoint that is written can be read: what no checkpoint can hold is refused before the first step."""

import datetime
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import TINIEST_LLAMA
from support.draws import drawn
from support.forked import obey_permissions, run_forked
from support.inputs import saver_of
from support.refusals import Refused, refusals
from support.short_runs import run_recipe, tiny_recipe
from torch import nn
from trilith.checkpoints import (
    Manifest,
    Progress,
    Saver,
    contents_of,
    convert,
    describe_module,
    load,
    read_source,
    save,
)
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.storage import companions_in
from trilith.storage.disk import Disk, DiskFailed
from trilith.storage.file_names import MANIFEST
from trilith.storage.files_beside_weights import COMPANIONS
from trilith.storage.strict_json import StoredFile
from trilith.training import check_run

pytestmark = pytest.mark.usefixtures("group_of_one")


def nested(levels):
    value = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


UNREADABLE = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "date": datetime.date(2026, 1, 1),
    "time": datetime.datetime(2026, 1, 1),
    "half a surrogate pair": "a\ud800",
    "a key that is half a surrogate pair": {"\ud800": 1},
    "300 levels": nested(300),
    "100,000 levels": nested(100_000),
    "bytes": b"x",
    "a number of 16,000 bits": 1 << 16_000,
    "a key that is a number": {1: 2},
}

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
# Without what hypothesis cannot print.
printable = [value for name, value in UNREADABLE.items() if "levels" not in name and "16,000" not in name]
strange = st.sampled_from([*printable, 1 << 2000])
values = st.recursive(
    plain | strange | st.text(st.characters(), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def run_with_remark(value):
    """Return what runs a model whose config has this value, which no checkpoint can hold."""
    model = {"config": TINIEST_LLAMA | {"remark": value}}
    return lambda folder: run_recipe(tiny_recipe(folder / "run", folder / "tokens", model=model))


test_configs_that_no_checkpoint_can_hold_are_refused_before_the_first_step = refusals(
    Refused(
        f"{why}{' inside' * (value is not outer)}",
        run_with_remark(value),
        "remark|config",
        given=lambda folder: write_tokens(folder / "tokens"),
    )
    for why, outer in UNREADABLE.items()
    for value in (outer, {"inside": [{"inside": [outer]}]})
)


@settings(max_examples=drawn(40))
@given(value=values)
def test_what_save_takes_it_gives_back_and_else_it_writes_nothing(tmp_path_factory, value):
    root, model = tmp_path_factory.mktemp("saved") / "m", nn.Linear(2, 2)
    try:
        describe_module(model, config={"mine": [value]})
        written = save(root, model, extra={"mine": value})
    except BadInput:
        assert not root.exists() or not any(root.iterdir())
        with pytest.raises((BadInput, ValueError, TypeError, AssertionError, RecursionError)):
            again = json.loads(json.dumps(value, allow_nan=False).encode("utf-8", "strict"))
            json.dumps(again, ensure_ascii=False).encode()
            assert again == value
            assert abs(largest(value)).bit_length() <= 1024
    else:
        manifest = Manifest.load(written)
        assert manifest.config == {"mine": [value]}
        assert manifest.extra == {"mine": value} == load(root, model).extra


def test_a_saver_reads_its_manifest_back_before_the_first_step(tmp_path):
    """A manifest that names a file which may not be copied along is refused."""
    (tmp_path / "note.safetensors").touch()
    note = mock.Mock(stored=StoredFile(name="note.safetensors", size=0, crc32=0))
    unfit = mock.patch("trilith.checkpoints.saver.read_companions", return_value=[note])
    with unfit, pytest.raises(BadInput, match=r"companions: expected no weights, found 'note\.safetensors'"):
        saver_of(tmp_path / "new", nn.Linear(2, 2))


def test_a_manifest_that_reads_as_another_is_not_written(tmp_path):
    other = save(tmp_path / "other", nn.Linear(3, 2))
    read = mock.patch.object(Manifest, "parse", return_value=Manifest.load(other))
    with read, pytest.raises(BadInput, match="expected what was written, found something else"):
        save(tmp_path / "m", nn.Linear(2, 2))


def test_what_the_disk_does_not_give_back_is_not_committed(tmp_path):
    write = Disk.write_file

    def forgetful(disk, path, data):
        write(disk, path, data[:-1] if MANIFEST in path.name else data)

    with mock.patch.object(Disk, "write_file", forgetful), pytest.raises(DiskFailed, match="read back"):
        save(tmp_path, nn.Linear(2, 2), step=1)
    assert [*tmp_path.iterdir()] == []


def largest(value):
    if isinstance(value, dict):
        return max(map(largest, value.values()), default=0)
    if isinstance(value, list):
        return max(map(largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def test_convert_refuses_a_name_of_another_step_for_its_output(tmp_path):
    model = nn.Linear(2, 2)
    save(tmp_path / "m", model, torch.optim.AdamW(model.parameters()), step=3)
    with pytest.raises(BadInput, match="step: expected 9, as the directory is named"):
        convert(tmp_path / "m", tmp_path / "step-00000009", to="sharded")
    assert not (tmp_path / "step-00000009").exists()


def tokenizer_folder(folder):
    folder.mkdir()
    for name in COMPANIONS:
        (folder / name).write_text("{}")
    return folder


NO_COMPANIONS = [
    *("tokenizer.pkl", "tokenizer.py", "tokenization_mine.py", "vocab.pickle", "tokenizer.safetensors"),
    *("vocab.safetensors", "Tokenizer.json", "tokenizer\n.json", "tokenizer.json.bak", "vocab.bin"),
    "chat_template.sh",
]


def test_files_that_are_no_companions_stay_where_they_are(tmp_path, tokens):
    folder = tokenizer_folder(tmp_path / "tokenizer")
    for name in NO_COMPANIONS:
        (folder / name).write_text("secret")
    model = {"config": TINIEST_LLAMA, "tokenizer": str(folder)}
    run_recipe(tiny_recipe(tmp_path / "run", tokens, steps=1, model=model))
    source = read_source(tmp_path / "run")
    assert sorted(path.name for path in source.companions) == list(COMPANIONS)
    assert not {*NO_COMPANIONS} & {path.name for path in source.path.iterdir()}


@pytest.mark.parametrize("command", ["train", "convert"])
def test_a_link_out_of_the_folder_is_refused_and_nothing_is_copied(tmp_path, tokens, command):
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    (tmp_path / "hf" / "vocab.txt").symlink_to(secret)
    with pytest.raises(BadInput, match=r"vocab\.txt: expected a file inside the directory"):
        if command == "convert":
            convert(tmp_path / "hf", tmp_path / "out")
        else:
            model = {"config": TINIEST_LLAMA, "tokenizer": str(tmp_path / "hf")}
            run_recipe(tiny_recipe(tmp_path / "out", tokens, steps=1, model=model))
    assert not [*tmp_path.glob("out/**/vocab.txt"), *tmp_path.glob("out/metrics.jsonl")]


@pytest.mark.parametrize("given", ["tokenizer", "init_from a HF folder", "init_from a checkpoint"])
def test_a_companion_that_may_not_be_read_is_refused_before_the_run_makes_anything(tmp_path, tokens, given):
    folder = tmp_path / "given"
    write_hf_folder(folder, TINIEST_LLAMA)
    (folder / "vocab.txt").write_text("a")
    if given == "init_from a checkpoint":
        convert(folder, tmp_path / "sharded")
        folder = tmp_path / "sharded"
    (folder / "vocab.txt").chmod(0)
    tokenizer = {"config": TINIEST_LLAMA, "tokenizer": str(folder)}
    model = tokenizer if given == "tokenizer" else {"config": None, "init_from": str(folder)}
    recipe = parse_recipe(tiny_recipe(tmp_path / "out", tokens, model=model))

    def work():
        obey_permissions()
        with pytest.raises(BadInput, match=r"vocab\.txt: expected a readable file"):
            check_run(recipe)
        return 7

    assert run_forked(work, tmp_path, limit=60).code == 7


def test_the_docs_name_every_companion():
    docs = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    assert re.findall(
        r"`([a-z_]+\.[a-z]+)`", docs.split("Companions are copied by name:")[1].split("No other")[0]
    ) == [*COMPANIONS]


def test_a_tokenizer_that_changes_during_the_run_is_saved_as_it_was_at_the_start(tmp_path, tokens):
    """It may even be gone by then: the run keeps the files that it began with, and its last save succeeds."""
    folder, model = tokenizer_folder(tmp_path / "tokenizer"), nn.Linear(2, 2)
    contents = contents_of(model, None, state=ParallelState.alone())
    contents = replace(contents, companions=companions_in(folder))
    with Saver(tmp_path / "m", model, None, contents, state=ParallelState.alone()) as saver:
        for path in folder.iterdir():
            path.unlink()
        saver.save(Progress(1, Layout()))
    assert (read_source(tmp_path / "m").path / "tokenizer.json").read_text() == "{}"
