"""Hugging Face's folders and ids: what is read, refused first, and written; no pickle is ever opened."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support.configs import TINY_LLAMA, config
from support.damage import audited
from support.families import transformers_model
from support.refusals import Refused, refusals
from support.round_trips import assert_same
from transformers import AutoModelForCausalLM
from trilith.checkpoints import HFFolder, convert, differences, read_source
from trilith.checkpoints.convert import plan
from trilith.checkpoints.hugging_face.writer import plan_shards
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadInput

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
A, B, C = (torch.arange(4.0) + 10 * i for i in range(3))


def write_sharded(root):
    """Write a good folder: tensors a and b in shard 1, c in shard 2."""
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    (root / "tokenizer.json").write_text("{}")
    (root / "README.md").write_text("a card")
    save_file({"a": A, "b": B}, root / ONE)
    save_file({"c": C}, root / TWO)
    write_index(root, {"a": ONE, "b": ONE, "c": TWO}, total=48)
    return root


@pytest.fixture
def sharded(tmp_path):
    return write_sharded(tmp_path / "model")


def write_index(root, weight_map, total=48):
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def text(name, content):
    return lambda root: (root / name).write_text(content)


def of_size(name, size):
    return lambda root: [(root / name).unlink(), (root / name).touch(), os.truncate(root / name, size)]


def mapped(**changes):
    """Write the index with some entries changed; ``None`` removes one."""
    both = {"a": ONE, "b": ONE, "c": TWO} | changes
    return lambda root: write_index(root, {name: shard for name, shard in both.items() if shard is not None})


def shard_two(**tensors):
    return lambda root: save_file(tensors, root / TWO)


def escaping(name):
    """Move the shard out of the folder, and name it there in the index."""

    def make(root):
        (root / TWO).rename(root.parent / "out.safetensors")
        write_index(root, {"a": ONE, "b": ONE, "c": name.format(root=root.parent)})

    return make


def linked_out(root):
    (root / TWO).rename(root.parent / "out.safetensors")
    (root / TWO).symlink_to("../out.safetensors")


def linked_config(root):
    (root / CONFIG).rename(root.parent / CONFIG)
    (root / CONFIG).symlink_to(f"../{CONFIG}")


def case_twins(root):
    twin = ONE.upper().replace("SAFETENSORS", "safetensors")
    shutil.copy(root / ONE, root / twin)
    write_index(root, {"a": ONE, "b": twin, "c": TWO})


def refused(why, spoil, says):
    return Refused(
        why, lambda folder: HFFolder(folder / "model"), says,
        given=lambda folder: spoil(write_sharded(folder / "model")),
    )  # fmt: skip


NOT_PLAIN = "'c'.*plain file name"
test_bad_folders_are_refused = refusals(
    refused("B1-missing-shard", lambda root: (root / TWO).unlink(), f"{TWO}: .*no such file. Copy"),
    refused("B1-no-folder", lambda root: shutil.rmtree(root), "nothing there"),
    refused("B2-index-not-JSON", text(INDEX, "{"), "valid JSON"),
    refused("B2-index-duplicate-key", text(INDEX, '{"a": 1, "a": 1}'), "'a' twice"),
    refused("B3-no-weight-map", text(INDEX, '{"metadata": {}}'), "weight_map"),
    refused("B4-weight-map-list", text(INDEX, '{"weight_map": ["a"]}'), "weight_map"),
    refused("B4-weight-map-empty", text(INDEX, '{"weight_map": {}}'), "weight_map"),
    refused("B4-value-not-string", mapped(c=7), "weight_map 'c'.*an? int"),
    refused("B5-parent", escaping("../out.safetensors"), NOT_PLAIN),
    refused("B6-absolute", escaping("{root}/out.safetensors"), NOT_PLAIN),
    refused("B7-link-out", linked_out, "link to .*convert --allow-symlinks"),
    refused("B7-linked-config", linked_config, r"config\.json.*link to"),
    refused("B8-NUL", mapped(c="x\0.safetensors"), NOT_PLAIN),
    refused("B8-newline", mapped(c="x\n.safetensors"), NOT_PLAIN),
    refused("B8-backslash", mapped(c="..\\x.safetensors"), NOT_PLAIN),
    refused("B8-empty", mapped(c=""), NOT_PLAIN),
    refused("B8-too-long", mapped(c="x" * 300 + ".safetensors"), NOT_PLAIN),
    refused("B9-not-in-shard", mapped(d=ONE), "'d': .*in none"),
    refused("B10-not-in-index", shard_two(c=C, extra=A), "'extra'.*no such entry"),
    refused("B10-entry-left-out", mapped(b=None), "'b'.*no such entry"),
    refused("B11-in-two-shards", shard_two(b=B, c=C), "'b'.*in .*00001.* and .*00002"),
    refused("B12-index-and-single", lambda root: save_file({"a": A}, root / SINGLE), "ambiguous"),
    refused("B13-swapped", mapped(a=TWO, c=ONE), f"'a'.*expected it in {TWO}, found it in {ONE}"),
    refused(
        "B15-bin-only",
        lambda root: [
            *((root / name).unlink() for name in (ONE, TWO, INDEX)),
            (root / "pytorch_model.bin").write_bytes(b"pickle"),
        ],
        "pickle",
    ),
    refused("B15-bin-in-index", mapped(c="model.bin"), "'c'.*pickle"),
    refused(
        "B15-a-variant",
        lambda root: (root / INDEX).rename(root / "model.safetensors.index.fp16.json"),
        r"Rename the variant model\.safetensors\.index\.fp16\.json to model\.safetensors\.index\.json",
    ),
    refused("B15-unnamed-shards", lambda root: (root / INDEX).unlink(), "found only .*Copy here"),
    refused("B17-index-of-too-many", mapped(**{f"t{i}": ONE for i in range(100_001)}), "at most 100,000"),
    refused("B17-index-too-large", of_size(INDEX, 100 << 20), "at most .* bytes"),
    refused("B18-case", case_twins, "in more than case"),
    refused("D1-no-config", lambda root: (root / CONFIG).unlink(), "config.json.*no such file. Name"),
    refused("D2-not-JSON", text(CONFIG, "{'a': 1}"), "config.json.*valid JSON"),
    refused("D2-not-an-object", text(CONFIG, "[]"), "config.json.*a list"),
    refused("D2-50-MB", of_size(CONFIG, 50 << 20), "config.json.*at most"),
    refused("F10-a tokenizer of gigabytes", of_size("tokenizer.json", 2 << 30), r"tokenizer\.json.*at most"),
    refused("D27-NaN", text(CONFIG, '{"x": NaN}'), "config.json.*NaN"),
    refused("D27-overflow", text(CONFIG, '{"x": 1e999}'), "config.json.*1e999"),
    refused("D27-in-no-float", text(CONFIG, '{"x": ' + "9" * 310 + "}"), "config.json.*of 310 digits"),
)


def test_B7_links_that_are_trusted_and_links_inside(sharded):
    linked_out(sharded)
    assert "c" in HFFolder(sharded, allow_symlinks=True).catalog
    (sharded / TWO).unlink()
    (sharded / "inner").mkdir()
    (sharded.parent / "out.safetensors").rename(sharded / "inner" / "blob")
    (sharded / TWO).symlink_to("inner/blob")
    assert "c" in HFFolder(sharded).catalog


def move_into_cache(folder, repository):
    """Lay a folder out as huggingface_hub does; return the folder of links."""
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_B7_the_hugging_face_cache(sharded):
    cache = sharded.parent / "hub" / "models--org--name"
    snapshot = move_into_cache(sharded, cache)
    folder = HFFolder(snapshot)
    assert sorted(folder.catalog) == ["a", "b", "c"] and len(folder.companions) == 1
    # a folder that merely looks like one gets no further than blobs/
    (sharded.parent / "secret").write_bytes((cache / "blobs" / "1").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../../secret")
    with pytest.raises(BadInput, match="link to"):
        HFFolder(snapshot)


def test_B14_B19_the_map_of_an_index_alone_says_which_files_are_read(sharded):
    save_file({"d": A}, sharded / "model-00003-of-00002.safetensors")
    write_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total=47)
    assert {*HFFolder(sharded).catalog} == {"a", "b", "c"}


def test_B16_a_pickle_beside_the_weights_is_never_opened(sharded):
    for name in ("pytorch_model.bin", "model.bin", "training_args.bin", "optimizer.pt", "custom.py"):
        (sharded / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with audited("open") as events:
        for tensor in HFFolder(sharded).catalog.values():
            assert tensor.read().shape == tensor.shape
    names = {Path(path).name for _, (path, *_) in events if not isinstance(path, int)}
    assert names == {"config.json", "tokenizer.json", INDEX, ONE, TWO}


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """Make a hub cache with one model, laid out as huggingface_hub does, offline, and nothing else."""
    root = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write_hf_folder(tmp_path / "made", TINY_LLAMA, max_shard_size=30_000)
    repository = root / "models--some--llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return move_into_cache(tmp_path / "made", repository)


def test_a_model_in_the_cache_is_read_through_its_links(snapshot, tmp_path):
    assert read_source("some/llama").path == snapshot
    convert("some/llama", tmp_path / "out", tensor=2)
    assert not list(differences(read_source(snapshot), read_source(tmp_path / "out")))


def test_a_model_that_is_nowhere_is_refused_offline(snapshot):
    with pytest.raises(BadInput, match=r"some/other: expected a folder, or a model in .* cache") as refused:
        read_source("some/other")
    assert "not in the cache" in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_no_model_id_is_only_a_folder(snapshot, tmp_path):
    (tmp_path / "out").mkdir()
    ids = ("missing", "./some/llama", "/some/llama", "some/llama/x", "../llama", "a/", "out/sharded")
    for name in ids:
        with pytest.raises(BadInput, match="no such folder"):
            read_source(name)


def test_a_folder_of_that_name_comes_first(snapshot, tmp_path):
    write_hf_folder(tmp_path / "some" / "llama", TINY_LLAMA)
    assert read_source("some/llama").path == Path("some/llama")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(4, 80))
def test_shards_are_cut_as_hugging_face_cuts_them(rows, most):
    state = {f"t{i}": torch.zeros(n, 2) for i, n in enumerate(rows)}
    theirs = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=most
    )
    ours = plan_shards({name: ("F32", tuple(t.shape)) for name, t in state.items()}, most)
    assert ours == theirs.filename_to_tensors


@pytest.mark.parametrize("most", [30_000, 10**9])
def test_transformers_reads_what_is_written(tmp_path, monkeypatch, most):
    """The files and their index are those that transformers writes."""
    model = transformers_model(config("tiny_llama", tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=most)
    monkeypatch.setattr(plan, "plan_shards", partial(plan_shards, max_shard_size=most))
    convert(tmp_path / "theirs", tmp_path / "out", to="hf")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())
    indexes = [json.loads(path.read_text()) for path in tmp_path.glob(f"*/{INDEX}")]
    assert len(indexes) == (2 if most == 30_000 else 0)
    for index in indexes:
        assert index["metadata"] == indexes[0]["metadata"]
        assert index["weight_map"].keys() == indexes[0]["weight_map"].keys()
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
