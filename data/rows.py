"""Make rows for a step from a token file: windows of running text, or whole samples."""

import re
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

import numpy as np

from ..layers import IGNORE
from ..parallel_state import BadInput, require
from .packing import Ids, one_a_row, pack
from .token_file import TokenFile

#: Settings for the documents in a window of text.
Documents = Literal["joined", "separate"]
#: Settings for samples that share rows.
Samples = Literal["packed", "single"]
#: Settings for a sample that is longer than a row.
Overlong = Literal["refuse", "truncate", "drop"]


def rows_of(
    file: TokenFile, length: int, documents: Documents, samples: Samples, overlong: Overlong
) -> "WindowRows | SampleRows":
    """Make windows of running text, or samples of a chat set; ``BadInput`` if the file gives no row.

    Rows are of ``length`` places each; a row is always the same. ``fingerprint``: of the file, and of how
    rows are made from it. ``separate``: whether a row's positions say more than 0, 1, 2 and so on.
    """
    if file.targets is None:
        return WindowRows(file, length, separate=documents == "separate")
    return SampleRows(file, length, packed=samples == "packed", overlong=overlong)


class WindowRows:
    """Cut running text into windows of ``length + 1`` tokens, in file order; a shorter rest is left out.

    Each window shares one token with the next. With ``separate`` documents, positions start again at 0 where
    a document starts, and the last token of a document has no label, because the next token belongs to
    another document.
    """

    def __init__(self, file: TokenFile, length: int, *, separate: bool) -> None:
        self.file, self.length, self.separate = file, length, separate
        self.fingerprint = f"separate documents of {file.fingerprint}" if separate else file.fingerprint
        expected = f"at least {length + 1}, one sequence of {length} and its last label"
        todo = "Add text or shorten sequence_length"
        require(len(self), file.paths.tokens, "tokens", expected, len(file.tokens), todo)

    def __len__(self) -> int:
        return (len(self.file.tokens) - 1) // self.length

    def shared(self, rows: Ids) -> bool:
        """Tell whether one of these rows holds several documents that do not see each other."""
        inside = np.searchsorted(self.file.documents, rows * self.length + np.array([[1], [self.length]]))
        return self.separate and bool((inside[0] < inside[1]).any())

    def fill(self, row: int, ids: Ids, labels: Ids, positions: Ids) -> None:
        """Write a row, which comes filled with 0, ``IGNORE`` and 0, 1, 2 and so on."""
        begin = row * self.length
        window = self.file.ids(begin, begin + self.length + 1)
        ids[:], labels[:] = window[:-1], window[1:]
        if self.separate:
            documents = self.file.documents
            first, last = np.searchsorted(documents, [begin + 1, begin + self.length + 1])
            starts = documents[first:last] - begin
            labels[starts - 1] = IGNORE
            restart(positions, starts[starts < self.length])

    def count_labels(self, rows: Ids) -> int:
        """Return how many labels count in these rows, a row as often as it is named; reads no token."""
        if not self.separate:
            return len(rows) * self.length
        ends = np.searchsorted(self.file.documents, rows * self.length + np.array([[1], [self.length + 1]]))
        return len(rows) * self.length - int((ends[1] - ends[0]).sum())


