"""Texts, conversations, templates and tokenizers that cannot be are refused."""

import gzip
import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import pyarrow.parquet
from support.damage import truncate
from support.refusals import Refused, refusals
from support.token_files import CHATML, write_dataset, write_json_lines, write_token_file, zstd
from trilith.data import TokenFile
from trilith.data.text.chat_formats import Conversation
from trilith.data.text.chat_template import Chat, ChatTemplate
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_loading import load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer

TOKENIZER = Path(__file__).parent / "foreign_tokens" / "tokenizer"
#: 10**15, as Thrift codes it.
TO_15 = b"\x80\x80\xb4\xcc\xd4\xdf\xc6\x03"
TEXTS = [f"{i} and {i} is {2 * i}, as ever." for i in range(50)]
GOOD = b'{"text": "fine"}\n'


def put(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def text(why, name, content, says, **options):
    """State a file that is to be tokenized, and its bytes; or what makes it."""
    given = content if callable(content) else put(name, content)

    def call(folder):
        tokenize([folder / name], TOKENIZER, folder / "new" / "out", **{"workers": 1} | options)

    return Refused(why, call, says, given=given)


def nothing(folder):
    pass


def parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "n": [1]}), folder / "in.parquet")


def parquet_that_states(coded):
    """Write 7,777 rows, and put another number, as Thrift codes it, wherever the footer states them."""

    def write(folder):
        path = folder / "in.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 7777}), path)
        raw = path.read_bytes()
        footer = raw[-8 - int.from_bytes(raw[-8:-4], "little") : -8]
        edited = footer.replace(b"\xc2\x79", coded)
        path.write_bytes(raw[: -8 - len(footer)] + edited + len(edited).to_bytes(4, "little") + b"PAR1")

    return write


test_texts_that_cannot_be_tokenized_are_refused_by_file_and_line = refusals(
    *(
        text(why, "in.jsonl", content, says)
        for why, content, says in (
            ("bad-line", GOOD * 2 + b'{"text": \n' + GOOD, r"in\.jsonl:3: .*JSON, .* at column"),
            ("not-a-line", b'{\n"text": "a"}\n', r"in\.jsonl:1: .* whole object a line"),
            ("not-an-object", GOOD + b'["text"]\n', r"in\.jsonl:2: .*found a list"),
            ("a-key-twice", GOOD + b'{"text": "a", "text": "b"}\n', r"in\.jsonl:2: .*'text' twice"),
            ("many-digits", GOOD + b'{"text": "a", "n": %s}' % (b"1" * 5000), r"in\.jsonl:2: .*5,000 digits"),
            ("no-key", b'{"body": "x"}\n', r"in\.jsonl:1: .*body.*--json-key"),
            ("not-text", GOOD + b'{"text": 7}\n', r"in\.jsonl:2: text: .*found 7"),
            ("null", b'{"text": null}\n', r"in\.jsonl:1: text: .*found null. Leave such records out"),
            ("deep-json", GOOD + b"[" * 200_000, r"in\.jsonl:2"),
            ("json-not-utf-8", GOOD + b'{"text": "\xff"}\n', r"in\.jsonl:2: .*0xff"),
            ("surrogate", b'{"text": "a\\ud800"}', r"in\.jsonl:1: .*surrogate"),
            ("F1-no-text", b'\n{"text": ""}\n', r"^in\.jsonl: text: .* found none"),
        )
    ),
    text("text-not-utf-8", "in.txt", b"a\nb\n\xe9\n", r"in\.txt:3: .*0xe9. .*iconv -f latin1"),
    text("text-in-utf-16", "in.txt", "a".encode("utf-16"), r"in\.txt:1: .*0xff. .*iconv -f utf-16"),
    text("F1-empty-file", "in.txt", b"", r"^in\.txt: text: expected at least one document, found none"),
    text("json-array", "in.json", b"[]", "one object a line"),
    text("recipe", "recipe.toml", b"steps = 1", "A recipe is for trilith train"),
    text("gz-cut-short", "in.txt.gz", gzip.compress(b"a" * 999)[:-9], r"in\.txt\.gz"),
    text("gz-that-is-not", "in.txt.gz", b"plain text", r"in\.txt\.gz"),
    text("gz-damaged-inside", "in.txt.gz", gzip.compress(b"")[:10] + b"\xff" * 20, r"in\.txt\.gz"),
    text("zst-that-is-not", "in.txt.zst", b"plain text", "zstandard file"),
    text("zst-cut-short", "in.txt.zst", zstd(os.urandom(999))[:-100], "zstandard file"),
    text("parquet-that-is-not", "in.parquet", b"PAR1 but not really", "Parquet"),
    text("parquet-no-column", "in.parquet", parquet, "columns text, n", json_key="body"),
    text("parquet-of-numbers", "in.parquet", parquet, r"in\.parquet:1: n: expected text", json_key="n"),
    text("parquet-no-rows", "in.parquet", parquet_that_states(b"\x00"), r"^in\.parquet: text: .* found none"),
    text(
        "parquet-more-rows", "in.parquet", parquet_that_states(TO_15), r"^in\.parquet: rows: .* found 7,777"
    ),
    text("missing", "nowhere.txt", nothing, "nothing there"),
    text("folder", "empty", lambda folder: (folder / "empty").mkdir(), "regular file"),
    text("folder-of-the-output", "", nothing, "an output outside the input"),
    text("no-worker", "in.jsonl", GOOD, "workers", workers=0),
)


