"""Weights and token files at a URL are copied to this host, whole or not at all, in bounded space."""

import errno
import os
import re
import shutil
import sys
import tomllib
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import trilith
from support.configs import TINIEST_LLAMA
from support.folders import contents
from trilith.checkpoints import convert, convert_to_dcp
from trilith.checkpoints.find import local_folder
from trilith.cli.app import run
from trilith.data import TokenFile
from trilith.data.token_file import names_tokens
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadInput
from trilith.storage import remote_folder as fetching
from trilith.storage.disk import Disk, DiskFailed, Hold
from trilith.storage.remote_folder import RemoteFailed, RemoteFolder, fetched
from trilith.system.addresses import as_url

pytestmark = pytest.mark.usefixtures("cache")


def put(url, folder):
    remote = RemoteFolder(url)
    for file in folder.iterdir():
        remote.copy(file, file.name)


def everything(name):
    return True


def test_a_model_at_a_url_is_converted_as_the_local_one_and_is_copied_once(tmp_path):
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    put("memory://models/tiny", tmp_path / "hf")
    RemoteFolder("memory://models/tiny").write("code.py", b"raise SystemExit")
    RemoteFolder("memory://models/tiny").write("pytorch_model.bin", b"a pickle")
    assert run(["convert", "memory://models/tiny", str(tmp_path / "there"), "--tensor", "2"]) == 0
    convert(tmp_path / "hf", tmp_path / "here", tensor=2)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    copy = local_folder("memory://models/tiny")
    assert copy.name == "tiny" and contents(copy) == contents(tmp_path / "hf"), "no code, no pickle"
    with mock.patch.object(RemoteFolder, "fetch", side_effect=AssertionError):
        assert local_folder(Path("memory://models/tiny")) == copy


