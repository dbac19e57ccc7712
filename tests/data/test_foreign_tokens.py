"""Token ids of Megatron and datatrove are trained on where they lie; bad files are refused.

The files in ``foreign_tokens/`` were written by these programs: see ``foreign_tokens/write.py``.
"""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from trilith.cli.app import run
from trilith.data import TokenFile, foreign_tokens, megatron
from trilith.data.batches import GlobalBatches
from trilith.data.datatrove import read_datatrove
from trilith.data.foreign_tokens import index_tokens
from trilith.data.megatron import parse_blend, read_megatron
from trilith.data.token_writer import TokenWriter
from trilith.parallel_state import BadInput

Capture = pytest.CaptureFixture[str]
FIXTURES = Path(__file__).parent / "foreign_tokens"
TEXTS = [json.loads(line)["text"] for line in (FIXTURES / "documents.jsonl").read_text().splitlines()]
DOCUMENTS = [[*text.encode(), 256] for text in TEXTS]
TOKENIZER = ["--tokenizer", str(FIXTURES / "tokenizer")]
#: Where the parts of a fixture's ``.idx`` begin: lengths, pointers and bounds of 6 documents.
LENGTHS, POINTERS, BOUNDS = 34, 34 + 6 * 4, 34 + 6 * 12


def index(name, out, *options):
    origin = "datatrove" if name.suffix == ".ds" or name.is_dir() else "megatron"
    return run(["tokenize", str(name), *TOKENIZER, "--out", str(out), "--from", origin, *options])