def talks(count):
    """Return conversations of which the first has no answer."""
    user, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
    return [{"messages": [user, answer if i else user]} for i in range(count)]


def chat(why, name, given, says, tokenizer=TOKENIZER, **options):
    """State conversations that are to be tokenized, and what makes their files."""

    def call(folder):
        how = Chat(folder / "chat.jinja")
        tokenize([folder / name], folder / tokenizer, folder / "out", chat=how, workers=1, **options)

    def given_with_template(folder):
        (folder / "chat.jinja").write_text(CHATML)
        given(folder)

    return Refused(why, call, says, given=given_with_template)


def lines(records):
    return lambda folder: write_json_lines(folder / "in.jsonl", records)


def dataset(name, content=None):
    """Return what makes a data set's folder, in which a file has another content, or None: it is missing."""

    def given(folder):
        path = write_dataset(folder / "set" / "test", talks(3)) / name
        path.unlink() if content is None else path.write_bytes(content)

    return given


@cache
def trained():
    """Return the files of a trained tokenizer, by name."""
    with TemporaryDirectory() as name:
        train_tokenizer([text * 9 for text in TEXTS], Path(name) / "t", vocab_size=280)
        return {path.name: path.read_bytes() for path in (Path(name) / "t").iterdir()}


def tokenizer(folder):
    """Write a trained tokenizer."""
    (folder / "t").mkdir()
    for name, content in trained().items():
        (folder / "t" / name).write_bytes(content)
    return folder / "t"


def with_tokenizer(folder):
    lines(talks(2))(folder)
    tokenizer(folder)


def without_start_token(folder):
    with_tokenizer(folder)
    config = json.loads(trained()["tokenizer_config.json"])
    del config["bos_token"]
    (folder / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "t" / "special_tokens_map.json").unlink()


TOLD = {"messages": [{"role": "system", "content": "Be brief."}, *talks(2)[1]["messages"]]}
WEIGHTLESS = {"messages": [TOLD["messages"][1], {"role": "assistant", "content": "No.", "weight": 0}]}
ARROW = "data-00001-of-00002.arrow"

