"""Batches, rows, mixtures and conversations that cannot be are refused."""

from functools import partial
from math import inf, nan

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


test_places_in_an_epoch_that_cannot_be_are_refused = refusals([
    raw("E13-batch-not-divisible", partial(positions_of, 0, 10, 0, 4), ": global_batch: "),
    raw("E11-batch-of-nothing", partial(positions_of, 0, 0), ": global_batch: "),
    raw("negative-step", partial(positions_of, -1, 4), ": step: "),
    raw("step-past-int64", partial(positions_of, 2**62, 4), ": step: "),
    raw("negative-seed", partial(permute, [0], 1, -1, 0), ": seed: "),
    raw("F1-no-samples", partial(permute, [], 0, 1, 0), ": samples: "),
    raw("mixture-of-nothing", partial(Interleave, []), "mixture"),
    raw("mixture-of-too-many", partial(Interleave, [1] * (LONGEST_PERIOD + 1)), "mixture"),
    *(raw(f"mixture-{bad}", partial(Interleave, [1.0, bad]), "mixture") for bad in (0.0, -2.0, nan, inf)),
    raw("mixture-of-no-files", partial(Mixture, []), "at least one"),
])  # fmt: skip


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
    return GlobalBatches(Mixture([(file, 1) for file in files]), 8, 1, 0)


def check_ids(ids, labels):
    Batch(torch.tensor([ids]), torch.tensor([labels])).check_ids(7)


SAMPLES = range(1, 7)

test_batches_and_rows_that_cannot_be_are_refused = refusals([
    files("F2-shorter-than-a-sequence", "at least 9", lambda a: GlobalBatches(a, 8, 1, 0), a=8),
    files("F2-one-file-of-a-mixture", "a_short.bin", mixed, a=99, a_short=8),
    files("mixture-of-two-tokenizers", "one tokenizer", mixed, a=99, b=99),
    files("E13-ranks", "multiple of the 4", lambda a: GlobalBatches(a, 8, 6, 0).batch(0, 0, 4), a=99),
    files("E11-batch-of-nothing", "global_batch", lambda a: GlobalBatches(a, 8, 0, 0), a=99),
    files("E11-no-length", "sequence_length", lambda a: GlobalBatches(a, 0, 1, 0), a=99),
    files("negative-seed", "seed", lambda a: GlobalBatches(a, 8, 1, -1), a=99),
    # Ids are compared before the batch goes to a device; an ignored label is not outside.
    raw("F4-id", partial(check_ids, [0, 7], [0, 6]), "token id: expected 0 to 6, .*found 7"),
    raw("F4-ignored-id", partial(check_ids, [IGNORE, 1], [0, 6]), "token id: .* 0 to 6, .*found -100"),
    raw("F4-negative-label", partial(check_ids, [0, 6], [0, -1]), "label: expected 0 to 6, .*found -1"),
    files(
        "sample-that-no-row-holds",
        "at most 5 tokens.*1 longer ones of 6, the longest with 6.*overlong",
        partial(SampleRows, length=4, packed=True, overlong="refuse"),
        a=SAMPLES,
    ),
    files(
        "F2-no-sample-fits",
        "some samples of 2 to 3 tokens, found none",
        partial(SampleRows, length=2, packed=True, overlong="drop"),
        a=SAMPLES[3:],
    ),
    files(
        "unknown-choice",
        "one of joined, separate, found 'alone'",
        lambda a: rows_of(a, 8, "alone", "packed", "refuse"),
        a=SAMPLES,
    ),
    Refused(
        "F14-nothing-to-learn",
        lambda folder: write_token_file(folder / "d", [[1, 2, 3]], [[0, 0, 0]]),
        "tokens to learn: expected at least one, found none in 0",
    ),
])  # fmt: skip

USER = {"role": "user", "content": "q"}

test_another_form_of_conversation_is_refused_by_place_and_key = refusals([
    raw(f"{number}-{'-'.join(record)}", partial(conversation_of, record, "in:4"), f"in:4: .*{says}")
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
])  # fmt: skip
