"""Token files of Megatron and datatrove that do not fit are refused, and nothing is left beside them."""

import shutil
import struct
from functools import partial
from pathlib import Path

from support.command_lines import call_command
from support.damage import truncate
from support.refusals import Refused, refusals
from trilith.data.foreign_tokens import index_tokens, read_datatrove
from trilith.data.megatron import parse_blend, read_megatron

FIXTURES = Path(__file__).parent / "foreign_tokens"
#: Where the parts of a fixture's ``.idx`` begin: lengths, pointers and bounds of 6 documents.
LENGTHS, POINTERS, BOUNDS = 34, 34 + 6 * 4, 34 + 6 * 12


def copies(folder, name="int32"):
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"{name}{suffix}", folder / f"int32{suffix}")


def megatron(why, damage, says, out="new/tokens"):
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
    return megatron(why, overwrite(".idx", at, form, value), says)


def cut(ending, size):
    return lambda folder: truncate(folder / f"int32{ending}", size)


def longer(ending, count):
    def damage(folder):
        with (folder / f"int32{ending}").open("ab") as file:
            file.write(bytes(count))

    return damage


test_megatron_files_that_do_not_fit_are_refused = refusals(
    megatron("no-index", lambda folder: (folder / "int32.idx").unlink(), "int32.idx: expected a file"),
    megatron("no-tokens", lambda folder: (folder / "int32.bin").unlink(), "int32.bin: expected a file"),
    megatron("half-a-header", cut(".idx", -130), "at least 34 bytes, a whole header, found 32"),
    megatron("index-too-long", longer(".idx", 1), "162 bytes for 6 sequences"),
    megatron("F6-odd-length", cut(".bin", -1), "1008 bytes, 252 ids of 4 bytes"),
    megatron("more-tokens", longer(".bin", 4), "1008 bytes, 252 ids of 4 bytes"),
    megatron("int64", partial(copies, name="int64"), "expected uint16 or int32, found int64"),
    megatron("pictures", partial(copies, name="pictures"), "sequence 1: expected mode 0, text, found mode 1"),
    megatron("beside-them", overwrite(".idx", BOUNDS, "<q", 1), "bounds of documents", out="int32"),
    megatron("F8-id", overwrite(".bin", 28, "<i", 257), "token 7: expected 0 to 256, the tok.*found 257"),
    megatron("F5-sign", overwrite(".bin", 28, "<i", -1), "token 7: expected 0 to 256, the tok.*found -1"),
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


def command(why, says, *words):
    """State a call of ``trilith tokenize`` in a folder with the files of others."""

    def given(folder):
        shutil.copytree(FIXTURES, folder, dirs_exist_ok=True)
        (folder / "t.jinja").write_text(MARKED)

    words = ["tokenize", *words, "--tokenizer", "tokenizer", "--out", "out"]
    return Refused(why, lambda folder: call_command(folder, *words), says, given=given)


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
