"""Batches, rows, mixtures and conversations that cannot be are refused."""

import math
from functools import partial

import numpy as np
import torch
from support.refusals import Refused, refusals
from support.token_files import write_token_file
from trilith.data import Batch, TokenFile
from trilith.data.batches import GlobalBatches, Mixture
from trilith.data.mixture import LONGEST_PERIOD, Interleave
from trilith.data.rows import SampleRows, rows_of
from trilith.data.shuffle import permute, positions_of
from trilith.data.text.chat_formats import conversation_of
from trilith.layers import IGNORE


def raw(why, call, says):
    """State a call that needs no files."""
    return Refused(why, lambda folder: call(), says)


test_places_in_an_epoch_that_cannot_be_are_refused = refusals(
    [
        raw("E13-batch-not-divisible", partial(positions_of, 0, 10, 0, 4), ": global_batch: "),
        raw("E11-batch-of-nothing", partial(positions_of, 0, 0), ": global_batch: "),
        raw("negative-step", partial(positions_of, -1, 4), ": step: "),
        raw("step-past-int64", partial(positions_of, 2**62, 4), ": step: "),
        raw("negative-seed", partial(permute, [0], 1, -1, 0), ": seed: "),
        raw("F1-no-samples", partial(permute, [], 0, 1, 0), ": samples: "),
        *(
            raw(f"mixture-{why}", partial(Interleave, weights), "mixture")
            for why, weights in (
                ("of-nothing", []),
                ("zero", [1.0, 0.0]),
                ("negative", [1.0, -2.0]),
                ("not-a-number", [1.0, math.nan]),
                ("infinite", [math.inf]),
                ("too-many", [1] * (LONGEST_PERIOD + 1)),
            )
        ),
    ]
)


def tokens(folder, count, name="a", fingerprint="t"):
    return write_token_file(folder / name, [np.arange(count)], tokenizer_fingerprint=fingerprint)


def of_tokens(why, count, call, says):
    """State a call with a file of ``count`` tokens."""
    return Refused(
        why, lambda folder: call(TokenFile.open(folder / "a")), says, given=partial(tokens, count=count)
    )


def mixed(folder):
    return Mixture([(TokenFile.open(folder / name), 1) for name in "ab"])


def two_files(folder, **second):
    tokens(folder, 99)
    tokens(folder, name="b", **second)


def batch_of(ids, labels):
    return Batch(torch.tensor([ids]), torch.tensor([labels])).check_ids


test_batches_that_cannot_be_are_refused = refusals(
    [
        of_tokens("F2-shorter-than-a-sequence", 8, lambda file: GlobalBatches(file, 8, 1, 0), "at least 9"),
        Refused(
            "F2-one-file-of-a-mixture",
            lambda folder: GlobalBatches(mixed(folder), 8, 1, 0),
            "b.bin",
            given=partial(two_files, count=8),
        ),
        Refused(
            "mixture-of-two-tokenizers",
            mixed,
            "one tokenizer",
            given=partial(two_files, count=99, fingerprint="u"),
        ),
        raw("mixture-of-no-files", partial(Mixture, []), "at least one"),
        of_tokens(
            "E13-batch-not-divisible-by-ranks",
            99,
            lambda file: GlobalBatches(file, 8, 6, 0).batch(0, 0, 4),
            "multiple of the 4",
        ),
        of_tokens("E11-batch-of-nothing", 99, lambda file: GlobalBatches(file, 8, 0, 0), "global_batch"),
        of_tokens("E11-no-length", 99, lambda file: GlobalBatches(file, 0, 1, 0), "sequence_length"),
        of_tokens("negative-seed", 99, lambda file: GlobalBatches(file, 8, 1, -1), "seed"),
        # Ids are compared before the batch goes to a device; an ignored label is not outside.
        *(
            raw(f"F4-{why}", partial(batch_of(ids, labels), 7), f"{what}: expected 0 to 6, .*found {bad}")
            for why, ids, labels, what, bad in (
                ("id-not-below-the-vocabulary", [0, 7], [0, 6], "token id", 7),
                ("ignored-id", [IGNORE, 1], [0, 6], "token id", IGNORE),
                ("negative-label", [0, 6], [0, -1], "label", -1),
            )
        ),
    ]
)


def chat(folder, lengths):
    """Write a chat set of samples of these lengths."""
    return write_token_file(folder / "a", [range(n) for n in lengths], [[1] * n for n in lengths])


def of_chat(why, lengths, call, says):
    return Refused(
        why, lambda folder: call(TokenFile.open(folder / "a")), says, given=partial(chat, lengths=lengths)
    )


test_rows_that_cannot_be_are_refused = refusals(
    [
        of_chat(
            "sample-that-no-row-holds",
            range(1, 7),
            lambda file: SampleRows(file, 4, packed=True, overlong="refuse"),
            "at most 5 tokens.*1 longer ones of 6, the longest with 6.*overlong",
        ),
        of_chat(
            "F2-no-sample-fits",
            range(4, 7),
            lambda file: SampleRows(file, 2, packed=True, overlong="drop"),
            "some samples of 2 to 3 tokens, found none",
        ),
        of_chat(
            "unknown-choice",
            range(1, 7),
            lambda file: rows_of(file, 8, "alone", "packed", "refuse"),
            "one of joined, separate, found 'alone'",
        ),
        Refused(
            "F14-nothing-to-learn",
            lambda folder: write_token_file(folder / "d", [[1, 2, 3]], [[0, 0, 0]]),
            "tokens to learn: expected at least one, found none in 0",
        ),
    ]
)

USER = {"role": "user", "content": "q"}

test_another_form_of_conversation_is_refused_by_place_and_key = refusals(
    [
        raw(
            f"{number}-{'-'.join(record)}",
            partial(conversation_of, record, "in.jsonl:4"),
            rf"in\.jsonl:4: .*{says}",
        )
        for number, (record, says) in enumerate(
            [
                ({"text": "x"}, "found the keys text"),
                ({"messages": []}, "messages: expected a list"),
                ({"messages": "hello"}, "messages: expected a list"),
                ({"messages": [["user", "q"]]}, r"messages\[0\]: expected a message"),
                ({"messages": [USER, {"content": "q"}]}, r"messages\[1\]\.role: expected text, found None"),
                ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]\.content: .*found 7"),
                ({"conversations": [{"from": 3, "value": "q"}]}, r"conversations\[0\]"),
                ({"prompt": "q"}, "found the keys prompt"),
                ({"prompt": "q", "completion": 5}, "completion: expected a list"),
                ({"instruction": 4, "output": "a"}, "instruction: expected text, found 4"),
                ({"messages": [USER], "tools": "{"}, "tools: expected a list in JSON"),
                ({"messages": [USER], "tools": [1]}, "tools: expected a list of JSON schemas"),
            ]
        )
    ]
)
