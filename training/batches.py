"""Batches of a global step: the same samples in the same order for any number of data ranks.

The only position is the step. Everything else follows from (seed, step) and the token files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..parallel_state import BadInput
from .batch import Batch as Batch
from .interleave import Interleave
from .order import ids_at, permute, positions_of
from .token_index import TokenPaths
from .tokens import TokenFile


class Mixture:
    """Token files drawn from by weight: any prefix holds each file's share of samples to within one.

    Weights are positive and of any sum. A file that runs out starts its next epoch, alone, in a new order.
    All files must come from one tokenizer.
    """

    def __init__(self, parts: Sequence[tuple[TokenFile, float]]) -> None:
        self.files = [file for file, _ in parts]
        self.interleave = Interleave([weight for _, weight in parts])
        for file in self.files[1:]:
            if file.index.tokenizer_fingerprint != self.files[0].index.tokenizer_fingerprint:
                raise BadInput(
                    TokenPaths(file.path).index,
                    "tokenizer_fingerprint",
                    expected=f"{self.files[0].index.tokenizer_fingerprint}, as of {self.files[0].path}",
                    found=file.index.tokenizer_fingerprint,
                    todo="Tokenize all files of a mixture with one tokenizer",
                )

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return max(file.vocab_size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """The files' fingerprints and shares: what a training manifest keeps."""
        shares = zip(self.interleave.shares, self.files, strict=True)
        return " + ".join(f"{share}/{self.interleave.period} of {file.fingerprint}" for share, file in shares)


class GlobalBatches:
    """Batches of ``global_batch`` samples of ``sequence_length`` tokens each.

    A file's samples are windows of ``sequence_length + 1`` tokens that share one token with the next, in file
    order: ``(tokens - 1) // sequence_length`` of them, a rest left out. An epoch gives each once, in an order
    of its own; when a step needs more than is left, or than there is, the next epoch follows in the same
    batch.

    ``BadInput`` for a file with fewer tokens than one window.
    """

    def __init__(
        self, tokens: TokenFile | Mixture, sequence_length: int, global_batch: int, seed: int
    ) -> None:
        if sequence_length < 1:
            raise BadInput("data", "sequence_length", expected="at least 1", found=sequence_length)
        self.sequence_length, self.global_batch, self.seed = sequence_length, global_batch, seed
        self.fingerprint = tokens.fingerprint
        self.vocab_size = tokens.vocab_size
        self._mixture = tokens if isinstance(tokens, Mixture) else Mixture([(tokens, 1)])
        self._counts = [_samples(file, sequence_length) for file in self._mixture.files]
        positions_of(0, global_batch)  # refuses a batch of nothing
        permute([], 1, seed, 0)  # refuses a bad seed

    @property
    def samples(self) -> int:
        """How many different samples there are, over all files."""
        return sum(self._counts)

    def sample_ids(
        self, step: int, data_index: int = 0, data_size: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each sample of the batch, the number of its file and its number in the file."""
        positions = positions_of(step, self.global_batch, data_index, data_size)
        sources, draws = self._mixture.interleave.locate(positions)
        ids = np.empty_like(draws)
        for source in np.unique(sources):
            here = sources == source
            ids[here] = ids_at(draws[here], self._counts[source], self.seed, stream=int(source))
        return sources, ids

    def batch(self, step: int, data_index: int = 0, data_size: int = 1) -> Batch:
        """What data rank ``data_index`` of ``data_size`` gets at ``step`` (from 0).

        All int64 of shape ``[global_batch / data_size, sequence_length]``; the label of a token is the next
        token, so a loss shifts nothing. The ranks' pieces, in order, are the batch of ``data_size=1``.
        ``BadInput`` where ``data_size`` does not divide ``global_batch``, or a token is not below the file's
        ``vocab_size``.
        """
        sources, ids = self.sample_ids(step, data_index, data_size)
        length = self.sequence_length
        windows = np.empty((len(ids), length + 1), dtype=np.int64)
        for row, (source, sample) in enumerate(zip(sources.tolist(), ids.tolist(), strict=True)):
            file = self._mixture.files[source]
            windows[row] = file.tokens[sample * length : sample * length + length + 1]
            if windows[row].max() >= file.vocab_size:
                at = int(np.argmax(windows[row] >= file.vocab_size))
                raise BadInput(
                    TokenPaths(file.path).tokens,
                    f"token {sample * length + at}",
                    expected=f"below {file.vocab_size}",
                    found=windows[row, at],
                    todo="The file was changed after it was made: tokenize again",
                )
        whole = torch.from_numpy(windows)
        return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())


def _samples(file: TokenFile, sequence_length: int) -> int:
    count = (len(file.tokens) - 1) // sequence_length
    if not count:
        raise BadInput(
            TokenPaths(file.path).tokens,
            "tokens",
            expected=f"at least {sequence_length + 1}, one sequence of {sequence_length} and its last label",
            found=len(file.tokens),
            todo="Add text or shorten sequence_length",
        )
    return count
