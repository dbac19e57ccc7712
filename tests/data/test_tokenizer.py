"""A trained tokenizer gives the same ids from SentencePiece and from the Hugging Face folder, on any text.

A document of text begins with the token that the tokenizer puts before a prompt, by default.
"""

import json
import re
import shutil
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import drawn
from support.token_files import documents_of, stop_tokenizing, write_json_lines
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from trilith.cli.app import run
from trilith.data import TokenFile, token_writer
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_identity import give_the_same_ids
from trilith.data.text.tokenizer_loading import fingerprint_of_folder, load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.generation.text import prompt_ids

#: Modules of the standard library, in parts between blank lines: tabs, tables, characters of many scripts.
LIBRARY = Path(string.__file__).parent
PARTS = [
    part
    for name in ("string", "textwrap", "tokenize", "statistics", "tabnanny", "token", "this", "html/entities")
    for part in re.split(r"(?<=\n\n)", (LIBRARY / f"{name}.py").read_text(encoding="utf-8"))
]
#: Texts that differ first when one setting is wrong.
HARD = [
    *("", " ", "  two blanks lead and trail  ", "\n\n\n", "\tdef f(x):\n\t\treturn   x\n"),
    *("a" + " " * 37 + "b", "-----==========#####"),
    "naïve café, e\u0301, ﬁ, Å, ½, ①",
    "漢字かな交じり文 한국어 العربية हिन्दी",
    "😀👩\u200d👩\u200d👧 \U0001f1e8\U0001f1ed",
    "nul \x00 bell \x07 del \x7f bom \ufeff line \u2028 nbsp \xa0",
    "\r\n windows \r\n",
    "<s> </s> <unk> <0x41> <0x0A> [MASK] <|endoftext|>",
    "0x41 0X1F 1234567890",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(PARTS[::2], path, vocab_size=600)
    return path


@pytest.fixture(scope="module")
def pair(folder):
    return load_tokenizer(folder / "tokenizer.model"), load_tokenizer(folder)


def agree(pair, text):
    spoken, folded = (tokenizer.encode(text) for tokenizer in pair)
    assert spoken == folded
    for tokenizer in pair:
        assert tokenizer.decode(spoken) == text.replace("▁", " ")


@pytest.mark.parametrize("text", HARD, ids=lambda text: ascii(text)[:20])
def test_hard_texts_give_equal_ids_and_come_back(pair, text):
    agree(pair, text)


def test_seen_and_unseen_parts_of_the_standard_library_give_equal_ids(pair):
    for part in PARTS:
        agree(pair, part)
    agree(pair, "".join(PARTS))


@settings(max_examples=drawn(200), deadline=None)
@given(
    text=st.text(st.one_of(st.sampled_from(" \t\n▁aebt<s>/0x1-="), st.characters(codec="utf-8")), max_size=60)
)
def test_any_text_gives_equal_ids(pair, text):
    agree(pair, text)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "qwen3", "gpt_neox"])
def test_a_models_config_beside_it_changes_nothing(folder, pair, tmp_path, model_type):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    beside = load_tokenizer(tmp_path / "model")
    assert beside.vocab_size == 600
    assert all(beside.encode(text) == pair[0].encode(text) for text in HARD)