@pytest.mark.parametrize(
    ("absent", "says"), [(1, "{}: expected the shard that "), (-1, ": expected model.safetensors or ")]
)
def test_a_folder_at_an_address_without_its_whole_index_is_refused_by_its_address(
    tmp_path, capfd, absent, says
):
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA, max_shard_size=20_000)
    put("memory://part/tiny", tmp_path / "hf")
    name = sorted(path.name for path in (tmp_path / "hf").glob("model*"))[absent]
    RemoteFolder("memory://part/tiny").remove(name)
    assert run(["convert", "memory://part/tiny", str(tmp_path / "out"), "--tensor", "2"]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: memory://part/tiny") and says.format(name) in told
    assert told.count("\n") == 1 and len(told) < 400 and not (tmp_path / "out").exists()


def test_a_token_file_at_a_url_gives_the_same_ids(tmp_path):
    here = TokenFile.open(write_tokens(tmp_path / "tokens" / "corpus"))
    write_tokens(tmp_path / "tokens" / "other")
    put("memory://data", tmp_path / "tokens")
    assert all(names_tokens(f"memory://data/corpus{suffix}") for suffix in ("", ".bin", ".json"))
    for name in ("memory://data/corpus", Path("memory://data/corpus.bin")):
        there = TokenFile.open(name)
        assert there.fingerprint == here.fingerprint
        assert (there.ids(0, 4000) == here.ids(0, 4000)).all()
    assert {path.name.partition(".")[0] for path in there.path.parent.iterdir()} == {"corpus"}


def test_a_file_that_has_changed_at_the_url_is_copied_anew():
    remote = RemoteFolder("memory://place")
    for text in (b"first", b"other"):
        remote.write("a", text)
        assert (fetched("memory://place", everything) / "a").read_bytes() == text


def test_a_fetch_that_is_killed_anywhere_leaves_a_whole_copy_or_none(
    tmp_path, monkeypatch, killed_at, end_use
):
    data = {"a": os.urandom(300), "b": os.urandom(150)}
    for name, text in data.items():
        RemoteFolder("memory://place").write(name, text)
    outcomes = set()
    for at in count(1):
        monkeypatch.setenv(fetching.CACHE, str(tmp_path / f"cache-{at}"))
        with killed_at(at) as operations:
            fetched("memory://place", everything)
        if len(operations) < at:
            break
        end_use()
        copies = [*(tmp_path / f"cache-{at}").glob("*/place")]
        outcomes.add(len(copies))
        for copy in copies:
            assert {path.name: path.read_bytes() for path in copy.iterdir()} == data, (at, operations)
        copy = fetched("memory://place", everything)
        assert {path.name: path.read_bytes() for path in copy.iterdir()} == data
        lock = {"place.tmp-lock"} if copies else set()  # of a kill after the rename: it goes with the copy
        assert {path.name for path in copy.parent.iterdir()} - lock == {"place"}, (at, operations)
    assert at > 10 and outcomes == {0, 1}
    assert {*operations} == {"create", "write", "sync", "rename", "make_directory", "sync_directory"}


def test_a_file_that_arrives_short_is_not_a_copy(cache):
    RemoteFolder("memory://place").write("a", b"1234")
    with (
        mock.patch.object(RemoteFolder, "fetch", lambda folder, name, target: target.write_bytes(b"123")),
        pytest.raises(RemoteFailed, match="a: expected 4 bytes, found 3"),
    ):
        fetched("memory://place", everything)
    with (
        mock.patch.object(Disk, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(DiskFailed, match="No space left"),
    ):
        fetched("memory://place", everything)
    assert not [*cache.glob("*/*")]


def test_a_copy_that_is_deleted_before_it_is_locked_is_fetched_again(cache, monkeypatch, end_use):
    RemoteFolder("memory://place").write("a", b"1234")
    copy = fetched("memory://place", everything)
    end_use()

    def late(target):
        monkeypatch.setattr(fetching, "hold", hold)
        shutil.rmtree(target)
        return Hold(os.open("/dev/null", os.O_RDONLY))

    hold = fetching.hold
    monkeypatch.setattr(fetching, "hold", late)
    assert fetched("memory://place", everything) == copy and (copy / "a").is_file()


def test_the_copy_unused_for_longest_makes_room_and_one_in_use_never_does(cache, monkeypatch, end_use):
    for name in "abcd":
        RemoteFolder(f"memory://{name}").write("file", bytes(1000))
    monkeypatch.setenv(fetching.CACHE_GB, "2.5e-6")
    for age, name in enumerate("ab"):
        os.utime(fetched(f"memory://{name}", everything), (age, age))
    with pytest.raises(
        BadInput, match=r"memory://c: expected .* found 2e-06 GB in use\. Set TRILITH_CACHE_GB"
    ):
        fetched("memory://c", everything)
    end_use()
    fetched("memory://c", everything)
    assert {path.name for path in cache.glob("*/*")} == {"b", "c"}
    fetched("memory://b", everything)
    end_use()
    os.utime(next(cache.glob("*/c")), (5, 5))
    fetched("memory://d", everything)
    assert {path.name for path in cache.glob("*/*")} == {"b", "d"}
    monkeypatch.setenv(fetching.CACHE_GB, "0.5e-6")
    with pytest.raises(BadInput, match="expected at most 5e-07 GB, as TRILITH_CACHE_GB says, found 1e-06 GB"):
        fetched("memory://a", everything)
    for setting in ("10 GB", "nan", "-1"):
        monkeypatch.setenv(fetching.CACHE_GB, setting)
        with pytest.raises(BadInput, match=f"TRILITH_CACHE_GB: expected a number .* found '{setting}'"):
            fetched("memory://a", everything)


@pytest.mark.parametrize("form", ["hf", "sharded", "dcp"])
def test_an_output_at_an_address_is_refused_before_anything_is_read(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    before = contents(tmp_path)
    write = convert_to_dcp if form == "dcp" else partial(convert, to=form)
    for address in ("s3://bucket/model", "memory://model", "file:///tmp/model", Path("s3://bucket/a")):
        said = re.escape(str(address).replace(":/b", "://b"))
        with pytest.raises(BadInput, match=f"^{said}: expected a path of this machine, found an address"):
            write("hf", address)
    assert contents(tmp_path) == before


def test_what_is_no_url_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "a/b.json", "/x", "file:///tmp/x", "c:/model", str(tmp_path / "s3:"), ""):
        assert as_url(name) is None and as_url(Path(name)) is None
    (tmp_path / "gs:" / "bucket" / "a").mkdir(parents=True)  # whatever lies here
    assert as_url(Path("gs://bucket/a")) == as_url("gs://bucket/a") == "gs://bucket/a"


def test_a_url_without_weights_or_without_a_store_is_one_line(capsys):
    for url, says in (
        ("memory://nothing", "expected a folder with files to read, found none"),
        ("nosuch://bucket", "expected a path, or a URL whose file system is installed"),
    ):
        assert run(["inspect", url]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {url}: {says}") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("s3://a/b", "s3fs", "s3"), ("gs://a/b", "gcsfs", "gcs")]
)
def test_a_store_s_package_that_is_not_installed_is_named_and_its_extra(monkeypatch, url, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=f"Install the extra {extra} of trilith, or: pip install {package}$"):
        RemoteFolder(url)
    project = tomllib.loads((Path(trilith.__file__).parent / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"][extra] == [package]