test_conversations_that_cannot_be_tokenized_are_refused = refusals(
    chat(
        "several-data-sets",
        "set",
        lambda folder: [
            *(write_dataset(folder / "set" / name, talks(3)) for name in ("train", "test")),
            (folder / "set" / "dataset_dict.json").write_text("{}"),
        ],
        r"one data set, found several: test, train",
    ),
    chat("data-set-without-a-file", "set/test", dataset(ARROW), rf"{ARROW}: .* that state\.json"),
    chat("data-set-no-arrow", "set/test", dataset(ARROW, b"no"), rf"{ARROW}: expected a stream of Arrow"),
    chat("data-set-no-state", "set/test", dataset("state.json", b"[]"), "a JSON object"),
    chat(
        "data-set-no-files", "set/test", dataset("state.json", b"{}"), "_data_files: expected a list of file"
    ),
    chat("plain-text", "in.txt", put("in.txt", b"hello"), r"conversations in \.jsonl or \.parquet"),
    chat("text-record", "in.jsonl", lines([*talks(3), {"text": "x"}]), r"in\.jsonl:4: expected messages"),
    chat("two-systems", "in.jsonl", lines([{"system": "b", **TOLD}]), r":1: system: .* found another"),
    chat("nothing-to-learn", "in.jsonl", lines(talks(1)), "tokens to learn: .* none in 1 sample"),
    chat("model", "in.jsonl", with_tokenizer, "found a SentencePiece file", "t/tokenizer.model"),
    chat("weight", "in.jsonl", lines([WEIGHTLESS]), r":1: weight of message 1: expected 1.*as prompt"),
    chat("key-of-texts", "in.jsonl", lines(talks(2)), "template decides, found --json-key", json_key="talk"),
    chat("start-token", "in.jsonl", lines(talks(2)), "the template decides, found --no-bos", bos=False),
    Refused(
        "no-start-token",
        lambda folder: tokenize([folder / "in.jsonl"], folder / "t", folder / "out", bos=True),
        "a begin of sequence token, found none",
        given=without_start_token,
    ),
)


def template(why, content, says, message="x"):
    """State a template, and what the user says, of a conversation that it does not take."""

    def call(folder):
        chat_template = ChatTemplate(load_tokenizer(TOKENIZER), folder / "chat.jinja", {})
        chat_template.encode(Conversation([{"role": "user", "content": message}]), "in:3")

    return Refused(why, call, says, given=put("chat.jinja", content.encode()))


def written_in_python(folder):
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (folder / "vocab.json").write_text("{}")  # any that a tokenizer may have
    (folder / "chat.jinja").write_text(CHATML)


WHOLLY_MARKED = CHATML.replace("{{", "{% generation %}{{").replace("}}", "}}{% endgeneration %}")

test_templates_that_cannot_be_are_refused = refusals(
    Refused(
        "python-tokenizer",
        lambda folder: ChatTemplate(load_tokenizer(folder), folder / "chat.jinja"),
        r"tokenizer\.json: expected one: it maps characters to tokens",
        given=written_in_python,
    ),
    template("raises", "{{ raise_exception('no tools here') }}", r"in:3: chat template: .*no tools here"),
    template("undefined", "{{ messages[0].nothing.more }}", "in:3: chat template: .*Undefined"),
    template(
        "parts", "{{ messages[0].content|trim }}", "in:3: content of message 0: .*parts", [{"text": "x"}]
    ),
    template("surrogate", CHATML, "in:3: expected text, found half a surrogate", "a\ud800b"),
    template("surrogate-marked", WHOLLY_MARKED, "in:3: expected text, found half a surrogate", "a\ud800b"),
    Refused("F9-none", lambda _: ChatTemplate(load_tokenizer(TOKENIZER), None), "--chat-template"),
    Refused(
        "F9-missing",
        lambda folder: ChatTemplate(load_tokenizer(TOKENIZER), folder / "nowhere.jinja"),
        "expected a file, found nothing there",
    ),
    Refused(
        "setting-of-nothing",
        lambda folder: ChatTemplate(load_tokenizer(TOKENIZER), folder / "chat.jinja", {"thinkng": "false"}),
        r"chat\.jinja: --template-set: expected a name in the chat template, found thinkng",
        given=put("chat.jinja", b"{{ thinking }}"),
    ),
    Refused("bad-setting", lambda _: Chat.of(None, ["thinking"]), "thinking: expected name=value"),
)


