"""Load a tokenizer, text to ids and back, from a SentencePiece ``.model`` file or a Hugging Face folder."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from ...parallel_state import BadInput, require
from ...storage import DECIDE_IDS, VOCABULARIES
from ...storage.file_names import CONFIG
from ...storage.files_beside_weights import COMPANIONS
from ...storage.safe_open import read_small, stat_regular
from ...storage.small_files import read_json
from ...storage.strict_json import refuse_pointer
from ...system import OverLimit, bounded, quiet_libraries

#: A text is tokenized whole, and takes some 130 bytes of memory a character, 1 GiB for the largest.
LARGEST_TEXT = 2**23

#: Seconds of processor time, and bytes of memory, in which a chat template must have written a conversation.
TEMPLATE_SECONDS, TEMPLATE_MEMORY = 5.0, 2**29

#: No tokenizer file may be larger (the largest public ones are near 35 MB). Unit: bytes.
LARGEST_FILE = 256 * 2**20

#: How SentencePiece names the pieces that stand for a byte.
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

#: One turn of a conversation: its ``role`` and ``content``, and what else a template reads.
Message = dict[str, Any]


class Tokenizer(Protocol):
    """Give a data set what it needs of a tokenizer; ``fingerprint`` is a SHA-256 (hex) of its files'
    contents.
    """

    vocab_size: int  # every id is below it
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    starts_with_bos: bool  # whether its files ask for ``bos_id`` before a text; ``prompt`` then puts it there
    byte_ids: frozenset[int]  # ids that are one byte each; several in a row are decoded together

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens; ``UnicodeEncodeError`` for a lone surrogate."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``, with nothing left out and nothing tidied."""

    def prompt(self, text: str) -> list[int]:
        """Return the ids of ``text`` as at the start of a document.

        The first one is a special token if the tokenizer's files ask for it.
        """

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of a conversation up to the start of the answer, or raise ``BadInput``.

        The chat template writes the conversation.
        """


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer in ``path``: a SentencePiece ``.model`` file, or a folder for ``AutoTokenizer``.

    Nothing is downloaded and no code from the folder is run. ``BadInput`` if the path is missing, holds no
    vocabulary, or a file in it is over 256 MiB or unreadable.
    """
    path = Path(path)
    if path.is_dir():
        return FolderTokenizer(path)
    expected = "a SentencePiece .model file or a tokenizer folder"
    require(path.exists(), path, None, expected, "nothing there")
    todo = "Give the folder that holds it" if path.suffix == ".json" else ""
    require(path.suffix == ".model", path, None, expected, f"a file that ends in {path.suffix!r}", todo)
    return _SentencePieceTokenizer(path)


def check_length(text: str, where: object = "text") -> None:
    """Refuse a text that is too long to be tokenized whole."""
    fits = len(text) <= LARGEST_TEXT
    todo = "Split it; a text file into its paragraphs with --split-paragraphs"
    require(fits, where, "document", f"at most {LARGEST_TEXT:,} characters", f"{len(text):,}", todo)


