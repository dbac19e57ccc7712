"""Work and memory are bounded: an input that unpacks to far more, or a template without end, is refused."""

import gzip
import json
import multiprocessing
import resource
import shutil
import struct

import pytest
from trilith.data.text import parquet_and_arrow, tokenizer_loading
from trilith.data.text.chat_formats import Conversation
from trilith.data.text.chat_template import Chat
from trilith.data.text.text_and_jsonl import documents_of, read_blocks
from trilith.data.text.tokenizer_loading import FolderTokenizer, load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.parallel_state import BadInput
from trilith.system import OverLimit, bounded
from trilith.testing import run_fresh

#: Bytes by which a process may grow: the largest document in a few forms, and a window.
ROOM = 768 * 2**20


def _apart(work, arguments, answers):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        work(*arguments)
        found = "accepted"
    except BadInput as error:
        found = str(error)
    answers.put((found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))


def outcome(work, *arguments):
    """Run the work in a process of its own; return its answer, and how many bytes its peak of memory grew."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_apart, args=(work, arguments, answers))
    process.start()
    try:
        process.join(120)
        assert process.exitcode == 0, process.exitcode
        return answers.get()
    finally:
        process.kill()
        process.join()


def read_all(path):
    for block in read_blocks(path, split_paragraphs=False, json_key="text"):
        for _ in documents_of(block, "text"):
            pass


def zstd_bomb(unit, blocks):
    """Write a frame by hand: blocks of 4 bytes that each become 128 KiB of one byte."""
    header = struct.pack("<I", 0xFD2FB528) + bytes([0b0000_0000, (20 - 10) << 3])
    last = blocks - 1
    return header + b"".join(
        struct.pack("<I", (2**17 << 3) | 0b010 | (number == last))[:3] + unit for number in range(blocks)
    )


#: A frame with a window that is wider than the program's.
WIDE_WINDOW = struct.pack("<I", 0xFD2FB528) + bytes([0, (31 - 10) << 3]) + b"\x0b\x00\x00a"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        # 80 KB that become 2.6 GB, as one long document, as a long line or as empty lines.
        ("bomb.txt.zst", zstd_bomb(b"a", 20_000), "at most"),
        ("line.jsonl.zst", zstd_bomb(b"a", 20_000), "at most"),
        ("bomb.jsonl.zst", zstd_bomb(b"\n", 20_000), "at most"),
        ("bomb.txt.gz", gzip.compress(b"a" * 2**20) * 400, "at most"),
        ("wide.txt.zst", WIDE_WINDOW, "zstandard"),
    ],
    ids=["zstandard-bomb", "of-a-line", "of-lines", "gzip-bomb", "wide-window"],
)
def test_a_file_that_would_need_much_memory_is_refused_in_little(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    said, grew = outcome(read_all, path)
    assert said.startswith(str(path)) and says in said and grew < ROOM


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_bomb_is_refused_in_little_memory(tmp_path, nested):
    """One text of 8 MB, stored once, is in 4,000 rows, or 4,000 times in one row: 32 GB."""
    import pyarrow
    import pyarrow.parquet as parquet

    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 4000, pyarrow.int32()), pyarrow.array(["ab" * 4_000_000])
    )
    column = (
        pyarrow.ListArray.from_arrays(pyarrow.array([0, 4000], pyarrow.int32()), text) if nested else text
    )
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"text": column}), path)
    assert path.stat().st_size < 20_000_000
    said, grew = outcome(read_all, path)
    assert said.startswith(str(path)), said
    assert grew < parquet_and_arrow.MOST_MEMORY + ROOM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t"
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    train_tokenizer([" ".join(words[i::7]) for i in range(7)], path, vocab_size=300)
    return path


def test_a_text_too_long_to_be_tokenized_whole_is_refused_by_every_way_to_tokenize(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_loading, "LARGEST_TEXT", 100)
    for path in (folder, folder / "tokenizer.model"):
        loaded = load_tokenizer(path)
        for way in (loaded.encode, loaded.prompt):
            assert way("a" * 100)
            with pytest.raises(BadInput, match="at most 100 characters, found 101"):
                way("a" * 101)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_goes_back_too_often_is_refused(folder, tmp_path, part, capfd):
    shutil.copytree(folder, tmp_path / "t")
    file, how = tmp_path / "t" / "tokenizer.json", {"pattern": {"Regex": "(a+)+b"}}
    kinds = {
        "pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False},
        "normalizer": {"type": "Replace", "content": "x"},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: kinds[part] | how}))
    loaded = load_tokenizer(tmp_path / "t")
    assert loaded.encode("ab")
    for way in (loaded.encode, loaded.prompt):
        with pytest.raises(BadInput, match=r"tokenizer.json: expected patterns .*Regex search error"):
            way("a" * 60)
    assert "panicked" not in capfd.readouterr().err


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = [
    LOOP,
    "{% set ns = namespace(x='a') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{% macro m(n) %}{% for i in range(50) %}{{ m(n + 1) if n < 200 else i }}{% endfor %}{% endmacro %}"
    "{{ m(0) }}",
    "{% for a in range(99999) %}{% for b in range(999) %}{{ 'a' * 99 }}{% endfor %}{% endfor %}",
]


def apply(folder, text):
    template = folder.parent / "template.jinja"
    template.write_text(text)
    conversation = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    loaded = load_tokenizer(folder)
    Chat(template).template_of(loaded, folder).encode(conversation, "in.jsonl:1")


@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_a_template_without_end_is_refused_within_its_time_and_memory(folder, text, monkeypatch):
    monkeypatch.setattr(tokenizer_loading, "TEMPLATE_SECONDS", 0.1)
    monkeypatch.setattr(tokenizer_loading, "TEMPLATE_MEMORY", 2**27)
    said, grew = outcome(apply, folder, text)
    assert said.startswith("in.jsonl:1: ") and "template" in said
    assert grew < ROOM
    said, grew = outcome(ask, folder, text)
    assert "template" in said and grew < ROOM


def ask(folder, text):
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, FolderTokenizer)
    loaded.backend.chat_template = text
    loaded.chat([{"role": "user", "content": "a"}])


def meet_limits():
    import signal

    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(OverLimit, match="64 MiB"), bounded(seconds=9, memory=2**26):
        bytearray(2**27)
    with pytest.raises(OverLimit, match="processor time"), bounded(seconds=0.05):
        while True:
            pass
    with pytest.raises(MemoryError), bounded(seconds=9):
        raise MemoryError
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert len(bytearray(2**27)) == 2**27


def test_limits_end_with_their_block():
    """In a new process: this one holds what other tests have freed, which a block may use again."""
    (code,) = run_fresh(meet_limits, 1, process_group=False)
    assert code == 0, code.output