class SampleRows:
    """Whole samples, each seeing itself alone, as many a row as fit or one; what is left is padding.

    A sample of n tokens takes n - 1 places: its last token is only a label. Labels are what the file's
    targets mark. A sample that no row holds is refused, cut at the row's end, or left out, as ``overlong``
    says.
    """

    separate = True
    #: Whether the padding is a document of its own, and not the end of the last sample.
    padding_separate = False

    def __init__(self, file: TokenFile, length: int, *, packed: bool, overlong: str) -> None:
        assert file.targets is not None
        self.file, self.length = file, length
        self.fingerprint = f"{'packed' if packed else 'single'} samples of {file.fingerprint}"
        self._starts, places = file.documents[:-1], np.diff(file.documents) - 1
        long = places > length
        if overlong == "refuse" and long.any():
            expected = f"at most {length + 1} tokens each, for sequence_length={length}"
            todo = 'Raise the sequence length, or set data.overlong in a recipe to "truncate" or "drop"'
            actual = f"{int(long.sum())} longer ones of {len(long)}, the longest with {places.max() + 1}"
            raise BadInput(file.paths.tokens, "samples", expected=expected, found=actual, todo=todo)
        if long.any():
            self.fingerprint += f", {overlong} at {length}"
        keep = np.flatnonzero(~long & (places > 0) if overlong == "drop" else places > 0)
        expected = f"some samples of 2 to {length + 1} tokens"
        require(keep.size, file.paths.tokens, "samples", expected, "none", "Raise sequence_length")
        self._places = np.minimum(places, length)
        if packed:
            rows = pack(self._places[keep], length)
            self.rows = replace(rows, samples=keep[rows.samples])
        else:
            self.rows = one_a_row(keep)
        #: How many tokens of each sample are labels that count; below 0 where nobody has asked.
        self._learnt = np.full(len(places), -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def shared(self, rows: Ids) -> bool:
        """Tell whether one of these rows holds several samples."""
        return bool((np.diff(self.rows.starts)[rows] > 1).any())

    def fill(self, row: int, ids: Ids, labels: Ids, positions: Ids) -> None:
        at, starts = 0, []
        for sample in self.rows[row].tolist():
            begin, places = int(self._starts[sample]), int(self._places[sample])
            tokens = self.file.ids(begin, begin + places + 1)
            learnt = self.file.learnt(begin + 1, begin + places + 1)
            ids[at : at + places] = tokens[:-1]
            labels[at : at + places] = np.where(learnt, tokens[1:].astype(np.int64), IGNORE)
            starts.append(at)
            at += places
        # The rest is padding without labels. Its positions continue the last sample, which does not see it:
        # so a row of one sample needs no mask because of its padding.
        if self.padding_separate and at < self.length:
            starts += [at]
        restart(positions, np.array(starts, dtype=np.int64))

    def count_labels(self, rows: Ids) -> int:
        different, times = np.unique(rows, return_counts=True)
        first, counts = self.rows.starts[different], np.diff(self.rows.starts)[different]
        # The samples of row after row: the first of each row, and 0, 1, 2 and so on from there.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        samples = self.rows.samples[np.repeat(first, counts) + within]
        for sample in samples[self._learnt[samples] < 0].tolist():
            begin, places = int(self._starts[sample]), int(self._places[sample])
            self._learnt[sample] = self.file.learnt(begin + 1, begin + places + 1).sum()
        return int((self._learnt[samples] * np.repeat(times, counts)).sum())


def restart(positions: Ids, starts: Ids) -> None:
    """Let positions, which are 0, 1, 2 and so on, begin again at each of ``starts``, which rise."""
    origin = np.zeros_like(positions)
    origin[starts] = starts
    positions -= np.maximum.accumulate(origin)


#: A source of a fingerprint, as the classes above and ``SampleOrder`` write it: by keys of a recipe's
#: ``[data]``, what each decides.
_SOURCE = re.compile(
    r"((?P<weights>\d+/\d+) of )?((?P<documents>separate) documents of |(?P<samples>\w+) samples of )?"
    r"(?P<tokens>[\w-]+)(, (?P<overlong>\w+) at \d+)?"
)


def other_rows(stored: str, now: str) -> tuple[str, str, str]:
    """Return the key of a recipe by which two fingerprints of batches differ, and what it was and is."""
    sources = [[_SOURCE.fullmatch(source) for source in text.split(" + ")] for text in (stored, now)]
    for key in ("tokens", "weights", "documents", "samples", "overlong"):
        values = [[match and match[key] for match in source] for source in sources]
        changes = [pair for pair in zip_longest(*values) if pair[0] != pair[1]]
        if changes and key == "tokens":
            break
        if changes:
            was, became = (dict.fromkeys(pair[side] or "joined" for pair in changes) for side in (0, 1))
            return f"data.{key}", ", ".join(was), ", ".join(became)
    return "data.tokens", stored, now