def targets(why, damage, says):
    def given(folder):
        learnt = [[0, 0, 1, 1, 1]] * 3
        write_token_file(folder / "out", [range(5)] * 3, learnt)
        damage(folder / "out.targets")

    return Refused(why, lambda folder: TokenFile.open(folder / "out"), rf"out\.targets: {says}", given=given)


test_targets_that_do_not_belong_are_refused = refusals(
    targets(
        "F6-cut-short", lambda path: truncate(path, 5), "size: expected .* one for each of.*Copy it again"
    ),
    targets(
        "F7-of-another-set",
        lambda path: path.write_bytes(bytes(1 - byte for byte in path.read_bytes())),
        "bytes 0 to 14: expected the CRC-32",
    ),
    targets("missing", Path.unlink, "expected a file, found nothing there"),
)


def training(why, says, given=nothing, **arguments):
    arguments = {"texts": TEXTS, "vocab_size": 300} | arguments
    return Refused(why, lambda folder: train_tokenizer(folder=folder / "t", **arguments), says, given=given)


test_tokenizers_that_cannot_be_trained_are_refused = refusals(
    training("vocabulary-too-small", "from 260 .* to 1,048,576", vocab_size=100),
    training("vocabulary-too-large", "training a vocabulary", vocab_size=100_000),
    training("F1-no-text", "training a vocabulary", texts=[]),
    training("F1-only-a-blank", "training a vocabulary", texts=[" "]),
    training("folder-with-files", "empty directory", given=tokenizer),
)


def loading(why, damage, says, opens="t"):
    def given(folder):
        damage(tokenizer(folder))

    return Refused(why, lambda folder: load_tokenizer(folder / opens), says, given=given)


def huge(name):
    return lambda folder: os.truncate(folder / name, 2 * 2**30)  # sparse: takes no room


def with_code(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


JSON, MODEL = "tokenizer.json", "tokenizer.model"

test_tokenizers_that_cannot_be_loaded_are_refused_and_no_code_of_theirs_is_run = refusals(
    loading("F9-missing", nothing, "nothing there", "nowhere"),
    loading(
        "F9-folder-without-vocabulary",
        lambda folder: [(folder / name).unlink() for name in (JSON, MODEL)],
        "none of them",
    ),
    loading("F10-2-GB-tokenizer-json", huge(JSON), "268,435,456 bytes"),
    loading("F10-2-GB-model", huge(MODEL), "268,435,456 bytes", f"t/{MODEL}"),
    loading("tokenizer-json-cut-short", put(JSON, b"{"), rf"{JSON}: expected valid JSON"),
    loading("tokenizer-json-without-keys", put(JSON, b"{}"), "AutoTokenizer .*Error: .*config.json too"),
    loading("model-not-a-model", put(MODEL, b"no"), "SentencePiece", f"t/{MODEL}"),
    loading("model-empty", put(MODEL, b""), "SentencePiece", f"t/{MODEL}"),
    loading("git-lfs", put(JSON, b"version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
    loading("another-kind-of-file", put("notes.txt", b"hello"), r"\.txt", "t/notes.txt"),
    loading("the-json-itself", nothing, "Give the folder", f"t/{JSON}"),
    loading("pipe", lambda folder: [(folder / JSON).unlink(), os.mkfifo(folder / JSON)], "regular file"),
    Refused(
        "model-for-a-chat",
        lambda folder: load_tokenizer(folder / "t" / MODEL).chat([{"role": "user", "content": "x"}]),
        r"a Hugging Face tokenizer folder, for a chat template, found a SentencePiece \.model file",
        given=tokenizer,
    ),
    loading("code-of-the-folder", with_code, "."),
)