def documents_of(file):
    return [file.ids(a, b).tolist() for a, b in zip(file.documents, file.documents[1:], strict=False)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Tokenize the same documents with our own tokenizing, for Megatron too."""
    out = tmp_path_factory.mktemp("ours") / "ours"
    words = ["tokenize", str(FIXTURES / "documents.jsonl"), *TOKENIZER, "--out", str(out), "--to", "megatron"]
    assert run(words) == 0
    return out


ALL = ["int32", "uint16", "sentences", "00000_shuffled.ds", "00001_shuffled.ds"]


@pytest.mark.parametrize("name", ALL)
def test_the_same_tokens_documents_and_batches_without_a_copy(name, tmp_path, ours):
    assert index(FIXTURES / name, tmp_path / "new" / "tokens") == 0
    file, own = TokenFile.open(tmp_path / "new" / "tokens"), TokenFile.open(ours)
    file.verify()
    assert documents_of(file) == documents_of(own) == DOCUMENTS
    tokens = FIXTURES / (name if name.endswith(".ds") else f"{name}.bin")
    assert (tmp_path / "new" / "tokens.bin").samefile(tokens)
    assert (file.index.eos_id, file.vocab_size, file.index.bos_id) == (256, 257, None)
    assert file.index.tokenizer_fingerprint == own.index.tokenizer_fingerprint
    for documents in ("joined", "separate"):
        theirs, mine = (GlobalBatches(one, 16, 4, seed=3, documents=documents) for one in (file, own))
        for step in range(8):
            for left, right in zip(theirs.batch(step), mine.batch(step), strict=True):
                assert (left is right is None) or torch.equal(left, right)


def test_what_is_written_for_megatron_has_the_bytes_that_megatron_writes(ours, tmp_path):
    with TokenWriter(tmp_path / "wide", vocab_size=70_000, megatron=True) as writer:
        for ids in DOCUMENTS:
            writer.add(ids)
        writer.commit()
    for made, theirs in ((ours, "uint16"), (tmp_path / "wide", "int32")):
        for suffix in (".bin", ".idx"):
            written = made.with_suffix(suffix).read_bytes()
            assert written == (FIXTURES / f"{theirs}{suffix}").read_bytes(), (theirs, suffix)


def test_the_first_token_of_every_document_is_noted(tmp_path):
    for name, documents in (("all", [[5, 1], [5], [5, 2]]), ("one", [[5, 1], [1, 5]])):
        with TokenWriter(tmp_path / name, vocab_size=9, megatron=True) as writer:
            for ids in documents:
                writer.add(ids)
            writer.commit()
        found = index_tokens(read_megatron(tmp_path / name), tmp_path / f"{name}2", vocab_size=9, bos_id=5)
        assert found.index.bos_id == (5 if name == "all" else None)


def test_parts_of_any_size_give_the_same_file(tmp_path, monkeypatch):
    for name in ("int32", "sentences"):
        index_tokens(read_megatron(FIXTURES / name), tmp_path / "whole" / name, vocab_size=257, bos_id=67)
        with monkeypatch.context() as patch:
            patch.setattr(foreign_tokens, "_PART", 12)
            patch.setattr(megatron, "_AT_ONCE", 5)
            index_tokens(read_megatron(FIXTURES / name), tmp_path / "parts" / name, vocab_size=257, bos_id=67)
        for suffix in (".json", ".docs.npy", ".sums"):
            whole, parts = (tmp_path / folder / f"{name}{suffix}" for folder in ("whole", "parts"))
            assert whole.read_bytes() == parts.read_bytes(), (name, suffix)


@pytest.fixture
def copy(tmp_path):
    """Copy a data set of Megatron's, to be changed; its prefix."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"int32{suffix}", folder)
    return folder / "int32"


def test_an_index_beside_megatrons_files_leaves_them_as_they_are(copy, tmp_path, capsys):
    with pytest.raises(BadInput, match=r"trilith tokenize .*int32 --from megatron --out .*int32"):
        TokenFile.open(copy)
    assert index(copy, copy) == 0
    assert documents_of(TokenFile.open(copy)) == DOCUMENTS
    assert sorted(p.name for p in copy.parent.iterdir()) == [
        f"int32{end}" for end in (".bin", ".docs.npy", ".idx", ".json", ".sums")
    ]
    for suffix in (".bin", ".idx"):
        assert not copy.with_suffix(suffix).is_symlink()
        assert copy.with_suffix(suffix).read_bytes() == (FIXTURES / f"int32{suffix}").read_bytes()
    assert index(copy, copy) == 2 and "an existing file" in capsys.readouterr().err
    assert run(["verify", str(copy.with_suffix(".idx"))]) == 0


def test_what_a_kill_leaves_beside_megatrons_tokens_lets_nobody_replace_them(copy):
    before = copy.with_suffix(".bin").read_bytes()
    (copy.parent / "int32.json.tmp-0123456789abcdef").mkdir()
    with pytest.raises(BadInput, match="an existing file"), TokenWriter(copy, vocab_size=9):
        pass
    assert index(copy, copy) == 0
    assert copy.with_suffix(".bin").read_bytes() == before
    assert not [path for path in copy.parent.iterdir() if ".tmp-" in path.name]


def test_a_folder_of_datatrove_is_a_mixture_by_size(tmp_path, capsys):
    assert index(FIXTURES, tmp_path / "fine") == 0
    names = [str(tmp_path / "fine" / f"0000{n}_shuffled") for n in (0, 1)]
    assert f"[data]\ntokens = {json.dumps(names)}\n" in capsys.readouterr().out
    assert all(documents_of(TokenFile.open(name)) == DOCUMENTS for name in names)


def test_a_blend_becomes_token_files_and_weights(tmp_path, capsys):
    words = ["0.3", str(FIXTURES / "int32"), "0.7", str(FIXTURES / "uint16.bin")]
    assert run(["tokenize", *words, *TOKENIZER, "--out", str(tmp_path / "blend"), "--from", "megatron"]) == 0
    said = capsys.readouterr().out
    tokens = json.dumps([str(tmp_path / "blend" / name) for name in ("int32", "uint16")])
    assert f"[data]\ntokens = {tokens}\nweights = [0.3, 0.7]\n" in said


def test_a_blend_is_read_as_megatron_reads_it():
    assert parse_blend(["a"], "x") == (["a"], None)
    assert parse_blend(["a", "b"], "x") == (["a", "b"], None)
    assert parse_blend(["1", "a", "2.5", "b"], "x") == (["a", "b"], [1.0, 2.5])
    assert parse_blend(["1", "a", "2"], "x") == (["1", "a", "2"], None)
    wrong = [[], ["1", "a", "b", "c"], *(["1", "a", weight, "b"] for weight in ("0", "-1", "nan", "inf"))]
    for words in wrong:
        with pytest.raises(BadInput, match="data path"):
            parse_blend(words, "x")


def put(at, form, value):
    """Overwrite a number of the ``.idx``."""

    def change(prefix):
        path = prefix.with_suffix(".idx")
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, at, value)
        path.write_bytes(content)

    return change


def resize(suffix, by):
    def change(prefix):
        path = prefix.with_suffix(suffix)
        content = path.read_bytes()
        path.write_bytes(content[:by] if by < 0 else content + b"\0" * by)

    return change


def ids(at, value):
    def change(prefix):
        tokens = np.fromfile(prefix.with_suffix(".bin"), dtype="<i4")
        tokens[at] = value
        tokens.tofile(prefix.with_suffix(".bin"))

    return change


def remove(suffix):
    return lambda prefix: prefix.with_suffix(suffix).unlink()


