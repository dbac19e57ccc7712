"""Chat sets as files: the same bytes from any input and any workers, after a kill too; what is warned of."""

import gzip
import json
import os
import signal

import pyarrow
import pyarrow.parquet
import pytest
from support.token_files import (
    CHATML,
    MARKED,
    TURNS,
    bytes_of,
    stop_tokenizing,
    write_dataset,
    write_json_lines,
    zstd,
)
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from trilith.cli.app import run
from trilith.data import TokenFile, token_writer
from trilith.data.text import tokenize_files
from trilith.data.text.chat_template import Chat, shown
from trilith.data.text.text_and_jsonl import read_blocks
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_loading import FolderTokenizer, load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.testing import run_fresh


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t"
    train_tokenizer([record["messages"][1]["content"] for record in talks(50)], path, vocab_size=280)
    (path / "chat_template.jinja").write_text(TURNS)
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


def test_all_kinds_of_input_and_any_workers_give_the_same_bytes(folder, tmp_path, monkeypatch):
    records = talks(300)
    plain = write_json_lines(tmp_path / "in.jsonl", records)
    packed, small = tmp_path / "in.jsonl.gz", tmp_path / "in.jsonl.zst"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    small.write_bytes(zstd(plain.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "in.parquet")
    kinds = [plain, packed, small, tmp_path / "in.parquet", write_dataset(tmp_path / "set", records)]
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 3000)
    written = []
    for number, path in enumerate(kinds):
        workers = 2 if path == plain else 1
        file = tokenize([path], folder, tmp_path / f"out{number}", chat=Chat(), workers=workers)
        written.append(bytes_of(file.path))
        assert file.index.targets is not None and file.index.targets.left_out == 60
        assert file.index.documents == 240
        file.verify()
    assert all(files == written[0] for files in written)
    file = TokenFile.open(tmp_path / "out0")
    sample = "<s>user\nWhat is 1 and 1?</s><s>assistant\n[[It is 2, as ever.</s>]]"
    assert shown(file, 0, load_tokenizer(folder)) == sample


def test_plain_text_of_a_dataset_folder(folder, tmp_path):
    texts = [{"text": f"row {i}", "n": i} for i in range(40)]
    seen = []
    path = write_dataset(tmp_path / "set", texts)
    file = tokenize(
        [path], folder, tmp_path / "a", workers=1, on_progress=lambda done, tokens: seen.append(done)
    )
    same = tokenize([write_json_lines(tmp_path / "in.jsonl", texts)], folder, tmp_path / "b", workers=1)
    assert file.fingerprint == same.fingerprint and file.index.documents == 40
    size = sum(one.stat().st_size for one in path.glob("*.arrow"))
    assert seen == sorted(seen) and 0.9 * size < seen[-1] <= size


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
    inputs, out = [write_json_lines(tmp_path / "in.jsonl", records)], tmp_path / "out"
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
    assert bytes_of(out) == bytes_of(tmp_path / "b")
    assert not list(tmp_path.glob("*.tmp-*"))


def counted(monkeypatch, call):
    made, begun = tokenize_files._encoder, []
    with monkeypatch.context() as patch:

        def counting(*arguments):
            one = made(*arguments)
            return lambda block: (begun.append(block.first), one(block))[1]

        patch.setattr(tokenize_files, "_encoder", counting)
        call()
    return len(begun)


def test_an_interrupted_job_of_other_input_or_template_begins_anew(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "MARK_EVERY", 0.0)
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 2000)
    path, out = write_json_lines(tmp_path / "in.jsonl", talks(100)), tmp_path / "out"
    other = tmp_path / "other.jinja"
    other.write_text(TURNS.replace("bos_token", "'> '"))

    for count in (100, 101):
        stop_tokenizing([path], folder, out, chat=Chat())
        write_json_lines(path, talks(count))
    whole = counted(monkeypatch, lambda: tokenize([path], folder, out, chat=Chat(other), workers=1))
    fresh = tokenize([path], folder, tmp_path / "b", chat=Chat(other), workers=1)
    assert whole > 1 and bytes_of(out) == bytes_of(fresh.path)


