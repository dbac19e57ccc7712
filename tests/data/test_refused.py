"""Batches, rows, mixtures, conversations and token files that cannot be are refused."""

import hashlib
import os
from functools import partial
from math import inf, nan
from pathlib import Path

import numpy as np
import torch
from support.refusals import Refused, refusals
from support.token_files import batch_at, change_index, write_token_file
from trilith.data import Batch, TokenFile
from trilith.data.batches import GlobalBatches
from trilith.data.rows import SampleRows
from trilith.data.sample_order import LONGEST_PERIOD, Interleave, piece_of
from trilith.data.text.chat_formats import conversation_of
from trilith.data.token_index import check_vocabulary
from trilith.data.token_writer import TokenWriter
from trilith.layers import IGNORE


def raw(why, call, says):
    """State a call that needs no files."""
    return Refused(why, lambda folder: call(), says)


test_mixtures_and_ranks_that_cannot_be_are_refused = refusals(
    raw("E13-batch-not-divisible", partial(piece_of, 10, 0, 4), ": global_batch: "),
    raw("mixture-of-nothing", partial(Interleave, []), "mixture"),
    raw("mixture-of-too-many", partial(Interleave, [1] * (LONGEST_PERIOD + 1)), "mixture"),
    *(raw(f"mixture-{bad}", partial(Interleave, [1.0, bad]), "mixture") for bad in (0.0, -2.0, nan, inf)),
    raw("mixture-of-no-files", partial(GlobalBatches, [], 8, 1, 0), "at least one"),
)


def files(why, says, call, **written):
    """State a call with token files: by name the numbers of tokens of samples, or of one text."""

    def given(folder):
        for name, lengths in written.items():
            text = isinstance(lengths, int)
            documents = [np.arange(count) for count in ([lengths] if text else lengths)]
            learnt = None if text else [np.ones(len(ids), int) for ids in documents]
            write_token_file(folder / name, documents, learnt, tokenizer_fingerprint=name[0])

    return Refused(
        why, lambda folder: call(*(TokenFile.open(folder / name) for name in written)), says, given=given
    )


def mixed(*files):
    return GlobalBatches([(file, 1) for file in files], 8, 1, 0)


def check_ids(ids, labels):
    Batch(torch.tensor([ids]), torch.tensor([labels])).check_ids(7)


SAMPLES = range(1, 7)

test_batches_and_rows_that_cannot_be_are_refused = refusals(
    files("F2-shorter-than-a-sequence", "at least 9", lambda a: GlobalBatches(a, 8, 1, 0), a=8),
    files("F2-one-file-of-a-mixture", "a_short.bin", mixed, a=99, a_short=8),
    files("mixture-of-two-tokenizers", "one tokenizer", mixed, a=99, b=99),
    files("E13-ranks", "multiple of the 4", lambda a: batch_at(GlobalBatches(a, 8, 6, 0), 0, 0, 4), a=99),
    # Ids are compared before the batch goes to a device; an ignored label is not outside.
    raw("F4-id", partial(check_ids, [0, 7], [0, 6]), "token id: expected 0 to 6, .*found 7"),
    raw("F4-ignored-id", partial(check_ids, [IGNORE, 1], [0, 6]), "token id: .* 0 to 6, .*found -100"),
    raw("F4-negative-label", partial(check_ids, [0, 6], [0, -1]), "label: expected 0 to 6, .*found -1"),
    files(
        "sample-that-no-row-holds",
        "at most 5 tokens.*1 longer ones of 6, the longest with 6.*overlong in a recipe",
        partial(SampleRows, length=4, packed=True, overlong="refuse"),
        a=SAMPLES,
    ),
    files(
        "F2-no-sample-fits",
        "some samples of 2 to 3 tokens, found none",
        partial(SampleRows, length=2, packed=True, overlong="drop"),
        a=SAMPLES[3:],
    ),
    Refused(
        "F14-nothing-to-learn",
        lambda folder: write_token_file(folder / "d", [[1, 2, 3]], [[0, 0, 0]]),
        "tokens to learn: expected at least one, found none in 0",
    ),
)

USER = {"role": "user", "content": "q"}

test_another_form_of_conversation_is_refused_by_place_and_key = refusals(
    raw(f"{number}-{'-'.join(record)}", partial(conversation_of, record, "in:4"), f"in:4: .*{says}")
    for number, (record, says) in enumerate(
        [
            ({"text": "x"}, "found the keys text"),
            ({"messages": []}, "messages: expected a list"),
            ({"messages": "hello"}, "messages: expected a list"),
            ({"messages": [["user", "q"]]}, r"messages\[0\]: expected a message"),
            ({"messages": [USER, {"content": "q"}]}, r"messages\[1\]\.role: expected text, found null"),
            ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]\.content: .*found 7"),
            ({"conversations": [{"from": 3, "value": "q"}]}, r"conversations\[0\]"),
            ({"prompt": "q"}, "found the keys prompt"),
            ({"prompt": "q", "completion": 5}, "completion: expected a list"),
            ({"instruction": "q"}, "found the keys instruction"),
            ({"instruction": 4, "output": "a"}, "instruction: expected text, found 4"),
            ({"messages": [USER], "tools": "{"}, "tools: expected a list in JSON"),
            ({"messages": [USER], "tools": [1]}, "tools: expected a list of JSON schemas"),
        ]
    )
)


def write(folder, name="data", documents=([1, 2, 3], [4], [5, 6, 7, 8, 9])):
    write_token_file(folder / name, documents, vocab_size=300)


def open_data(folder):
    return TokenFile.open(folder / "data")


def damaged(why, damage, says, call=open_data):
    def given(folder):
        write(folder)
        damage(folder)

    return Refused(why, call, says, given=given)