def become(name):
    def change(prefix):
        for suffix in (".bin", ".idx"):
            shutil.copy(FIXTURES / f"{name}{suffix}", prefix.with_suffix(suffix))

    return change


def magic(text):
    def change(prefix):
        path = prefix.with_suffix(".idx")
        path.write_bytes(text + path.read_bytes()[len(text) :])

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(remove(".idx"), "int32.idx: expected a file", id="no-index"),
        pytest.param(remove(".bin"), "int32.bin: expected a file", id="no-tokens"),
        pytest.param(resize(".idx", -130), "at least 34 bytes, a whole header, found 32", id="half-a-header"),
        pytest.param(resize(".idx", -1), "162 bytes for 6 sequences and 7 bounds", id="F6-index-cut-short"),
        pytest.param(resize(".idx", 1), "162 bytes for 6 sequences", id="index-too-long"),
        pytest.param(resize(".bin", -4), "1008 bytes, 252 ids of 4 bytes", id="tokens-cut-short"),
        pytest.param(resize(".bin", -1), "1008 bytes, 252 ids of 4 bytes", id="F6-odd-length"),
        pytest.param(resize(".bin", 4), "1008 bytes, 252 ids of 4 bytes", id="more-tokens"),
        pytest.param(magic(b"NOTIDX"), "magic", id="wrong-magic"),
        pytest.param(magic(b"TNTIDX\0\0"), "the older format of cached data sets", id="older-format"),
        pytest.param(put(9, "<Q", 2), "version: expected 1, found 2", id="version"),
        pytest.param(put(17, "B", 7), "found float32", id="F5-type"),
        pytest.param(put(17, "B", 99), "found code 99", id="unknown-type"),
        pytest.param(put(17, "B", 8), "pointer of sequence 1: expected 34", id="F5-width-of-another-type"),
        pytest.param(put(18, "<Q", 2**61), "bytes for 2305843009213693952 sequences", id="many-sequences"),
        pytest.param(put(26, "<Q", 2**61), "2305843009213693952 bounds", id="many-documents"),
        pytest.param(put(18, "<Q", 0), "0 sequences", id="F1-no-sequence"),
        pytest.param(put(LENGTHS + 4, "<i", -40), "length of sequence 1: expected at least 0", id="negative"),
        pytest.param(put(LENGTHS + 4, "<i", 41), "pointer of sequence 2", id="overlap"),
        pytest.param(put(LENGTHS + 20, "<i", 10**9), "4000000764 bytes", id="beyond-the-file"),
        pytest.param(put(POINTERS + 40, "<q", 10**12), "pointer of sequence 5", id="pointer-beyond-the-file"),
        pytest.param(put(POINTERS, "<q", -4), "pointer of sequence 0: expected 0", id="negative-pointer"),
        pytest.param(
            put(BOUNDS + 16, "<q", 5), "bound 3 of documents: expected at least 5", id="F11-unsorted"
        ),
        pytest.param(put(BOUNDS, "<q", 1), "bounds of documents: expected 0 to 6", id="bounds-begin"),
        pytest.param(put(BOUNDS + 48, "<q", 7), "bounds of documents: expected 0 to 6", id="bounds-end"),
        pytest.param(put(BOUNDS + 8, "<q", -1), "bound 1 of documents", id="negative-bound"),
        pytest.param(ids(7, 257), "token 7: expected 0 to 256, the tokenizer's ids, found 257", id="F8-id"),
        pytest.param(ids(7, -1), "token 7: expected 0 to 256, the tokenizer's ids, found -1", id="F5-sign"),
        pytest.param(become("int64"), "expected uint16 or int32, found int64", id="int64"),
        pytest.param(become("pictures"), "sequence 1: expected mode 0, text, found mode 1", id="pictures"),
    ],
)
def test_megatron_files_that_do_not_fit_are_refused_and_nothing_stays(copy, tmp_path, change, said, capsys):
    change(copy)
    before = sorted(path.name for path in copy.parent.iterdir())
    for out in (copy, tmp_path / "elsewhere" / "tokens"):
        assert index(copy, out) == 2
        line = capsys.readouterr().err
        assert said in line and line.count("\n") == 1
    assert sorted(path.name for path in copy.parent.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_an_index_cut_or_flipped_anywhere_is_read_or_refused(copy):
    path, whole = copy.with_suffix(".idx"), (FIXTURES / "int32.idx").read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput):
            read_megatron(copy)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x84]) + whole[at + 1 :])
        try:
            found = read_megatron(copy)
        except BadInput:
            continue
        assert at >= BOUNDS and found.offsets[-1] == 252, "only a bound of documents can be another one"


