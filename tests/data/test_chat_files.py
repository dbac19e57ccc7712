"""Chat sets as files: the same bytes from any kind of input and any number of workers, and after a kill."""

import gzip
import json
import os
import signal

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from trilith.cli.app import run
from trilith.data import TokenFile, token_writer
from trilith.data.text import tokenize_workers
from trilith.data.text.chat_show import shown
from trilith.data.text.chat_template import Chat
from trilith.data.text.text_and_jsonl import read_blocks
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.parallel_state import BadInput, PeerFailed
from trilith.testing import run_fresh

TEMPLATE = (
    "{% for m in messages %}{{ bos_token + m.role + '\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
SUFFIXES = (".bin", ".docs.npy", ".sums", ".targets", ".json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t"
    train_tokenizer([record["messages"][1]["content"] for record in talks(50)], path, vocab_size=280)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def talks(count):
    """Write conversations of which every fifth has no answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and {i}?"},
                {"role": "assistant" if i % 5 else "user", "content": f"It is {2 * i}, as ever."},
            ]
        }
        for i in range(count)
    ]


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def contents(name):
    return [name.with_name(name.name + suffix).read_bytes() for suffix in SUFFIXES]


def dataset(folder, records, files=2):
    """Write a folder as ``Dataset.save_to_disk`` does: Arrow streams, and their names in state.json."""
    folder.mkdir(parents=True)
    each = -(-len(records) // files)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        table = pyarrow.Table.from_pylist(records[number * each : (number + 1) * each])
        path = str(folder / name)
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_all_kinds_of_input_and_any_workers_give_the_same_bytes(folder, tmp_path, monkeypatch):
    records = talks(300)
    plain = jsonl(tmp_path / "in.jsonl", records)
    packed, small = tmp_path / "in.jsonl.gz", tmp_path / "in.jsonl.zst"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    small.write_bytes(zstandard.compress(plain.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "in.parquet")
    kinds = [plain, packed, small, tmp_path / "in.parquet", dataset(tmp_path / "set", records)]
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 3000)
    found = []
    for number, path in enumerate(kinds):
        workers = 2 if path == plain else 1
        file = tokenize([path], folder, tmp_path / f"out{number}", chat=Chat(), workers=workers)
        found.append(contents(file.path))
        assert file.index.targets is not None and file.index.targets.left_out == 60
        assert file.index.documents == 240
        file.verify()
    assert all(one == found[0] for one in found)
    file = TokenFile.open(tmp_path / "out0")
    assert shown(file, 0, folder) == ("<s>user\nWhat is 1 and 1?</s><s>assistant\n[[It is 2, as ever.</s>]]")


def test_plain_text_of_a_dataset_folder(folder, tmp_path):
    texts = [{"text": f"row {i}", "n": i} for i in range(40)]
    seen = []
    path = dataset(tmp_path / "set", texts)
    file = tokenize(
        [path], folder, tmp_path / "a", workers=1, on_progress=lambda done, tokens: seen.append(done)
    )
    same = tokenize([jsonl(tmp_path / "in.jsonl", texts)], folder, tmp_path / "b", workers=1)
    assert file.fingerprint == same.fingerprint and file.index.documents == 40
    size = sum(one.stat().st_size for one in path.glob("*.arrow"))
    assert seen == sorted(seen) and 0.9 * size < seen[-1] <= size


def test_folders_that_are_no_data_set(folder, tmp_path):
    both = tmp_path / "both"
    dataset(both / "train", talks(3))
    dataset(both / "test", talks(3))
    (both / "dataset_dict.json").write_text("{}")
    with pytest.raises(BadInput, match=r"one data set, found several: test, train\. Name one, such .*test"):
        tokenize([both], folder, tmp_path / "out", chat=Chat())
    (both / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(BadInput, match=r"00001-of-00002\.arrow: expected a file that state\.json names"):
        tokenize([both / "train"], folder, tmp_path / "out", chat=Chat())
    (both / "test" / "data-00001-of-00002.arrow").write_bytes(b"arrows")
    with pytest.raises(BadInput, match=r"00001-of-00002\.arrow: expected a stream of Arrow tables"):
        tokenize([both / "test"], folder, tmp_path / "out", chat=Chat(), workers=1)
    (both / "test" / "state.json").write_text("[]")
    with pytest.raises(BadInput, match="a JSON object"):
        tokenize([both / "test"], folder, tmp_path / "out", chat=Chat())


def test_what_is_no_chat_set_is_refused(folder, tmp_path):
    (tmp_path / "in.txt").write_text("hello")
    with pytest.raises(BadInput, match=r"conversations in \.jsonl or \.parquet"):
        tokenize([tmp_path / "in.txt"], folder, tmp_path / "out", chat=Chat())
    path = jsonl(tmp_path / "in.jsonl", [*talks(3), {"text": "x"}])
    with pytest.raises(BadInput, match=r"in\.jsonl:4: expected messages"):
        tokenize([path], folder, tmp_path / "out", chat=Chat())
    with pytest.raises(BadInput, match="found a SentencePiece file"):
        tokenize([path], folder / "tokenizer.model", tmp_path / "out", chat=Chat())
    silent = jsonl(tmp_path / "silent.jsonl", talks(1))
    with pytest.raises(BadInput, match="tokens to learn: expected at least one, found none in 1 samples"):
        tokenize([silent], folder, tmp_path / "out", chat=Chat())
    assert not list(tmp_path.glob("out*"))


def cut_short(name):
    os.truncate(name.with_name(name.name + ".targets"), 5)


def of_others(name):
    path = name.with_name(name.name + ".targets")
    path.write_bytes(bytes(1 - byte for byte in path.read_bytes()))


def missing(name):
    name.with_name(name.name + ".targets").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(cut_short, "size: expected .* one for each of", id="F6-cut-short"),
        pytest.param(of_others, "content: expected the tokens that", id="F7-of-another-set"),
        pytest.param(missing, "expected a file, found nothing there", id="missing"),
    ],
)
def test_targets_that_do_not_belong(folder, tmp_path, harm, words):
    name = tmp_path / "out"
    tokenize([jsonl(tmp_path / "in.jsonl", talks(9))], folder, name, chat=Chat(), workers=1)
    harm(name)
    with pytest.raises(BadInput, match=rf"out\.targets: {words}"):
        TokenFile.open(name)


@pytest.mark.parametrize("value", [1, 2])
def test_verify_reads_every_target(folder, tmp_path, value):
    name = tmp_path / "out"
    file = tokenize([jsonl(tmp_path / "in.jsonl", talks(9))], folder, name, chat=Chat(), workers=1)
    with name.with_name("out.targets").open("r+b") as targets:
        targets.seek(3)
        targets.write(bytes([value]))
    with pytest.raises(BadInput, match="bytes 0 to 366: expected the CRC-32"):
        file.verify()


def killed_on_the_way(inputs, folder, out, chat):
    """Kill the process, which nothing can catch, after three portions."""
    seen = []
    token_writer.MARK_EVERY = 0.0

    def count(done, tokens):
        seen.append(done)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    read_blocks.__kwdefaults__["size"] = 2000
    tokenize(inputs, folder, out, chat=chat, workers=1, on_progress=count)


@pytest.mark.parametrize("chat", [Chat(), None], ids=["chat", "text"])
def test_a_killed_job_goes_on_and_gives_the_same_bytes(folder, tmp_path, monkeypatch, chat):
    records = talks(200) if chat else [{"text": f"Number {i} of many."} for i in range(600)]
    inputs, out = [jsonl(tmp_path / "in.jsonl", records)], tmp_path / "out"
    (code,) = run_fresh(killed_on_the_way, 1, inputs, folder, out, chat, process_group=False)
    assert code == -signal.SIGKILL, code.output
    assert not list(tmp_path.glob("out.bin")) and [*tmp_path.glob("out.tmp-*/journal")]
    (left,) = tmp_path.glob("out.tmp-*/tokens")
    with left.open("ab") as tokens:
        tokens.write(b"half a block")
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 2000)
    resumed = counted(monkeypatch, lambda: tokenize(inputs, folder, out, chat=chat, workers=1))
    anew = counted(monkeypatch, lambda: tokenize(inputs, folder, tmp_path / "b", chat=chat, workers=1))
    assert resumed == anew - 3 > 0
    suffixes = SUFFIXES if chat else (".bin", ".docs.npy", ".sums", ".json")
    for suffix in suffixes:
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes(), suffix
    assert not list(tmp_path.glob("*.tmp-*"))


def counted(monkeypatch, call):
    """Count the blocks that are encoded during the call."""
    made, begun = tokenize_workers._encoder, []
    with monkeypatch.context() as patch:

        def counting(*arguments):
            one = made(*arguments)
            return lambda block: (begun.append(block.first), one(block))[1]

        patch.setattr(tokenize_workers, "_encoder", counting)
        call()
    return len(begun)


def test_an_interrupted_job_of_other_input_or_template_begins_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "MARK_EVERY", 0.0)
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 2000)
    path, out = jsonl(tmp_path / "in.jsonl", talks(100)), tmp_path / "out"
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("bos_token", "'> '"))

    def interrupt(done, tokens):
        raise KeyboardInterrupt

    for change in (lambda: None, lambda: jsonl(path, talks(101))):
        with pytest.raises(KeyboardInterrupt):
            tokenize([path], folder, out, chat=Chat(), workers=1, on_progress=interrupt)
        assert [*tmp_path.glob("out.tmp-*/journal")]
        change()
    whole = counted(monkeypatch, lambda: tokenize([path], folder, out, chat=Chat(other), workers=1))
    fresh = tokenize([path], folder, tmp_path / "b", chat=Chat(other), workers=1)
    assert whole > 1 and contents(out) == contents(fresh.path)


def test_a_dead_worker_costs_only_what_was_on_the_way(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "MARK_EVERY", 0.0)
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 2000)
    path = jsonl(tmp_path / "in.jsonl", talks(100))

    def fail(done, tokens):
        raise PeerFailed("a worker died")

    with pytest.raises(PeerFailed):
        tokenize([path], folder, tmp_path / "out", chat=Chat(), workers=1, on_progress=fail)
    left = counted(monkeypatch, lambda: tokenize([path], folder, tmp_path / "out", chat=Chat(), workers=1))
    assert (
        left
        == counted(monkeypatch, lambda: tokenize([path], folder, tmp_path / "b", chat=Chat(), workers=1)) - 1
    )


def test_the_command_says_what_is_learnt_and_left_out(folder, tmp_path, capsys):
    path = jsonl(tmp_path / "in.jsonl", talks(10))
    words = ["tokenize", str(path), "--tokenizer", str(folder), "--out", str(tmp_path / "sft"), "--chat"]
    assert run([*words, "--show", "1", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "tokens in 8 documents" in said and "2 samples left out" in said
    assert "[[It is 2, as ever.</s>]]" in said
