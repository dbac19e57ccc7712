"""Token ids that Megatron and datatrove wrote (``foreign_tokens/write.py``) are trained on where they lie."""

import errno
import json
import os
import shutil
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support.command_lines import call_command
from support.damage import truncate
from support.refusals import Refused, refusals
from support.token_files import batch_at, documents_of, write_token_file
from trilith.cli.app import run
from trilith.data import TokenFile, foreign_tokens, megatron
from trilith.data.batches import GlobalBatches
from trilith.data.foreign_tokens import index_tokens, read_datatrove
from trilith.data.megatron import parse_blend, read_megatron, write_megatron_index
from trilith.parallel_state import BadInput

FIXTURES = Path(__file__).parent / "foreign_tokens"
TEXTS = [json.loads(line)["text"] for line in (FIXTURES / "documents.jsonl").read_text().splitlines()]
DOCUMENTS = [[*text.encode(), 256] for text in TEXTS]
TOKENIZER = ["--tokenizer", str(FIXTURES / "tokenizer")]
#: Where the bounds of a fixture's 6 documents begin in its ``.idx``.
BOUNDS = 34 + 6 * 12


def index(name, out, *options):
    origin = "datatrove" if name.suffix == ".ds" or name.is_dir() else "megatron"
    return run(["tokenize", str(name), *TOKENIZER, "--out", str(out), "--from", origin, *options])


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
            for left, right in zip(batch_at(theirs, step), batch_at(mine, step), strict=True):
                assert (left is right is None) or torch.equal(left, right)


def test_what_is_written_for_megatron_has_the_bytes_that_megatron_writes(ours, tmp_path):
    write_token_file(tmp_path / "wide", DOCUMENTS, vocab_size=70_000, megatron=True)
    for made, theirs in ((ours, "uint16"), (tmp_path / "wide", "int32")):
        for suffix in (".bin", ".idx"):
            written = made.with_suffix(suffix).read_bytes()
            assert written == (FIXTURES / f"{theirs}{suffix}").read_bytes(), (theirs, suffix)


def test_the_first_token_of_every_document_is_noted(tmp_path):
    for name, documents in (("all", [[5, 1], [5], [5, 2]]), ("one", [[5, 1], [1, 5]])):
        write_token_file(tmp_path / name, documents, vocab_size=9, megatron=True)
        file = index_tokens(read_megatron(tmp_path / name), tmp_path / f"{name}2", vocab_size=9, bos_id=5)
        assert file.index.bos_id == (5 if name == "all" else None)


def test_parts_of_any_size_give_the_same_file(tmp_path, monkeypatch):
    for name in ("int32", "sentences"):
        index_tokens(read_megatron(FIXTURES / name), tmp_path / "whole" / name, vocab_size=257, bos_id=67)
        with monkeypatch.context() as patch:
            patch.setattr(foreign_tokens, "_PART", 12)
            index_tokens(read_megatron(FIXTURES / name), tmp_path / "parts" / name, vocab_size=257, bos_id=67)
        for suffix in (".json", ".docs.npy", ".sums"):
            whole, parts = (tmp_path / folder / f"{name}{suffix}" for folder in ("whole", "parts"))
            assert whole.read_bytes() == parts.read_bytes(), (name, suffix)


@pytest.fixture
def copy(tmp_path):
    """Copy a data set of Megatron's, to be changed; its prefix."""
    (tmp_path / "theirs").mkdir()
    copies(tmp_path / "theirs")
    return tmp_path / "theirs" / "int32"


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
    with pytest.raises(BadInput, match="an existing file"):
        write_token_file(copy, [[1]])
    assert index(copy, copy) == 0
    assert copy.with_suffix(".bin").read_bytes() == before
    assert not [path for path in copy.parent.iterdir() if ".tmp-" in path.name]


def test_a_folder_of_datatrove_is_a_mixture_by_size(tmp_path, capsys):
    assert index(FIXTURES, tmp_path / "fine") == 0
    names = [str(tmp_path / "fine" / f"0000{n}_shuffled") for n in (0, 1)]
    assert f"[data]\ntokens = {json.dumps(names)}\n" in capsys.readouterr().out
    assert all(documents_of(TokenFile.open(name)) == DOCUMENTS for name in names)


def test_a_blend_becomes_token_files_and_weights(tmp_path, capsys):
    """Also after a kill behind the first of them."""
    assert index(FIXTURES / "int32", tmp_path / "blend" / "int32") == 0
    words = ["0.3", str(FIXTURES / "int32"), "0.7", str(FIXTURES / "uint16.bin")]
    assert run(["tokenize", *words, *TOKENIZER, "--out", str(tmp_path / "blend"), "--from", "megatron"]) == 0
    told = capsys.readouterr().out
    tokens = json.dumps([str(tmp_path / "blend" / name) for name in ("int32", "uint16")])
    assert f"[data]\ntokens = {tokens}\nweights = [0.3, 0.7]\n" in told


