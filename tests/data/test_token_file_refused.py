"""Token files that do not fit together are refused, and ids that cannot be are not written."""

import hashlib
import os
from functools import partial

import numpy as np
from support.refusals import Refused, refusals
from support.token_files import change_index, write_token_file
from trilith.data import TokenFile
from trilith.data.token_writer import TokenWriter
from trilith.data.vocabulary import check_vocabulary


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


def missing(folder, ending):
    (folder / f"data{ending}").unlink()


def empty(folder, ending):
    (folder / f"data{ending}").write_bytes(b"")


def pipe(folder, ending):
    missing(folder, ending)
    os.mkfifo(folder / f"data{ending}")


def of_another(folder, ending):
    write(folder, "other", [[1, 2], [4, 4], [5, 6, 7, 8, 1]])
    (folder / f"other{ending}").rename(folder / f"data{ending}")


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


test_token_files_that_do_not_fit_are_refused = refusals([
    *(
        damaged(f"{why}-{name}", partial(harm, ending=ending), says)
        for ending, name in ((".bin", "tokens"), (".json", "index"), (".docs.npy", "offsets"))
        for why, harm, says in (
            ("F1-empty", empty, "empty"),
            ("no", missing, "trilith tokenize" if name == "index" else "nothing there"),
            ("pipe-for", pipe, "regular file"),
            ("F7-others", of_another, "sha256" if name == "offsets" else "others"),
        )
    ),
    index("F5-uint16-for-a-vocabulary-of-128256", "uint32", vocab_size=128_256),
    index("F5-wrong-width", "36 bytes", dtype="uint32"),
    index("F5-signed-type", "dtype", dtype="int16"),
    index("of-a-later-version", "version", version=99),
    index("number-as-text", "tokens", tokens="9"),
    index("no-tokens", "tokens", tokens=0),
    index("one-token-more", "20 bytes", tokens=10),
    index("unknown-key", "surprise", surprise=1),
    raw_index("not-json", "JSON", b"{"),
    raw_index("not-utf-8", "UTF-8", b"\xff\xfe"),
    raw_index("nested-too-deep", "depth", b"[" * 200_000),
    raw_index("not-an-object", "expected", b"[]"),
    raw_index("too-long", "1,048,576 bytes", b" " * (2**20 + 1)),
    damaged("F6-odd-byte-length", lambda folder: os.truncate(folder / "data.bin", 17), "18 bytes"),
    offsets("offsets-fall", [0, 4, 3, 9], "offset 2"),
    offsets("empty-document", [0, 3, 3, 9], "offset 2"),
    offsets("does-not-start-at-0", [1, 3, 4, 9], "0 to 9"),
    offsets("past-the-end", [0, 3, 4, 10], "0 to 9"),
    offsets("too-few", [0, 3, 9], "shape"),
    offsets("floats", [0.0, 3, 4, 9], "int64"),
    offsets("pickle-is-never-loaded", np.array([0, 3, 4, None]), "int64"),
    offsets("pickle-is-not-run", lambda f: np.array([0, 3, 4, MakesAFolder(f / "ran")]), "int64"),
    offsets("changed-by-hand", [0, 2, 4, 9], "sha256", rehash=False),
    offsets("far-too-long", np.zeros(4000), "bytes"),
    damaged("verify-names-an-id-outside-the-vocabulary", partial(change_index, vocab_size=8), "token 7",
            lambda folder: open_data(folder).verify()),
    Refused("F8-larger-than-the-models", lambda f: check_vocabulary(300, 299, f / "a"), "at most 299"),
])  # fmt: skip

test_token_files_that_cannot_be_are_not_written = refusals([
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
])  # fmt: skip
