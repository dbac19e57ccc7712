"""Hugging Face folders: what is read, what is refused before any tensor is; no pickle is ever opened."""

import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trilith.checkpoints import HFFolder
from trilith.parallel_state import BadInput

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
A, B, C = (torch.arange(4.0) + 10 * i for i in range(3))


@pytest.fixture
def sharded(tmp_path):
    """A good folder: tensors a and b in shard 1, c in shard 2."""
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    (root / "tokenizer.json").write_text("{}")
    (root / "README.md").write_text("a card")
    save_file({"a": A, "b": B}, root / ONE)
    save_file({"c": C}, root / TWO)
    write_index(root, {"a": ONE, "b": ONE, "c": TWO}, total=48)
    return root


def write_index(root, weight_map, total=48):
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def refusal(root):
    with pytest.raises(BadInput) as caught:
        HFFolder(root)
    message = str(caught.value)
    assert "\n" not in message and str(root) in message and caught.value.exit_code == 2
    return message


def test_a_sharded_folder(sharded):
    folder = HFFolder(sharded)
    assert folder.config == {"model_type": "llama", "hidden_size": 4}
    assert {name: file.path.name for name, (file, _) in folder.tensors.items()} == {
        "a": ONE,
        "b": ONE,
        "c": TWO,
    }
    file, entry = folder.tensors["c"]
    assert torch.equal(file.read("c"), C) and entry.shape == (4,)
    assert [path.name for path in folder.companions] == ["tokenizer.json"]
    assert folder.warnings == []


def test_a_single_file(sharded):
    for name in (INDEX, ONE, TWO):
        (sharded / name).unlink()
    save_file({"a": A}, sharded / SINGLE)
    assert list(HFFolder(sharded).tensors) == ["a"]


def no_shard(root):
    (root / TWO).unlink()


def index_of_text(text):
    return lambda root: void((root / INDEX).write_text(text))


def mapped(**changes):
    """Write the index with some entries changed; ``None`` removes one."""
    both = {"a": ONE, "b": ONE, "c": TWO} | changes
    return lambda root: write_index(root, {name: shard for name, shard in both.items() if shard is not None})


def void(_):
    return None


def escaping(name):
    """Move the shard out of the folder, and name it there in the index."""

    def make(root):
        (root / TWO).rename(root.parent / "out.safetensors")
        write_index(root, {"a": ONE, "b": ONE, "c": name.format(root=root.parent)})

    return make


def linked_out(root):
    (root / TWO).rename(root.parent / "out.safetensors")
    (root / TWO).symlink_to("../out.safetensors")


def twice(root):
    save_file({"b": B, "c": C}, root / TWO)


def more(root):
    save_file({"c": C, "extra": A}, root / TWO)


def both(root):
    save_file({"a": A}, root / SINGLE)


def only_pickle(root):
    for name in (ONE, TWO, INDEX):
        (root / name).unlink()
    (root / "pytorch_model.bin").write_bytes(b"pickle")


def only_other(root):
    (root / INDEX).unlink()


def case_twins(root):
    shutil.copy(root / ONE, root / ONE.upper().replace("SAFETENSORS", "safetensors"))
    write_index(root, {"a": ONE, "b": ONE.upper().replace("SAFETENSORS", "safetensors"), "c": TWO})


def huge_index(root):
    write_index(root, {f"t{i}": ONE for i in range(100_001)})


def larger_still(root):
    with open(root / INDEX, "wb") as file:
        file.truncate(100 << 20)


def no_config(root):
    (root / "config.json").unlink()


def config_of_text(text):
    return lambda root: void((root / "config.json").write_text(text))


def large_config(root):
    with open(root / "config.json", "wb") as file:
        file.truncate(50 << 20)


def linked_config(root):
    (root / "config.json").rename(root.parent / "config.json")
    (root / "config.json").symlink_to("../config.json")


