"""Check that a document of text begins with the token that the tokenizer puts before a prompt, by default."""

import json
import shutil

import pytest
from support.token_files import documents_of, stop_tokenizing, write_json_lines
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from trilith.cli.app import run
from trilith.data import TokenFile, token_writer
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_loading import load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.generation.prompts import prompt_ids

TEXTS = ["one fish", "two fish", "red fish"]
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tokenizer that knows a start token and puts it nowhere."""
    folder = tmp_path_factory.mktemp("tokenizer") / "plain"
    train_tokenizer([text * 20 for text in TEXTS], folder, vocab_size=275)
    return folder


def that_puts(before, plain, folder):
    """The same tokenizer with special tokens around a text, as Llama 3's ``tokenizer.json`` has them."""
    shutil.copytree(plain, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single=before, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def starting(plain):
    return that_puts("<s> $A", plain, plain.parent / "starting")


def texts(path):
    return write_json_lines(path, [{"text": text} for text in TEXTS])


def test_a_document_begins_as_a_prompt_does(starting, plain, tmp_path):
    for folder, begin in ((starting, [BOS]), (plain, [])):
        loaded, name = load_tokenizer(folder), tmp_path / folder.name
        file = tokenize([texts(tmp_path / "in.jsonl")], folder, name, workers=1)
        prompts = [prompt_ids(text, loaded, chat=False, system=None, where="here") for text in TEXTS]
        assert documents_of(file) == [[*prompt, EOS] for prompt in prompts]
        assert all(
            prompt == [*begin, *loaded.encode(text)] for prompt, text in zip(prompts, TEXTS, strict=True)
        )
        assert file.index.bos_id == (BOS if begin else None)
        file.verify()


@pytest.mark.parametrize("folder", ["starting", "plain"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_start_token_can_be_asked_for_or_left_out(folder, bos, tmp_path, request):
    path = request.getfixturevalue(folder)
    source, ids = texts(tmp_path / "in.jsonl"), load_tokenizer(path).encode(TEXTS[0])
    file = tokenize([source], path, tmp_path / "out", bos=bos, append_eos=False)
    assert documents_of(file)[0] == ([BOS, *ids] if bos else ids)
    assert file.index.bos_id == (BOS if bos else None)


def test_without_a_start_token_the_index_has_no_key_for_it(plain, starting, tmp_path):
    """And so an index without the key is read: those written before there was one."""
    source = texts(tmp_path / "in.jsonl")
    tokenize([source], plain, tmp_path / "out")
    index = json.loads((tmp_path / "out.json").read_text())
    assert "bos_id" not in index and "seal" in index
    with_one = tokenize([source], starting, tmp_path / "with")
    without = tokenize([source], starting, tmp_path / "without", bos=False)
    assert with_one.fingerprint != without.fingerprint == TokenFile.open(tmp_path / "out").fingerprint


@pytest.mark.parametrize(("before", "expected"), [("$A </s>", False), ("<s> $A </s>", True)])
def test_an_end_token_that_a_tokenizer_adds_is_no_start_token(before, expected, plain, tmp_path):
    folder = that_puts(before, plain, tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if not expected:  # one token is both, as GPT-2's
        config["bos_token"] = config["eos_token"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "special_tokens_map.json").unlink()
        assert load_tokenizer(folder).bos_id == EOS
    assert load_tokenizer(folder).starts_with_bos is expected


def test_an_interrupted_job_with_the_other_choice_begins_anew(starting, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "MARK_EVERY", 0.0)
    source = texts(tmp_path / "in.jsonl")
    stop_tokenizing([source], starting, tmp_path / "out")
    file = tokenize([source], starting, tmp_path / "out", bos=False, workers=1)
    assert not any(BOS in ids for ids in documents_of(file))


@pytest.mark.parametrize(
    ("choice", "begin"), [([], "the start token, id 1"), (["--no-bos"], "no start token")]
)
def test_tokenize_says_what_each_document_begins_with(choice, begin, starting, tmp_path, capsys):
    words = ["tokenize", str(texts(tmp_path / "in.jsonl")), "--tokenizer", str(starting), *choice]
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    assert f"each document begins with {begin}\n" in capsys.readouterr().out