def test_a_blend_is_read_as_megatron_reads_it():
    assert parse_blend(["a"], "x") == (["a"], None)
    assert parse_blend(["a", "b"], "x") == (["a", "b"], None)
    assert parse_blend(["1", "a", "2.5", "b"], "x") == (["a", "b"], [1.0, 2.5])
    assert parse_blend(["1", "a", "2"], "x") == (["1", "a", "2"], None)


def test_an_index_cut_or_flipped_anywhere_is_read_or_refused(copy):
    path, whole = copy.with_suffix(".idx"), (FIXTURES / "int32.idx").read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput):
            read_megatron(copy)
    accepted = set()
    for at, bits in product(range(len(whole)), (0x01, 0x84)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
        with suppress(BadInput):
            assert read_megatron(copy).offsets[-1] == 252
            accepted.add(at)
    assert accepted == {*range(BOUNDS + 8, len(whole) - 8, 8)}, "a bound inside may be its neighbour"


def holes(prefix, lengths):
    """Write sequences of 4-byte ids that are holes and take no room; their offsets."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    with prefix.with_suffix(".idx").open("wb") as file:
        megatron.write_megatron_index(file, offsets, np.dtype("<u4"))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(4 * int(offsets[-1]))
    return offsets.tolist()


def test_tokens_beyond_4_gib_are_found(tmp_path):
    """Two sequences of 2**30 ids each, and a short one behind 8 GiB."""
    offsets = holes(tmp_path / "large", [2**30, 2**30, 5])
    assert read_megatron(tmp_path / "large").offsets.tolist() == offsets == [0, 2**30, 2**31, 2**31 + 5]


def test_indexing_takes_no_more_memory_for_more_tokens(tmp_path):
    peaks = []
    for size in (2**22, 2**24):
        holes(tmp_path / str(size), [size // 4] * 4)
        tracemalloc.start()
        index_tokens(read_megatron(tmp_path / str(size)), tmp_path / str(size), vocab_size=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**20 < 2**24, peaks


#: Where the parts of a fixture's ``.idx`` begin: lengths, pointers and bounds of 6 documents.
LENGTHS, POINTERS = 34, 34 + 6 * 4


def copies(folder, name="int32"):
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"{name}{suffix}", folder / f"int32{suffix}")


def of_megatron(why, damage, says, out="new/tokens"):
    def given(folder):
        copies(folder)
        damage(folder)

    def call(folder):
        index_tokens(read_megatron(folder / "int32"), folder / out, vocab_size=257)

    return Refused(why, call, says, given=given)


def overwrite(ending, at, form, value):
    def damage(folder):
        path = folder / f"int32{ending}"
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, at, value)
        path.write_bytes(content)

    return damage


def put(why, says, at, form, value):
    return of_megatron(why, overwrite(".idx", at, form, value), says)


def cut(ending, size):
    return lambda folder: truncate(folder / f"int32{ending}", size)


def longer(ending, count):
    def damage(folder):
        with (folder / f"int32{ending}").open("ab") as file:
            file.write(bytes(count))

    return damage


test_megatron_files_that_do_not_fit_are_refused = refusals(
    of_megatron("no-index", lambda folder: (folder / "int32.idx").unlink(), "int32.idx: expected a file"),
    of_megatron("no-tokens", lambda folder: (folder / "int32.bin").unlink(), "int32.bin: expected a file"),
    of_megatron("half-a-header", cut(".idx", -130), "at least 34 bytes, a whole header, found 32"),
    of_megatron("index-too-long", longer(".idx", 1), "162 bytes for 6 sequences"),
    of_megatron("F6-odd-length", cut(".bin", -1), "1008 bytes, 252 ids of 4 bytes"),
    of_megatron("more-tokens", longer(".bin", 4), "1008 bytes, 252 ids of 4 bytes"),
    of_megatron("int64", partial(copies, name="int64"), "expected uint16 or int32, found int64"),
    of_megatron(
        "pictures", partial(copies, name="pictures"), "sequence 1: expected mode 0, text, found mode 1"
    ),
    of_megatron("beside-them", overwrite(".idx", BOUNDS, "<q", 1), "bounds of documents", out="int32"),
    of_megatron("F8-id", overwrite(".bin", 28, "<i", 257), "token 7: expected 0 to 256, the tok.*found 257"),
    of_megatron("F5-sign", overwrite(".bin", 28, "<i", -1), "token 7: expected 0 to 256, the tok.*found -1"),
    put("wrong-magic", "magic", 0, "6s", b"NOTIDX"),
    put("older-format", "the older format of cached data sets", 0, "8s", b"TNTIDX\0\0"),
    put("F5-type", "found float32", 17, "B", 7),
    put("unknown-type", "found code 99", 17, "B", 99),
    put("F5-width-of-another-type", "pointer of sequence 1: expected 34", 17, "B", 8),
    put("many-sequences", "bytes for 2305843009213693952 sequences", 18, "<Q", 2**61),
    put("F1-no-sequence", "0 sequences", 18, "<Q", 0),
    put("negative", "length of sequence 1: expected at least 0", LENGTHS + 4, "<i", -40),
    put("overlap", "pointer of sequence 2", LENGTHS + 4, "<i", 41),
    put("beyond-the-file", "4000000764 bytes", LENGTHS + 20, "<i", 10**9),
    put("pointer-beyond-the-file", "pointer of sequence 5", POINTERS + 40, "<q", 10**12),
    put("F11-unsorted", "bound 3 of documents: expected at least 5", BOUNDS + 16, "<q", 5),
)


def datatrove(why, ending, content, says):
    def given(folder):
        for end in ("", ".index", ".metadata"):
            shutil.copy(FIXTURES / f"00000_shuffled.ds{end}", folder)
        path = folder / f"00000_shuffled.ds{ending}"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)

    return Refused(why, lambda folder: read_datatrove(folder / "00000_shuffled.ds"), says, given=given)


test_datatrove_files_that_do_not_fit_are_refused = refusals(
    datatrove("no-index", ".index", None, "save_index=True"),
    datatrove("F1-empty-index", ".index", b"", "8 bytes for each document"),
    datatrove("index-cut-short", ".index", b"\x01" * 9, "8 bytes for each document"),
    datatrove("F11-ends-fall", ".index", struct.pack("<3Q", 90, 80, 252), "document 1: expected an end"),
    datatrove("more-ids", ".index", struct.pack("<2Q", 90, 253), "2 or 4 bytes for each of 253 ids"),
    datatrove("no-tokens", ".index", struct.pack("<2Q", 0, 0), "at least one with tokens"),
    datatrove("F5-width", ".metadata", b"bytes|4\n252\n", "expected 2, as the other files say"),
    datatrove("count", ".metadata", b"bytes|2\n251\n", "expected 252, as the other files say"),
    datatrove("empty-metadata", ".metadata", b"", "expected 252"),
    datatrove("a-loss-mask", ".loss", b"\1" * 252, "no mask of the loss"),
)

MARKED = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


def command(why, says, *words, damage=bool, out="out"):
    """State a call of ``trilith tokenize`` in a folder with the files of others."""

    def given(folder):
        shutil.copytree(FIXTURES, folder, dirs_exist_ok=True)
        (folder / "t.jinja").write_text(MARKED)
        damage(folder)

    words = ["tokenize", *words, "--tokenizer", "tokenizer", "--out", out]
    return Refused(why, lambda folder: call_command(folder, *words), says, given=given)


def unreadable(folder):
    foreign = read_megatron(FIXTURES / "uint16")
    with mock.patch.object(os, "pread", side_effect=OSError(errno.EINVAL, "")):
        index_tokens(foreign, folder / "out", vocab_size=60_000)


test_options_that_contradict_each_other_are_refused = refusals(
    command(
        "text-options",
        "no option that says how to tokenize",
        *("int32", "--from", "megatron", "--split-paragraphs"),
    ),
    command("to", "found --to", "int32", "--from", "megatron", "--to", "megatron"),
    command(
        "one-name-twice",
        "files with different names, found two called int32",
        *("int32", "int32.bin", "--from", "megatron"),
    ),
    command(
        "the-second-of-two",
        "int32.bin: token 7: expected",
        *("uint16", "int32", "--from", "megatron"),
        damage=overwrite(".bin", 28, "<i", -1),
        out="new",
    ),
    Refused(
        "a-larger-vocabulary",
        lambda folder: index_tokens(read_megatron(FIXTURES / "uint16"), folder / "out", vocab_size=70_000),
        r"uint16\.bin: ids: expected 4 bytes.*70000, found 2 bytes\. Name the tokenizer",
    ),
    Refused(
        "a-file-that-shrinks",
        lambda folder: index_tokens(
            replace(read_megatron(FIXTURES / "uint16"), offsets=np.array([0, 10**6])),
            folder / "out",
            vocab_size=60_000,
        ),
        r"uint16\.bin: size: expected 2000000 bytes, found a file that shrinks",
    ),
    Refused(
        "a-file-that-cannot-be-read",
        unreadable,
        r"uint16\.bin: expected a readable file, found Invalid argument",
    ),
    Refused(
        "a-document-of-2-31-tokens",
        lambda _: write_megatron_index(BytesIO(), np.array([0, 7, 7 + 2**31]), np.dtype("uint16")),
        r"document: 1: expected fewer than 2\*\*31 tokens: .*found 2147483648",
    ),
    command("no-ds-files", "a folder with .ds files", "tokenizer", "--from", "datatrove"),
    command(
        "chat-for-megatron",
        "expected text: it learns every token",
        *("documents.jsonl", "--to", "megatron", "--chat", "--chat-template", "t.jinja"),
    ),
    *(
        Refused(f"blend-{' '.join(blend)}", lambda _, blend=blend: parse_blend(blend, "x"), "data path")
        for blend in ([], ["1", "a", "b", "c"], *(["1", "a", n, "b"] for n in ("0", "-1", "nan", "inf")))
    ),
)
