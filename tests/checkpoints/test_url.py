"""An export to a URL is whole there or refused, wherever it is killed; what is read is copied whole."""

import os
import threading
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from support.configs import TINIEST_LLAMA
from support.folders import contents
from trilith.checkpoints import convert, read_source
from trilith.checkpoints.hugging_face.hub import local_folder
from trilith.cli.app import run
from trilith.data import TokenFile
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadCheckpoint, BadInput
from trilith.storage import fetched, remote_folder
from trilith.storage.fetched import as_url
from trilith.storage.remote_folder import RemoteFailed, RemoteFolder
from trilith.storage.remote_output import NOTE

pytestmark = pytest.mark.usefixtures("cache")
FORMS = {"hf": {"to": "hf"}, "sharded": {"to": "sharded", "tensor": 2}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint in ``source``, and what it is converted to, by form."""
    folder = tmp_path_factory.mktemp("made")
    write_hf_folder(folder / "original", TINIEST_LLAMA)
    convert(folder / "original", folder / "source")
    for form, options in FORMS.items():
        convert(folder / "source", folder / form, **options)
    return folder


def stored(url):
    """Return every file at a URL."""
    folder = RemoteFolder(url)
    return {name: folder.read(name) or b"" for name in folder.sizes()}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", FORMS)
def test_an_export_to_a_url_has_the_bytes_of_the_local_one_and_is_verified_there(
    url, form, made, cache, capsys
):
    words = [word for key, value in FORMS[form].items() for word in (f"--{key}", str(value))]
    assert run(["convert", str(made / "source"), url, *words, "--verify"]) == 0
    assert f"{url}: read back, every number is the source's" in capsys.readouterr().out
    assert stored(url) == files(made / form)
    assert run(["verify", url]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 + len([*(made / form).glob("*.safetensors")])
    assert told[-1].startswith(f"{url}, copied to {cache}/")
    assert told[-1].endswith("complete and unaltered" if form == "sharded" else "complete and finite")
    assert not [*(cache / "outgoing").iterdir()]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_killed_at_any_operation_is_refused_or_whole_and_completed_by_the_same_command(
    url, form, made, cache, stopped_at
):
    """Half of a file, of the note or of the last file may have arrived; a local output is made only once."""
    whole, outcomes = files(made / form), set[bool]()
    for at in count(1):
        place = f"{url}-{at}"
        with mock.patch.object(remote_folder, "_PIECE", 10_000), stopped_at(at) as operations:
            convert(made / "source", place, **FORMS[form])
        if len(operations) < at:
            break
        try:
            there = files(local_folder(place)) == whole
            read_source(place)
        except BadInput as error:
            there = False
            assert "\n" not in str(error)
            if NOTE in stored(place):
                assert "an export that has not ended or was killed" in str(error), (at, operations)
        outcomes.add(there)
        if there:
            with pytest.raises(BadInput, match="expected a place without files, found "):
                convert(made / "source", place, **FORMS[form])
        else:
            convert(made / "source", place, **FORMS[form])
        assert stored(place) == whole, (at, operations)
    assert at > 5 and outcomes == {True, False}
    assert {one.split()[0] for one in operations} == {"write", "remove"}


@pytest.mark.slow
def test_an_export_killed_at_any_operation_on_this_host_is_completed_by_the_same_command(
    made, cache, killed_at
):
    for at in count(1):
        place = f"memory://exports/{at}"
        with killed_at(at) as operations:
            convert(made / "source", place, to="hf")
        if len(operations) < at:
            break
        assert not stored(place), (at, operations)
        convert(made / "source", place, to="hf")
        assert stored(place) == files(made / "hf")
        assert not [*(cache / "outgoing").iterdir()], (at, operations)
    assert at > 10


def test_a_killed_export_is_named_by_who_began_it_and_what_to_do(made, stopped_at, capsys):
    with stopped_at(3):
        convert(made / "source", "memory://exports/model", to="hf")
    place = "memory://exports/model"
    for words in (["inspect", place], ["verify", place], ["convert", place, str(made / "none")]):
        assert run(words) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {place}: expected a whole folder, found an export that has not ended")
        assert ", host " in told and ", process " in told and ", begun 20" in told
        assert told.endswith("Run the same command again: it completes the copy\n") and told.count("\n") == 1


def test_a_dcp_checkpoint_at_a_url_has_the_numbers_of_its_source(made, tmp_path):
    assert run(["convert", str(made / "source"), "memory://exports/dcp", "--to", "dcp"]) == 0
    (back := tmp_path / "back").mkdir()
    for name in (there := RemoteFolder("memory://exports/dcp")).sizes():
        there.fetch(name, back / name)
    assert sorted(path.name for path in back.iterdir()) == [".metadata", "__0_0.distcp"]
    assert run(["diff", str(back), str(made / "original"), "--config", str(made / "original")]) == 0


def test_a_place_that_is_taken_or_among_checkpoints_is_refused_and_stays_as_it_was(made):
    taken = RemoteFolder("memory://bucket/data")
    taken.write("config.json", b"mine")
    taken.write("more.txt", b"mine")
    for name in (".metadata", "config.json"):  # a step's folder, and one without a step
        RemoteFolder("memory://bucket/run/step-00000002").write(name, b"{}")
    RemoteFolder("memory://bucket/cut").write("manifest.json", b"{}")
    for name in (NOTE, "mine.txt"):
        RemoteFolder("memory://bucket/notes").write(name, b"mine")
    for place, says in (
        ("memory://bucket/notes", "expected a place without files, found mine.txt and 1 more"),
        ("memory://bucket/data", "expected a place without files, found config.json and 1 more"),
        ("memory://bucket/run/model", "outside a run's checkpoints, found memory://bucket/run"),
        ("memory://bucket/cut/model", "outside a checkpoint, found memory://bucket/cut"),
        ("nosuch://bucket/model", "whose file system is installed"),
    ):
        with pytest.raises(BadInput, match=says):
            convert(made / "source", place, to="hf")
    assert stored("memory://bucket/data") == {"config.json": b"mine", "more.txt": b"mine"}
    assert not stored("memory://bucket/run/model") and not stored("memory://bucket/cut/model")


def test_an_output_larger_than_the_cache_is_refused(made, monkeypatch):
    monkeypatch.setenv(fetched.CACHE_GB, "1e-6")
    says = r"at most 1e-06 GB, as TRILITH_CACHE_GB says, found .* on this host first"
    with pytest.raises(BadInput, match=says):
        convert(made / "source", "memory://exports/model", to="hf")
    assert not stored("memory://exports/model")


def test_an_output_of_two_processes_is_refused_to_the_second_and_killed_ones_are_cleared(
    made, cache, stopped_at, blocked
):
    with stopped_at(1):
        convert(made / "source", "memory://exports/killed", to="hf")
    assert len([*(cache / "outgoing").iterdir()]) == 2  # the output and its lock
    with blocked(RemoteFolder, "copy") as (begun, go):
        first = threading.Thread(target=convert, args=(made / "source", "memory://exports/model"))
        first.start()
        assert begun.wait(60)
        with pytest.raises(BadInput, match="another process of this host writing it"):
            convert(made / "source", "memory://exports/model")
        go.set()
        first.join(60)
    assert stored("memory://exports/model") == files(made / "hf")
    assert not [*(cache / "outgoing").iterdir()]


def test_a_file_that_arrives_short_is_an_error_and_no_export(made):
    real = RemoteFolder.copy

    def short(folder, source, name):
        if name.endswith(".safetensors"):
            folder.write(name, source.read_bytes()[:-1])
            return 0
        return real(folder, source, name)

    with (
        mock.patch.object(RemoteFolder, "copy", short),
        pytest.raises(RemoteFailed, match=r"expected .* bytes"),
    ):
        convert(made / "source", "memory://exports/model", to="hf")
    with pytest.raises(BadInput, match="an export that has not ended"):
        local_folder("memory://exports/model")


def flip_last_bit(folder, name):
    raw = folder.read(name)
    folder.write(name, raw[:-1] + bytes([raw[-1] ^ 1]))


def test_a_wrong_bit_at_a_url_is_found_by_verify(made, tmp_path, capsys):
    convert(made / "source", "memory://exports/model", tensor=2)
    folder = RemoteFolder("memory://exports/model")
    name = next(one for one in folder.sizes() if one.endswith(".safetensors"))
    flip_last_bit(folder, name)
    assert run(["verify", "memory://exports/model"]) == BadCheckpoint.exit_code
    write_tokens(tmp_path / "tokens")
    for path in tmp_path.glob("tokens.*"):
        RemoteFolder("memory://data").copy(path, path.name)
    for words in ("memory://data/tokens", "memory://data/tokens.bin"):
        assert run(["verify", words]) == 0
    assert "memory://data/tokens: complete and unaltered: " in capsys.readouterr().out
    flip_last_bit(RemoteFolder("memory://data"), "tokens.bin")
    assert run(["verify", "memory://data/tokens"]) == BadInput.exit_code


def put(url, folder):
    remote = RemoteFolder(url)
    for file in folder.iterdir():
        remote.copy(file, file.name)


def everything(name):
    return True


def test_a_model_at_a_url_is_converted_as_the_local_one_and_is_copied_once(made, tmp_path):
    put("memory://models/tiny", made / "original")
    RemoteFolder("memory://models/tiny").write("code.py", b"raise SystemExit")
    RemoteFolder("memory://models/tiny").write("pytorch_model.bin", b"a pickle")
    assert run(["convert", "memory://models/tiny", str(tmp_path / "there"), "--tensor", "2"]) == 0
    convert(made / "original", tmp_path / "here", tensor=2)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    copy = local_folder("memory://models/tiny")
    assert copy.name == "tiny" and contents(copy) == contents(made / "original"), "no code, no pickle"
    with mock.patch.object(RemoteFolder, "fetch", side_effect=AssertionError):
        assert local_folder(Path("memory://models/tiny")) == copy


def test_the_newest_checkpoint_of_a_mirror_is_read_from_its_url(made, tmp_path):
    for step in (2, 10):
        convert(made / "original", tmp_path / f"of-{step}", tensor=step // 2 % 4)
        put(f"memory://run/step-{step:08d}", tmp_path / f"of-{step}")
    RemoteFolder("memory://run").write("step-00000012/half.safetensors", b"without a manifest")
    assert contents(local_folder("memory://run")) == contents(tmp_path / "of-10")
    assert run(["convert", "memory://run", str(tmp_path / "back"), "--to", "hf"]) == 0
    assert run(["diff", str(tmp_path / "back"), str(made / "original")]) == 0


def test_a_token_file_at_a_url_gives_the_same_ids(tmp_path):
    here = TokenFile.open(write_tokens(tmp_path / "tokens" / "corpus"))
    write_tokens(tmp_path / "tokens" / "other")
    put("memory://data", tmp_path / "tokens")
    for name in ("memory://data/corpus", Path("memory://data/corpus.bin")):
        there = TokenFile.open(name)
        assert there.fingerprint == here.fingerprint
        assert (there.ids(0, 4000) == here.ids(0, 4000)).all()
    assert {path.name.partition(".")[0] for path in there.path.parent.iterdir()} == {"corpus"}


def test_a_file_that_has_changed_at_the_url_is_copied_anew():
    remote = RemoteFolder("memory://place")
    for text in (b"first", b"other"):
        remote.write("a", text)
        assert (fetched.fetched("memory://place", everything) / "a").read_bytes() == text


def test_a_fetch_that_is_killed_anywhere_leaves_a_whole_copy_or_none(
    tmp_path, monkeypatch, killed_at, end_use
):
    data = {"a": os.urandom(300), "b": os.urandom(150)}
    for name, text in data.items():
        RemoteFolder("memory://place").write(name, text)
    for at in count(1):
        monkeypatch.setenv(fetched.CACHE, str(tmp_path / f"cache-{at}"))
        with killed_at(at) as operations:
            fetched.fetched("memory://place", everything)
        if len(operations) < at:
            break
        end_use()
        for copy in (tmp_path / f"cache-{at}").glob("*/place"):
            assert {path.name: path.read_bytes() for path in copy.iterdir()} == data, (at, operations)
        copy = fetched.fetched("memory://place", everything)
        assert {path.name: path.read_bytes() for path in copy.iterdir()} == data
        assert [path.name for path in copy.parent.iterdir()] == ["place"], (at, operations)
    assert at > 10 and {*operations} == {"create", "write", "sync", "rename", "make_directory"}


def test_a_file_that_arrives_short_is_not_a_copy(cache):
    RemoteFolder("memory://place").write("a", b"1234")
    with (
        mock.patch.object(RemoteFolder, "_pieces", lambda folder, name: [b"123"]),
        pytest.raises(RemoteFailed, match="a: expected 4 bytes, found 3"),
    ):
        fetched.fetched("memory://place", everything)
    assert not [*cache.glob("*/*")]


def test_the_copy_unused_for_longest_makes_room_and_one_in_use_never_does(cache, monkeypatch, end_use):
    for name in "abcd":
        RemoteFolder(f"memory://{name}").write("file", bytes(1000))
    monkeypatch.setenv(fetched.CACHE_GB, "2.5e-6")
    for age, name in enumerate("ab"):
        os.utime(fetched.fetched(f"memory://{name}", everything), (age, age))
    with pytest.raises(
        BadInput, match=r"memory://c: expected .* found 2e-06 GB in use\. Set TRILITH_CACHE_GB"
    ):
        fetched.fetched("memory://c", everything)
    end_use()
    fetched.fetched("memory://c", everything)
    assert {path.name for path in cache.glob("*/*")} == {"b", "c"}
    fetched.fetched("memory://b", everything)
    end_use()
    os.utime(next(cache.glob("*/c")), (5, 5))
    fetched.fetched("memory://d", everything)
    assert {path.name for path in cache.glob("*/*")} == {"b", "d"}
    monkeypatch.setenv(fetched.CACHE_GB, "0.5e-6")
    with pytest.raises(BadInput, match="expected at most 5e-07 GB, as TRILITH_CACHE_GB says, found 1e-06 GB"):
        fetched.fetched("memory://a", everything)


def test_what_is_no_url_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    for name in ("org/model", "a/b.json", "/x", "file:///tmp/x", "c:/model", "s3://bucket", ""):
        assert as_url(name) is None and as_url(Path(name)) is None
    assert as_url(Path("gs://bucket/a")) == as_url("gs://bucket/a") == "gs://bucket/a"


def test_a_url_without_weights_or_without_a_store_is_one_line(capsys):
    for url, says in (
        ("memory://nothing", "expected a folder with files to read, found none"),
        ("nosuch://bucket", "expected a path, or a URL whose file system is installed"),
    ):
        assert run(["inspect", url]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {url}: {says}") and told.count("\n") == 1
