"""Token files: the ids of a corpus end to end, memory-mapped, with what is needed to trust them.

``<name>.bin``        little-endian uint16 (vocabulary up to 65,536) or uint32, nothing else
``<name>.docs.npy``   int64, where each document starts, and the number of tokens at the end
``<name>.targets``    of a chat set, whose documents are conversations: a byte for each token, 1 where it is
                      to be learnt (the assistant's words), else 0
``<name>.json``       the index: version, type, counts, vocabulary, hashes. Written last: no index, no file
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput
from .token_index import (
    TokenIndex,
    TokenPaths,
    check_targets,
    check_tokens,
    little_endian,
    read_documents,
    read_index,
)
from .tokenizer import check_vocabulary


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An open token file: memory-mapped ``tokens``, and ``documents``, the offsets and then the end.

    ``targets``, memory-mapped too, is what a chat set has beside.
    """

    path: Path
    index: TokenIndex
    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    targets: NDArray[np.uint8] | None = None

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Open by name or by any of its files. Checks sizes, offsets and the probe; reads 4 MiB of tokens.

        ``BadInput`` for files that are missing, empty, cut short, of another data set, or against the index.
        """
        paths = TokenPaths.of(path)
        index = read_index(paths.index)
        check_tokens(paths.tokens, index)
        documents = read_documents(paths.documents, index)
        check_targets(paths.targets, index)
        tokens = np.memmap(paths.tokens, dtype=little_endian(index.dtype), mode="r")
        targets = np.memmap(paths.targets, dtype=np.uint8, mode="r") if index.targets else None
        return cls(paths.name, index, tokens, documents, targets)

    @property
    def vocab_size(self) -> int:
        """Every id is below it (``verify`` and the batches check)."""
        return self.index.vocab_size

    @property
    def fingerprint(self) -> str:
        """Size in bytes and SHA-256 of the tokens, and of the targets: what a training manifest keeps."""
        tokens = f"{self.index.tokens * little_endian(self.index.dtype).itemsize}-{self.index.sha256}"
        return f"{tokens}-{self.index.targets.sha256}" if self.index.targets else tokens

    def check_fingerprint(self, recorded: str) -> None:
        """Refuse to go on with other data than a run was started on."""
        if self.fingerprint != recorded:
            raise BadInput(
                TokenPaths(self.path).tokens,
                "fingerprint",
                expected=f"{recorded}, the data this run was started on",
                found=self.fingerprint,
                todo="Put the original data back or start a new run",
            )

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Refuse tokens that the model has no rows for. A smaller vocabulary than the model's is fine."""
        check_vocabulary(self.vocab_size, model_vocab_size, TokenPaths(self.path).index)

    def verify(self) -> None:
        """Read every token and target: SHA-256, largest id and count must be what the index says."""
        self._verify_targets()
        where, digest = TokenPaths(self.path).tokens, hashlib.sha256()
        for start in range(0, len(self.tokens), 2**24):
            part = np.ascontiguousarray(self.tokens[start : start + 2**24])
            digest.update(part.data)
            if part.max() >= self.vocab_size:
                at = start + int(np.argmax(part >= self.vocab_size))
                raise BadInput(
                    where, f"token {at}", expected=f"below {self.vocab_size}", found=self.tokens[at]
                )
        if digest.hexdigest() != self.index.sha256:
            raise BadInput(where, "sha256", expected=self.index.sha256, found=digest.hexdigest())

    def _verify_targets(self) -> None:
        if self.targets is None or self.index.targets is None:
            return
        where, digest, count = TokenPaths(self.path).targets, hashlib.sha256(), 0
        for start in range(0, len(self.targets), 2**24):
            part = np.ascontiguousarray(self.targets[start : start + 2**24])
            digest.update(part.data)
            if part.max() > 1:
                at = start + int(np.argmax(part > 1))
                raise BadInput(where, f"token {at}", expected="0 or 1", found=self.targets[at])
            count += int(part.sum())
        if count != self.index.targets.tokens:
            raise BadInput(where, "tokens to learn", expected=self.index.targets.tokens, found=count)
        if digest.hexdigest() != self.index.targets.sha256:
            raise BadInput(where, "sha256", expected=self.index.targets.sha256, found=digest.hexdigest())