def check_text(text: str, where: str) -> None:
    """Refuse a text that cannot be tokenized: a longer one than may be, or one with a lone surrogate."""
    check_length(text, where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair, {text[error.start]!r}"
        raise BadInput(where, expected="text", found=half) from error


def _checked(text: str) -> str:
    """Return a text that may be tokenized. Of a lone surrogate the libraries would raise what says little."""
    check_length(text)
    text.encode()
    return text


class _SentencePieceTokenizer:
    """Read a ``.model`` file with SentencePiece itself."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        model = _read(path)
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError) as error:
            raise BadInput(path, expected="a SentencePiece model", found="bytes it cannot read") from error
        self.vocab_size: int = self._processor.GetPieceSize()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.starts_with_bos = False  # a .model does not say, and ``EncodeAsIds`` adds none
        self.byte_ids = frozenset(filter(self._processor.IsByte, map(self._processor.PieceToId, _BYTES)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(_checked(text))
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.DecodeIds(ids)
        return text

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        expected = "a Hugging Face tokenizer folder, for a chat template"
        raise BadInput("generate", "tokenizer", expected=expected, found="a SentencePiece .model file")


def fingerprint_of_folder(path: Path) -> str:
    """Return the SHA-256 (hex) of the files in a tokenizer folder that decide ids; it is not loaded."""
    digest = hashlib.sha256()
    for name in DECIDE_IDS:
        if (path / name).exists():
            content = _read(path / name)
            digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


class FolderTokenizer:
    """Read a Hugging Face folder with ``AutoTokenizer``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not any((path / name).exists() for name in VOCABULARIES):
            expected, todo = f"one of {', '.join(VOCABULARIES)}", "Name a folder with one by --tokenizer"
            raise BadInput(path, expected=expected, found="none of them", todo=todo)
        self.fingerprint = fingerprint_of_folder(path)
        for file in path.iterdir():  # AutoTokenizer opens others too, and would wait for a pipe
            if file.suffix in (".json", ".jinja", ".txt", ".model"):
                size = stat_regular(file).st_size
                require(size <= LARGEST_FILE, file, None, f"at most {LARGEST_FILE:,} bytes", f"{size:,}")
        self.backend = _auto_tokenizer(path)
        # Added tokens may leave holes, so the largest id counts and not how many there are.
        vocabulary = self.backend.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.byte_ids = frozenset(vocabulary[byte] for byte in _BYTES if byte in vocabulary)
        require(self.vocab_size, path, "vocabulary", "at least one token", "none")
        self.bos_id = _id_or_none(self.backend.bos_token_id)
        self.eos_id = _id_or_none(self.backend.eos_token_id)
        # Ask with a text, not with "": if bos and eos are one token, that token could be the end of "".
        self.starts_with_bos = self.bos_id is not None and self.prompt("a")[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with refuse_panics(self.path, self.backend):
            ids: list[int] = self.backend.encode(_checked(text), add_special_tokens=special, verbose=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        with refuse_panics(self.path, self.backend):
            text: str = self.backend.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return text

    def prompt(self, text: str) -> list[int]:
        ids = self._encode(text, special=True)
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.eos_id else ids  # some end every text

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        todo = "Put chat_template.jinja beside the tokenizer, or generate from a plain --prompt"
        require(self.backend.chat_template, self.path, "chat_template", "one, for a chat", "none", todo)
        text, _ = self.apply_template(messages, self.path, add_generation_prompt=True, tools=tools)
        ids: list[int] = self.encode_written(text)["input_ids"]
        return ids

    def apply_template(
        self, messages: Any, where: object, *, marked: bool = False, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return what a chat template writes of messages, and if it is ``marked``, which characters of that
        stand between ``{% generation %}`` and its end. ``BadInput`` if it refuses the messages, or, made
        for text, writes content in parts as Python writes a list.
        """
        text, spans, marks = "", list[tuple[int, int]](), {"return_assistant_tokens_mask": True}
        try:
            with bounded(seconds=TEMPLATE_SECONDS, memory=TEMPLATE_MEMORY):
                if marked:
                    from transformers.utils.chat_template_utils import render_jinja_template

                    # Not the mask that goes with the ids: transformers 5.17, for one, loses the marks behind
                    # a character that makes no token, such as a blank before an answer, or marks all behind.
                    options = {**self.backend.special_tokens_map, **marks, **options}
                    rendered: Any = render_jinja_template([messages], **options)
                    (text,), (spans,) = rendered
                else:
                    text = self.backend.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template raises what it likes
            expected, todo = "one that takes this conversation", "Correct it, or leave the conversation out"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if isinstance(error, OverLimit):
                expected, reason = f"one that writes a conversation within {error}", "one that needs more"
                todo = "Look for a loop or a repetition in it that grows without need"
            raise BadInput(where, "chat template", expected=expected, found=reason, todo=todo) from error
        for number, message in enumerate(messages):
            expected, todo = "text, as the chat template writes content", "Join the texts of the parts"
            if isinstance(content := message.get("content"), list) and str(content) in text:
                key, actual = f"content of message {number}", "a list of parts"
                raise BadInput(where, key, expected=expected, found=actual, todo=todo)
        return text, spans

    def encode_written(self, text: str, **options: Any) -> Any:
        """Encode what a chat template wrote: special tokens that it spells become these tokens, also where
        the tokenizer splits those of other texts. Samples and prompts are both encoded here.
        """
        with refuse_panics(self.path, self.backend):
            options |= {"add_special_tokens": False, "split_special_tokens": False}
            return self.backend(_checked(text), verbose=False, **options)


@contextmanager
def refuse_panics(where: object, tokenizer: Any = None) -> Iterator[None]:
    """Raise ``BadInput`` where the tokenizers library panics: a pattern such as ``(a+)+b`` goes back over
    some texts too often, and the library stops it with an exception that is no ``Exception``.

    Rust prints its own report of a panic first, which is dropped where ``tokenizer`` has such a pattern, and
    where it is only being loaded.
    """
    try:
        with quiet_libraries() if tokenizer is None or _repeats_groups(tokenizer) else nullcontext():
            yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        expected = "patterns that any text can be matched with"
        actual = " ".join(str(error).split())[:200]
        raise BadInput(where, "tokenizer.json", expected=expected, found=actual) from error


@lru_cache(maxsize=8)
def _repeats_groups(tokenizer: Any) -> bool:
    """Return whether a pattern repeats a group, so that a text may be matched in exponentially many ways."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (getattr(backend, "normalizer", None), getattr(backend, "pre_tokenizer", None))
    patterns = b"".join(part.__getstate__() for part in parts if part is not None)
    return re.search(rb"\)[+*{]", patterns) is not None


def _auto_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    with refuse_panics(path):
        try:
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises a bare Exception for a file it cannot parse
            for file in sorted(path.glob("*.json")):
                if file.name in (*COMPANIONS, CONFIG):
                    read_json(file, LARGEST_FILE)  # its error names the file that is none
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            expected = "a tokenizer that AutoTokenizer loads without a network"
            todo = (
                f"It reads {CONFIG} too: take the files that came with the model, or name another --tokenizer"
            )
            raise BadInput(path, expected=expected, found=reason, todo=todo) from error


def _read(path: Path) -> bytes:
    """Return a regular file's bytes; too large a file is refused before anything is read."""
    content = read_small(path, LARGEST_FILE)
    refuse_pointer(content, path)
    return content


def _id_or_none(token: int | None) -> int | None:
    return None if token is None or token < 0 else int(token)
