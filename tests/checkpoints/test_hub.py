"""Model ids: the hub's cache is used with its links, and what is not there is refused in one line."""

import os
from pathlib import Path

import huggingface_hub.constants
import pytest
from support.configs import TINY_LLAMA
from trilith.checkpoints import convert, differences, read_source
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadInput


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Make a hub cache with one model, laid out as huggingface_hub does, offline, and nothing else."""
    root = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repository, revision = root / "models--some--llama", "0" * 40
    write_hf_folder(tmp_path / "made", TINY_LLAMA, max_shard_size=30_000)
    snapshot, blobs = repository / "snapshots" / revision, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "made").iterdir())):
        path.rename(blobs / f"{number:040d}")
        os.symlink(f"../../blobs/{number:040d}", snapshot / path.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return snapshot


def test_a_model_in_the_cache_is_read_through_its_links(cache, tmp_path):
    assert read_source("some/llama").path == cache
    convert("some/llama", tmp_path / "out", tensor=2)
    assert not list(differences(read_source(cache), read_source(tmp_path / "out")))


def test_a_model_that_is_nowhere_is_refused_offline(cache):
    with pytest.raises(BadInput, match=r"some/other: expected a folder, or a model in .* cache") as refused:
        read_source("some/other")
    assert "not in the cache" in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_no_model_id_is_only_a_folder(cache):
    for name in ("missing", "./some/llama", "/some/llama", "some/llama/x", "../llama", "a/"):
        with pytest.raises(BadInput, match="no such folder"):
            read_source(name)


def test_a_folder_of_that_name_comes_first(cache, tmp_path):
    write_hf_folder(tmp_path / "some" / "llama", TINY_LLAMA)
    assert read_source("some/llama").path == Path("some/llama")