def large_tokenizer(root):
    with open(root / "tokenizer.json", "wb") as file:
        file.truncate(2 << 30)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(no_shard, f"{TWO}: .*no such file", id="B1-missing-shard"),
        pytest.param(index_of_text("{"), "valid JSON", id="B2-index-not-JSON"),
        pytest.param(index_of_text('{"a": 1, "a": 1}'), "'a' twice", id="B2-index-duplicate-key"),
        pytest.param(index_of_text('{"metadata": {}}'), "weight_map", id="B3-no-weight-map"),
        pytest.param(index_of_text('{"weight_map": ["a"]}'), "weight_map", id="B4-weight-map-list"),
        pytest.param(index_of_text('{"weight_map": {}}'), "weight_map", id="B4-weight-map-empty"),
        pytest.param(mapped(c=7), "weight_map 'c'.*an? int", id="B4-value-not-string"),
        pytest.param(escaping("../out.safetensors"), "'c'.*plain file name", id="B5-parent"),
        pytest.param(escaping("{root}/out.safetensors"), "'c'.*plain file name", id="B6-absolute"),
        pytest.param(linked_out, "link to .*--allow-symlinks", id="B7-link-out"),
        pytest.param(mapped(c="x\0.safetensors"), "'c'.*plain file name", id="B8-NUL"),
        pytest.param(mapped(c="x\n.safetensors"), "'c'.*plain file name", id="B8-newline"),
        pytest.param(mapped(c="..\\x.safetensors"), "'c'.*plain file name", id="B8-backslash"),
        pytest.param(mapped(c=""), "'c'.*plain file name", id="B8-empty"),
        pytest.param(mapped(c="x" * 300 + ".safetensors"), "'c'.*plain file name", id="B8-too-long"),
        pytest.param(mapped(d=ONE), "'d': .*in none", id="B9-not-in-shard"),
        pytest.param(more, "'extra'.*no such entry", id="B10-not-in-index"),
        pytest.param(mapped(b=None), "'b'.*no such entry", id="B10-entry-left-out"),
        pytest.param(twice, "'b'.*in .*00001.* and .*00002", id="B11-in-two-shards"),
        pytest.param(both, "ambiguous", id="B12-index-and-single"),
        pytest.param(mapped(a=TWO, c=ONE), f"'a'.*expected it in {TWO}, found it in {ONE}", id="B13-swapped"),
        pytest.param(only_pickle, "pickle", id="B15-bin-only"),
        pytest.param(mapped(c="model.bin"), "'c'.*pickle", id="B15-bin-in-index"),
        pytest.param(only_other, "found only", id="B15-unnamed-shards"),
        pytest.param(huge_index, "at most 100,000", id="B17-index-of-too-many"),
        pytest.param(larger_still, "at most .* bytes", id="B17-index-too-large"),
        pytest.param(case_twins, "in more than case", id="B18-case"),
        pytest.param(no_config, "config.json.*no such file", id="D1-no-config"),
        pytest.param(config_of_text("{'a': 1}"), "config.json.*valid JSON", id="D2-not-JSON"),
        pytest.param(config_of_text("[]"), "config.json.*a list", id="D2-not-an-object"),
        pytest.param(large_config, "config.json.*at most", id="D2-50-MB"),
        pytest.param(config_of_text('{"x": NaN}'), "config.json.*NaN", id="D27-NaN"),
        pytest.param(config_of_text('{"x": 1e999}'), "config.json.*1e999", id="D27-overflow"),
        pytest.param(config_of_text('{"x": ' + "9" * 5000 + "}"), "config.json", id="D27-5000-digits"),
        pytest.param(linked_config, "config.json.*link to", id="B7-linked-config"),
        pytest.param(large_tokenizer, "tokenizer.json.*at most", id="F10-large-tokenizer"),
        pytest.param(lambda root: shutil.rmtree(root), "nothing there", id="B1-no-folder"),
    ],
)
def test_bad_folders_are_refused(sharded, spoil, says):
    spoil(sharded)
    with pytest.raises(BadInput, match=says):
        HFFolder(sharded)
    refusal(sharded)


def test_B7_links_that_are_trusted_and_links_inside(sharded):
    linked_out(sharded)
    assert "c" in HFFolder(sharded, allow_symlinks=True).tensors
    (sharded / TWO).unlink()
    (sharded / "inner").mkdir()
    (sharded.parent / "out.safetensors").rename(sharded / "inner" / "blob")
    (sharded / TWO).symlink_to("inner/blob")
    assert "c" in HFFolder(sharded).tensors


def test_B7_the_hugging_face_cache(sharded):
    cache = sharded.parent / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    folder = HFFolder(snapshot)
    assert sorted(folder.tensors) == ["a", "b", "c"] and len(folder.companions) == 1
    # a folder that merely looks like one gets no further than blobs/
    (sharded.parent / "secret").write_bytes((cache / "blobs" / "1").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../../secret")
    assert "link to" in refusal(snapshot)


def test_B14_total_size_that_disagrees_is_a_warning(sharded):
    write_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total=47)
    assert [w for w in HFFolder(sharded).warnings if "total_size says 47, the tensors have 48" in w]


def test_B19_a_count_in_the_names_that_disagrees_is_a_warning(sharded):
    save_file({"d": A}, sharded / "model-00003-of-00002.safetensors")
    assert [w for w in HFFolder(sharded).warnings if "not read: model-00003" in w]
    write_index(sharded, {"a": ONE, "b": ONE, "c": TWO, "d": "model-00003-of-00002.safetensors"}, total=64)
    assert [w for w in HFFolder(sharded).warnings if "-of-00002, but there are 3" in w]


OPENED = []


def watch(event, details):
    if event == "open" and OPENED is not None and isinstance(details[0], str | os.PathLike):
        OPENED.append(os.fspath(details[0]))


@cache
def add_watch():
    sys.addaudithook(watch)


@pytest.fixture
def opened():
    """Record every path that Python opens from here on. An audit hook stays for ever, so it is added once."""
    add_watch()
    OPENED.clear()
    yield OPENED
    OPENED.clear()


def test_B16_a_pickle_beside_the_weights_is_never_opened(sharded, opened):
    for name in ("pytorch_model.bin", "model.bin", "training_args.bin", "optimizer.pt", "custom.py"):
        (sharded / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    opened.clear()
    for file, entry in HFFolder(sharded).tensors.values():
        assert file.read(next(iter(file.tensors))).shape == entry.shape
    assert {Path(path).name for path in opened} == {"config.json", "tokenizer.json", INDEX, ONE, TWO}