def test_tokens_beyond_4_gib_are_found(tmp_path):
    """Two sequences of 2**30 ids each, and a short one behind 8 GiB; the file has holes and takes no room."""
    lengths = np.array([2**30, 2**30, 5], dtype="<i8")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with (tmp_path / "large.idx").open("wb") as file:
        megatron.write_megatron_index(file, offsets, np.dtype("<u4"))
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(4 * int(offsets[-1]))
    assert read_megatron(tmp_path / "large").offsets.tolist() == [0, 2**30, 2**31, 2**31 + 5]


def test_indexing_takes_no_more_memory_for_more_tokens(tmp_path):
    peaks = []
    for size in (2**22, 2**24):
        name = tmp_path / str(size)
        with name.with_suffix(".idx").open("wb") as file:
            megatron.write_megatron_index(file, np.arange(0, size + 1, size // 4), np.dtype("<u4"))
        with name.with_suffix(".bin").open("wb") as file:
            file.truncate(4 * size)
        tracemalloc.start()
        index_tokens(read_megatron(name), name, vocab_size=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**20 < 2**24, peaks


@pytest.mark.slow
def test_a_token_behind_4_gib_is_read_from_its_place(tmp_path):
    """Reads 4 GiB of a file with holes: some ten seconds."""
    lengths = np.array([2**30, 7], dtype="<i8")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with (tmp_path / "large.idx").open("wb") as file:
        megatron.write_megatron_index(file, offsets, np.dtype("<u4"))
    with (tmp_path / "large.bin").open("wb") as file:
        file.seek(4 * 2**30)
        file.write(np.arange(7, dtype="<u4").tobytes())
    found = index_tokens(read_megatron(tmp_path / "large"), tmp_path / "large", vocab_size=7)
    assert (
        found.ids(2**30, 2**30 + 7).tolist() == [*range(7)] and found.documents.tolist() == offsets.tolist()
    )
    with pytest.raises(BadInput, match=f"token {2**30 + 6}: expected 0 to 5"):
        index_tokens(read_megatron(tmp_path / "large"), tmp_path / "other", vocab_size=6)


@pytest.mark.parametrize(
    ("suffix", "content", "said"),
    [
        pytest.param(".index", None, "save_index=True", id="no-index"),
        pytest.param(".index", b"", "8 bytes for each document", id="F1-empty-index"),
        pytest.param(".index", b"\x01" * 9, "8 bytes for each document", id="index-cut-short"),
        pytest.param(
            ".index", struct.pack("<3Q", 90, 80, 252), "document 1: expected an end", id="F11-ends-fall"
        ),
        pytest.param(".index", struct.pack("<2Q", 90, 2**63), "document 1: expected an end", id="uint64"),
        pytest.param(
            ".index", struct.pack("<2Q", 90, 253), "2 or 4 bytes for each of 253 ids", id="more-ids"
        ),
        pytest.param(".index", struct.pack("<2Q", 0, 0), "at least one with tokens", id="no-tokens"),
        pytest.param(".metadata", b"bytes|4\n252\n", "expected 2, as the other files say", id="F5-width"),
        pytest.param(".metadata", b"bytes|2\n251\n", "expected 252, as the other files say", id="count"),
        pytest.param(".metadata", b"", "expected 252", id="empty-metadata"),
        pytest.param(".loss", b"\1" * 252, "no mask of the loss", id="a-loss-mask"),
    ],
)
def test_datatrove_files_that_do_not_fit_are_refused(tmp_path, suffix, content, said):
    path = tmp_path / "00000_shuffled.ds"
    for end in ("", ".index", ".metadata"):
        shutil.copy(FIXTURES / f"{path.name}{end}", tmp_path)
    beside = tmp_path / (path.name + suffix)
    beside.unlink(missing_ok=True)
    if content is not None:
        beside.write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_datatrove(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["int32", "--from", "megatron", "--split-paragraphs"], "no option that says how to tokenize"),
        (["int32", "--from", "megatron", "--to", "megatron"], "found --to"),
        (["int32", "int32.bin", "--from", "megatron"], "files with different names, found two called int32"),
        (["tokenizer", "--from", "datatrove"], "a folder with .ds files"),
        (["documents.jsonl", "--to", "megatron", "--chat"], "expected text: it learns every token"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(FIXTURES)
    template = ["--chat-template", str(tmp_path / "t.jinja")] if "--chat" in words else []
    (tmp_path / "t.jinja").write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    assert run(["tokenize", *words, *template, *TOKENIZER, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.jinja"]
