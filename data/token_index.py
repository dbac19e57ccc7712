"""Read the index of a token file, and check that the files beside it agree with it."""

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from ..parallel_state import BadInput, from_validation, require
from ..storage.safe_open import read_small, stat_regular
from ..storage.small_files import read_json
from ..storage.strict_json import StrictRecord, shown
from .token_sums import Sums, block_count

#: An index is sealed and names the blocks' checksums.
VERSION: Literal[2] = 2

_LARGEST_INDEX = 2**20


class TargetIndex(StrictRecord):
    """Describe, in the index of a chat set, the file that tells which tokens are to be learnt."""

    tokens: int = Field(ge=1, description="how many of the tokens are to be learnt")
    sha256: str
    probe: str = ""
    template_sha256: str = Field(description="of the chat template that the samples went through")
    left_out: int = Field(ge=0, description="samples with nothing to learn, which are not in the file")
    unended: int = Field(
        default=0, ge=0, description="samples that learn an answer and not the special token that ends it"
    )


class TokenIndex(StrictRecord):
    """Describe a token file: the content of ``<name>.json``.

    ``seal`` is the SHA-256 of the other keys, so that no other index can be taken for this one. ``probe``, a
    hash of samples, is no longer written; the checksums of blocks say more.
    """

    version: Literal[2]
    dtype: Literal["uint16", "uint32"]
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    vocab_size: int = Field(ge=1, le=2**32)
    eos_id: int | None = Field(ge=0)
    bos_id: int | None = Field(default=None, ge=0, description="what each document of text begins with")
    tokenizer_fingerprint: str
    tokenizer: str = Field(default="", description="the tokenizer's folder, as seen from this file's")
    sha256: str
    probe: str = ""
    documents_sha256: str
    targets: TargetIndex | None = None
    sums_sha256: str = ""
    seal: str = ""

    def sealed(self) -> Self:
        """Return a copy with its seal."""
        return self.model_copy(update={"seal": self._seal()})

    def check_seal(self, path: Path) -> None:
        """Refuse an index that was changed after it was written."""
        if self.seal != self._seal():
            expected = f"{self._seal()}, the SHA-256 of what the index says"
            todo = "The index was changed after it was made: copy it again, or tokenize again"
            raise BadInput(path, "seal", expected=expected, found=self.seal or "none", todo=todo)

    def _seal(self) -> str:
        # An index without a tokenizer has the seal that it had before there was this key.
        fields = self.model_dump(mode="json", exclude={"seal"} if self.tokenizer else {"seal", "tokenizer"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


_SUFFIXES = (".json", ".bin", ".docs.npy", ".targets", ".sums", ".idx")


@dataclass(frozen=True, slots=True)
class TokenPaths:
    """Name the files of the token file ``name``: four; with ``targets`` if only some tokens are learnt, and
    with Megatron's index if Megatron reads or wrote the tokens too.
    """

    name: Path
    index: Path
    tokens: Path
    documents: Path
    targets: Path
    sums: Path
    megatron: Path

    @property
    def all(self) -> tuple[Path, ...]:
        """Return every file that a token file may have, the index first."""
        return self.index, self.tokens, self.documents, self.targets, self.sums, self.megatron

    @classmethod
    def named(cls, name: Path) -> Self:
        return cls(name, *(name.with_name(name.name + suffix) for suffix in _SUFFIXES))

    @classmethod
    def of(cls, path: str | Path) -> Self:
        """Make it from the name, or from the path of any of the files."""
        path = Path(path)
        require(path.name not in ("", ".."), path, None, "the name of a token file", "a folder")
        suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), "")
        return cls.named(path.with_name(path.name.removesuffix(suffix)))


