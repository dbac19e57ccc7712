"""Read prompts, given one by one or in a file, as text or as conversations; build one row's new text, without
its stop text, in pieces that never have to be taken back.
"""

from collections.abc import Sequence, Set
from io import StringIO
from pathlib import Path

from ..data.text.chat_formats import Conversation, conversation_of
from ..data.text.tokenizer_loading import Tokenizer
from ..parallel_state import BadInput, require
from ..storage.small_files import Line, read_json_lines, read_text
from ..storage.strict_json import shown
from ..system import literal

#: A file of prompts is read whole, so it has a largest size. Unit: bytes.
PROMPTS = 64 << 20

#: Text to continue, or a conversation to answer.
Prompt = str | Conversation


def read_prompts(texts: Sequence[str], file: Path | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of ``file``.

    A ``.jsonl`` file has a ``prompt`` or ``messages`` in each line, and may have ``system`` and ``tools``
    beside; any other file has a prompt in each line that is not blank. ``BadInput`` names file and line.
    """
    prompts: list[Prompt] = [*texts]
    if file is not None:
        if file.suffix == ".jsonl":
            prompts += [_record(line, f"{file}:{line.number}") for line in read_json_lines(file, PROMPTS)]
        else:
            # Not splitlines, for which a form feed and other characters end a line as well.
            lines = StringIO(read_text(file, PROMPTS), newline=None)
            prompts += [line.removesuffix("\n") for line in lines if line.strip()]
    require(prompts, "generate", "prompt", "--prompt TEXT or --prompt-file FILE", "neither")
    return prompts


def prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer, *, chat: bool, system: str | None, where: object
) -> list[int]:
    """Return the ids to continue.

    ``chat`` makes a text a user's message, after ``system`` if there is one. The tokenizer's chat template
    then writes it, up to where the answer begins. A conversation is always a chat.
    """
    if isinstance(prompt, str) and not chat:
        ids = tokenizer.prompt(prompt)
    else:
        conversation = _question(prompt) if isinstance(prompt, str) else prompt
        messages = conversation.messages
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        ids = tokenizer.chat(messages, conversation.tools)
    if not ids:
        actual = literal(prompt if isinstance(prompt, str) else prompt.messages)
        raise BadInput(where, "prompt", expected="at least one token", found=actual)
    return ids


def _record(line: Line, where: str) -> Prompt:
    if line.wrong is not None:
        raise line.wrong
    fields = line.value or {}
    text, messages = fields.get("prompt"), fields.get("messages")
    extras = {key: fields[key] for key in ("system", "tools") if fields.get(key)}
    if isinstance(text, str):
        if not extras:
            return text
        messages = _question(text).messages
    if not isinstance(messages, list) or not messages:
        expected = "prompt (text) or messages (a list of objects with role and content)"
        raise BadInput(where, expected=expected, found=shown(line.text))
    return conversation_of({"messages": messages, **extras}, where)


def _question(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


#: Decoding gives this for bytes that are not yet a whole character.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Continuation:
    """Collect a row's new tokens and text. ``ids`` are the prompt's.

    A row ends at an id in ``stop`` or when its text has one of ``texts``; neither is shown. A token is
    decoded with those before it whose text it may change, and not with all of the row.
    """

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], stop: Set[int], texts: Sequence[str]
    ) -> None:
        self._tokenizer, self._ids, self._stop, self._texts = tokenizer, [*ids], stop, texts
        self._longest = max(map(len, texts), default=0)
        # Decoded together with the prompt: some tokenizers leave out a space at the start of a text.
        self._seen = tokenizer.decode(self._ids)
        self._before = len(self._seen)
        self._settled = 0  # the length of the text that no further token changes
        self._context, self._alone = self._ids, ""  # what new tokens are decoded with, and its settled text
        # The tokens behind it, and how many of them end with a whole character.
        self._open, self._whole = list[int](), 0
        #: Where the first stop text begins, once one is complete.
        self.end: int | None = None
        self._said = 0
        self.tokens: list[int] = []

    def grow(self, token: int) -> str:
        """Add one token; return the text that may be shown now and was not shown before."""
        self.tokens.append(token)
        if token in self._stop:
            return ""
        self._open.append(token)
        text = self._tokenizer.decode(self._context + self._open)
        text_so_far = self._seen[: self._settled] + text[len(self._alone) :]
        first = max(self._before, self._settled - self._longest)
        ends = [at for stop in self._texts if (at := text_so_far.find(stop, first)) >= 0]
        self.end = min(ends if self.end is None else [self.end, *ends], default=None)
        if text.endswith(_UNFINISHED):
            return ""
        self._seen = text_so_far
        self._settle()
        end = (len(self._seen) if self.end is None else self.end) - self._before
        # The end may be the beginning of a stop text.
        shown = max(end - max(self._longest - 1, 0), self._said)
        piece, self._said = self._seen[self._before :][self._said : shown], shown
        return piece

    def _settle(self) -> None:
        """Choose what the next token is decoded with: bytes in a row are decoded together, so no such row is
        cut, and it has a text, because a tokenizer may leave out a space at the start.
        """
        last = self._open[self._whole :]
        self._whole = len(self._open)
        if last[0] not in self._tokenizer.byte_ids and (alone := self._tokenizer.decode(last)):
            self._context, self._alone = last, alone
            self._open, self._whole, self._settled = [], 0, len(self._seen)

    def rest(self) -> str:
        """Return the text that was not shown yet, once no more tokens will come."""
        piece, self._said = self.text[self._said :], len(self.text)
        return piece

    @property
    def finish(self) -> str:
        """Return why the row ended: ``stop`` or ``length``."""
        return "stop" if self.end is not None or not self._stop.isdisjoint(self.tokens[-1:]) else "length"

    @property
    def text(self) -> str:
        """Return the new text, up to a stop text."""
        tokens = self.tokens[:-1] if self.tokens and self.tokens[-1] in self._stop else self.tokens
        text = self._tokenizer.decode(self._ids + tokens)[self._before :]
        return text[: min((text.find(stop) for stop in self._texts if stop in text), default=len(text))]