def index(why, says, **changes):
    return damaged(f"index-{why}", partial(change_index, **changes), says)


def raw_index(why, says, raw):
    return damaged(f"index-{why}", lambda folder: (folder / "data.json").write_bytes(raw), says)


def with_another_count(folder):
    targets = write_token_file(folder / "data", [[1, 2, 3]], [[0, 1, 1]]).index.targets
    change_index(folder, targets={**targets.model_dump(mode="json"), "tokens": 3})


def of_another(path):
    write(path.parent, "other", [[1, 2], [4, 4], [5, 6, 7, 8, 1]])
    path.with_name(path.name.replace("data", "other")).rename(path)


def offsets(why, values, says, *, rehash=True):
    def damage(folder):
        path = folder / "data.docs.npy"
        np.save(path, values(folder) if callable(values) else np.asarray(values), allow_pickle=True)
        if rehash:
            change_index(folder, documents_sha256=hashlib.sha256(path.read_bytes()).hexdigest())

    return damaged(f"F11-{why}", damage, says)


class MakesAFolder:
    """Show that a pickle was run: it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def ids(why, new, says):
    def call(folder):
        with TokenWriter(folder / "new" / "data", vocab_size=300) as writer:
            writer.add([1])
            writer.add(new)

    return Refused(why, call, says)


test_token_files_that_do_not_fit_are_refused = refusals(
    *(
        damaged(f"{why}-{name}", lambda folder, h=harm, e=ending: h(folder / f"data{e}"), says)
        for ending, name in (
            (".bin", "tokens"),
            (".json", "index"),
            (".docs.npy", "offsets"),
            (".sums", "sums"),
        )
        for why, harm, says in (
            ("F1-empty", lambda path: path.write_bytes(b""), "empty"),
            ("no", Path.unlink, "trilith tokenize" if name == "index" else "nothing there"),
            ("pipe-for", lambda path: [path.unlink(), os.mkfifo(path)], "regular file"),
            ("F7-others", of_another, "CRC-32" if name == "tokens" else "sha256"),
        )
    ),
    Refused(
        "a-text",
        lambda folder: TokenFile.open(folder / "part 0.txt"),
        r"expected a token file, found another file\. Tokenize its text first: .* '.*part 0\.txt'",
        given=lambda folder: (folder / "part 0.txt").write_text("a text"),
    ),
    Refused(
        "nothing",
        lambda folder: TokenFile.open(folder / "nope"),
        r"^nope: expected a token file, found no nope\.json\. Make it with: trilith tokenize TEXT",
    ),
    index("F5-uint16-for-a-vocabulary-of-128256", "uint32", vocab_size=128_256),
    index("F5-wrong-width", "36 bytes", dtype="uint32"),
    index("F5-signed-type", "dtype", dtype="int16"),
    index("of-a-later-version", "version", version=99),
    index("of-before-there-were-seals", "version: expected 2, found 1. Tokenize again", version=1),
    index("number-as-text", "tokens", tokens="9"),
    index("no-tokens", "tokens", tokens=0),
    index("unknown-key", "surprise", surprise=1),
    raw_index("not-json", "JSON", b"{"),
    raw_index("not-an-object", "expected", b"[]"),
    raw_index("too-long", "1,048,576 bytes", b" " * (2**20 + 1)),
    damaged("F6-odd-byte-length", lambda folder: os.truncate(folder / "data.bin", 17), "18 bytes"),
    offsets("offsets-fall", [0, 4, 3, 9], "offset 2"),
    offsets("empty-document", [0, 3, 3, 9], "offset 2"),
    offsets("does-not-start-at-0", [1, 3, 4, 9], "0 to 9"),
    offsets("past-the-end", [0, 3, 4, 10], "0 to 9"),
    offsets("too-few", [0, 3, 9], "shape"),
    offsets("floats", [0.0, 3, 4, 9], "int64"),
    offsets("pickle-is-not-run", lambda f: np.array([0, 3, 4, MakesAFolder(f / "ran")]), "int64"),
    offsets("changed-by-hand", [0, 2, 4, 9], "sha256", rehash=False),
    offsets("far-too-long", np.zeros(4000), "bytes"),
    damaged(
        "verify-names-an-id-outside-the-vocabulary",
        partial(change_index, vocab_size=8),
        "token 7",
        lambda folder: open_data(folder).verify(),
    ),
    Refused(
        "verify-names-another-number-of-tokens-to-learn",
        lambda folder: open_data(folder).verify(),
        r"data\.targets: tokens to learn: expected 3, found 2",
        given=with_another_count,
    ),
    Refused("F8-larger-than-the-models", lambda f: check_vocabulary(300, 299, f / "a"), "at most 299"),
)

test_token_files_that_cannot_be_are_not_written = refusals(
    ids("F4-id-not-below-vocabulary", [300], "300"),
    ids("F5-negative-id", [5, -1, 6], "-1"),
    ids("F5-id-that-would-wrap-in-uint16", [2**16 + 1], "65537"),
    ids("not-whole", [1.5], "whole|integer"),
    Refused("no-token-at-all", lambda folder: write(folder, documents=[]), "at least one"),
    Refused("two-new-folders", lambda folder: write(folder / "a" / "b"), "a folder"),
    damaged("F13-a-name-that-is-taken", lambda folder: None, "an existing file", write),
    *(
        Refused(
            f"strangers-file{ending}",
            write,
            "an existing file",
            given=lambda folder, ending=ending: (folder / f"data{ending}").write_bytes(b"precious"),
        )
        for ending in (".bin", ".docs.npy", ".sums", ".json")
    ),
)