def little_endian(dtype: str) -> np.dtype[Any]:
    """Return the type on disk, the same on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_index(path: Path) -> TokenIndex:
    """Read the index; each field has the right type and is within bounds."""
    _check_there(path)
    _size_of(path)
    content = read_json(path, _LARGEST_INDEX)
    version = content.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise BadInput(path, "version", expected=VERSION, found=shown(version), todo="Tokenize again")
    try:
        index = TokenIndex.model_validate(content)
    except ValidationError as error:
        raise from_validation(path, error) from None
    fits = index.vocab_size <= 2**16 or index.dtype != "uint16"
    require(fits, path, "dtype", f"uint32 for a vocabulary of {index.vocab_size}", index.dtype)
    index.check_seal(path)
    return index


def _check_there(index: Path) -> None:
    """Refuse a name without a token file; say what makes one: of a text of this name, or Megatron's files."""
    if os.path.lexists(index):
        return
    name = TokenPaths.of(index).name
    words = [str(name) if name.exists() else "TEXT", "--tokenizer", "FOLDER", "--out", "tokens"]
    if TokenPaths.named(name).megatron.is_file():
        words = [str(name), "--from", "megatron", "--out", str(name)]
    command = shlex.join(["trilith", "tokenize", *words])
    require(name.exists(), name, None, "a token file", f"no {index.name}", f"Make it with: {command}")
    kind = "a folder" if name.is_dir() else "another file"
    raise BadInput(name, expected="a token file", found=kind, todo=f"Tokenize its text first: {command}")


def check_size(path: Path, size: int, meaning: str) -> None:
    """Refuse a file of another size."""
    actual = _size_of(path)
    todo = "Copy it again, or tokenize again"
    require(actual == size, path, "size", f"{size} bytes: {meaning}", actual, todo)


def read_sums(paths: TokenPaths, index: TokenIndex) -> tuple[Sums, Sums]:
    """Return the checksums of the blocks of tokens and of targets, after checking the sizes of these files,
    and the hash of the checksums in the index.
    """
    size = index.tokens * little_endian(index.dtype).itemsize
    check_size(paths.tokens, size, f"{index.tokens} tokens of {index.dtype}")
    if index.targets is not None:
        check_size(paths.targets, index.tokens, f"one for each of {index.tokens} tokens")
    tokens, targets = block_count(size), block_count(index.tokens) if index.targets is not None else 0
    path, size = paths.sums, 4 * (tokens + targets)
    check_size(path, size, f"{tokens + targets} checksums")
    content = read_small(path, size)
    digest = hashlib.sha256(content).hexdigest()
    require(digest == index.sums_sha256, path, "sha256", f"{index.sums_sha256}, as the index says", digest)
    sums = np.frombuffer(content, dtype="<u4")
    return sums[:tokens], sums[tokens:]


def read_documents(path: Path, index: TokenIndex) -> NDArray[np.int64]:
    """Return the document offsets, after checking their hash in the index, and that they rise from 0 to the
    number of tokens.
    """
    size, longest = _size_of(path), 8 * (index.documents + 1) + 4096
    require(size <= longest, path, "size", f"at most {longest} bytes", size)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != index.documents_sha256:
        raise BadInput(path, "sha256", expected=f"{index.documents_sha256}, as the index says", found=digest)
    try:
        offsets = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadInput(path, expected="an array of int64", found="something else") from error
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.dtype("<i8"):
        raise BadInput(path, "type", expected="int64", found=getattr(offsets, "dtype", type(offsets)))
    require(offsets.shape == (index.documents + 1,), path, "shape", (index.documents + 1,), offsets.shape)
    if offsets[0] != 0 or offsets[-1] != index.tokens:
        bounds = f"{offsets[0]} to {offsets[-1]}"
        raise BadInput(path, "bounds", expected=f"0 to {index.tokens}", found=bounds)
    falls = np.flatnonzero(np.diff(offsets) <= 0)
    if falls.size:
        at = int(falls[0])
        raise BadInput(path, f"offset {at + 1}", expected=f"more than {offsets[at]}", found=offsets[at + 1])
    return np.asarray(offsets, dtype=np.int64)


def _size_of(path: Path) -> int:
    """Return the size of a regular, non-empty file without opening it: a pipe would block for ever."""
    size = stat_regular(path).st_size
    require(size, path, None, "content", "an empty file")
    return size


def check_vocabulary(vocab_size: int, model_vocab_size: int, where: object) -> None:
    """Refuse a tokenizer or tokens with ids that the model has no rows for. A smaller vocabulary is fine."""
    fits = vocab_size <= model_vocab_size
    todo = "Raise the model's vocab_size or use the model's own tokenizer"
    require(fits, where, "vocab_size", f"at most {model_vocab_size}, the model's", vocab_size, todo)