def test_sizes_special_ids_and_files(folder, pair):
    for tokenizer in pair:
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (600, 1, 2)
    files = ["special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert [*folder.parent.iterdir()] == [folder]


def test_training_is_deterministic(tmp_path):
    for name in ("one", "two"):
        train_tokenizer(iter(PARTS[:40]), tmp_path / name, vocab_size=400)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert load_tokenizer(tmp_path / "one").fingerprint == load_tokenizer(tmp_path / "two").fingerprint


def test_a_long_text_is_learned_from_whole(tmp_path):
    """SentencePiece leaves out texts above 4,192 bytes unless told otherwise."""
    tokenizer = train_tokenizer(["xylophone quartz " * 1000], tmp_path / "t", vocab_size=290)
    assert len(tokenizer.encode("xylophone")) < 3


def test_ctrl_c_while_it_learns_is_no_error_of_its_input(tmp_path):
    def texts():
        yield "a text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(texts(), tmp_path / "t", vocab_size=290)


def test_special_tokens_that_a_folder_adds_are_not_added_but_decoded(folder, pair, tmp_path):
    copy = that_puts("<s> $A </s>", folder, tmp_path / "copy")
    assert Backend.from_file(str(copy / "tokenizer.json")).encode("a b").ids[0] == 1
    adding = load_tokenizer(copy)
    assert adding.encode("a b") == pair[0].encode("a b")
    assert adding.decode([1, *adding.encode("a b"), 2]) == "<s>a b</s>"


def test_half_a_surrogate_pair_is_the_same_error_from_both(pair):
    for tokenizer in pair:
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a\ud800b")


def test_a_tokenizer_that_was_saved_again_gives_the_same_ids_and_a_changed_one_does_not(
    folder, pair, tmp_path
):
    again = tmp_path / "again"
    auto = AutoTokenizer.from_pretrained(folder, add_prefix_space=False, local_files_only=True)
    auto.save_pretrained(again)
    loaded = load_tokenizer(again)
    for text in [*HARD, *PARTS[::5]]:
        assert loaded.encode(text) == pair[0].encode(text) == auto(text)["input_ids"]
    assert fingerprint_of_folder(again) != fingerprint_of_folder(folder)
    assert give_the_same_ids(folder, again) and not give_the_same_ids(folder, tmp_path)
    stated = json.loads((again / "tokenizer.json").read_text())
    merges = [" ".join(merge) for merge in stated["model"]["merges"]]
    left_out = {"ignore_merges": None, "continuing_subword_prefix": ""}  # by some versions
    older = stated["model"] | {**left_out, "merges": merges}
    vocabulary = {"vocab": dict(zip("ab", (1, 0), strict=True))}
    changes = {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    changes |= {"model": stated["model"] | vocabulary, "version": "0"}
    for key, change in [*changes.items(), ("model", older)]:
        (again / "tokenizer.json").write_text(json.dumps(stated | {key: change}))
        assert give_the_same_ids(folder, again) == (key == "version" or change is older), key
    (again / "added_tokens.json").write_text('{"<new>": 600}')
    assert not give_the_same_ids(folder, again)


FISH = ["one fish", "two fish", "red fish"]
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tokenizer that knows a start token and puts it nowhere."""
    folder = tmp_path_factory.mktemp("tokenizer") / "plain"
    train_tokenizer([text * 20 for text in FISH], folder, vocab_size=275)
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
    return write_json_lines(path, [{"text": text} for text in FISH])


def test_a_document_begins_as_a_prompt_does(starting, plain, tmp_path):
    for folder, begin in ((starting, [BOS]), (plain, [])):
        loaded, name = load_tokenizer(folder), tmp_path / folder.name
        file = tokenize([texts(tmp_path / "in.jsonl")], folder, name, workers=1)
        prompts = [prompt_ids(text, loaded, chat=False, system=None, where="here") for text in FISH]
        assert documents_of(file) == [[*prompt, EOS] for prompt in prompts]
        assert all(
            prompt == [*begin, *loaded.encode(text)] for prompt, text in zip(prompts, FISH, strict=True)
        )
        assert file.index.bos_id == (BOS if begin else None)
        file.verify()


@pytest.mark.parametrize("folder", ["starting", "plain"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_start_token_can_be_asked_for_or_left_out(folder, bos, tmp_path, request):
    path = request.getfixturevalue(folder)
    source, ids = texts(tmp_path / "in.jsonl"), load_tokenizer(path).encode(FISH[0])
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
    ("choice", "begin"), [([], "with the start token, id 1"), (["--no-bos"], "without a start token")]
)
def test_tokenize_says_what_each_document_begins_with(choice, begin, starting, tmp_path, capsys):
    words = ["tokenize", str(texts(tmp_path / "in.jsonl")), "--tokenizer", str(starting), *choice]
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    assert f"each document begins {begin}\n" in capsys.readouterr().out