#: What the template with marks says of an answer, and what others do.
ANSWER = "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
TIGHT, SHORT, SPOKEN = (
    MARKED.replace(ANSWER, other)
    for other in (
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}",  # the next turn's special token follows
        "{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}",
        "{{ m.content + '<|im_start|>!' }}{% endgeneration %}{{ '<|im_end|>\n' }}",  # not at the end
    )
)
PLAIN = CHATML.partition("{% if add_generation_prompt")[0]
MISTRAL = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' "
    "else ' ' + m.content + '<|im_end|>' }}{% endfor %}"
)
ENDLESS, HEADED = "no special token at the end of an answer is learnt", "ignores add_generation_prompt"
OTHER = "but the template beside the tokenizer"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    path, trained = tmp_path_factory.mktemp("tokenizer") / "t", ByteLevelBPETokenizer()
    trained.train_from_iterator(["user assistant"], vocab_size=270, show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    wrapped.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)  # of no role, as in Llama 3
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(path)
    return path


def write_talks(path, count=6):
    """Write conversations of which every third has no answer."""
    roles = ["user", "assistant", "user", "assistant"]
    samples = [
        [{"role": role if i % 3 else "user", "content": f"{i} of {count}"} for role in roles]
        for i in range(count)
    ]
    return write_json_lines(path, [{"messages": sample} for sample in samples])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(CHATML, [], id="ChatML"),
        pytest.param(MARKED, [], id="marks"),
        pytest.param(TIGHT, [], id="marks-and-no-blank-behind"),
        pytest.param(MISTRAL, [OTHER], id="no-header-to-learn"),
        pytest.param(SHORT, [f"in 4 samples {ENDLESS}"], id="end-outside-the-marks"),
        pytest.param(SPOKEN, [f"in 4 samples {ENDLESS}"], id="another-special-token-inside"),
        pytest.param(MISTRAL.replace("<|im_end|>", ""), [f"in 4 samples {ENDLESS}", OTHER], id="no-end-mark"),
        pytest.param(PLAIN, [HEADED, OTHER], id="no-generation-prompt"),
        pytest.param(PLAIN + "{#- {% generation %}\n -#}", [HEADED, OTHER], id="marks-in-a-comment"),
    ],
)
def test_the_command_warns(chatml, tmp_path, capsys, template, expected):
    (tmp_path / "chat.jinja").write_text(template)
    words = ["tokenize", str(write_talks(tmp_path / "in.jsonl")), "--tokenizer", str(chatml), "--quiet"]
    assert run([*words, "--chat-template", str(tmp_path / "chat.jinja"), "--out", str(tmp_path / "out")]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(expected)
    assert all(words in line for words, line in zip(expected, warnings, strict=True))
    index = json.loads((tmp_path / "out.json").read_text())
    assert ("unended" in index["targets"]) == any(ENDLESS in words for words in expected)


def test_the_command_loads_the_tokenizer_once_for_all_that_it_says(chatml, tmp_path, capsys, monkeypatch):
    write_talks(tmp_path / "in.jsonl")
    (tmp_path / "chat.jinja").write_text(SHORT)
    monkeypatch.chdir(tmp_path)
    words = (
        f"tokenize in.jsonl --tokenizer {chatml} --workers 1 --chat-template chat.jinja --out out --show 4"
    )
    loads, load = [], FolderTokenizer.__init__
    monkeypatch.setattr(FolderTokenizer, "__init__", lambda *given: loads.append(given) or load(*given))
    assert run(words.split()) == 0
    assert capsys.readouterr().out.count("--- sample") == 4
    assert len(loads) == 2  # and once for the job


def test_the_count_outlives_an_interruption(chatml, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "MARK_EVERY", 0.0)
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 500)
    (tmp_path / "chat.jinja").write_text(SHORT)
    source, chat = write_talks(tmp_path / "in.jsonl", 30), Chat(tmp_path / "chat.jinja")

    stop_tokenizing([source], chatml, tmp_path / "out", after=2, chat=chat)
    file = tokenize([source], chatml, tmp_path / "out", chat=chat, workers=1)
    assert file.index.targets is not None
    assert (file.index.targets.unended, file.index.targets.left_out) == (20, 10)
