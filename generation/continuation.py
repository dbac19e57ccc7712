"""One row's new text: without what ended it, and in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..data.text.tokenizer import Tokenizer

#: What decoding gives for bytes that are no whole character yet.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Continuation:
    """``ids`` are the prompt's; ``stop`` ends a row by id, ``texts`` by what it says. Neither is shown."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], stop: Collection[int], texts: Sequence[str]
    ) -> None:
        self._tokenizer, self._ids, self._stop, self._texts = tokenizer, [*ids], stop, texts
        # Decoded together with the prompt: some tokenizers leave out a space at the start of a text.
        self._before = len(tokenizer.decode(self._ids))
        self._said = 0
        self.tokens: list[int] = []

    def holds_stop(self, tokens: Sequence[int]) -> bool:
        """Tell whether a stop text is in what these ids say."""
        text = self._tokenizer.decode([*tokens])
        return any(stop in text for stop in self._texts)

    def grow(self, token: int) -> str:
        """Take one more token; what may be shown of the text and has not been."""
        self.tokens.append(token)
        text = self.text
        if text.endswith(_UNFINISHED) or token in self._stop:
            return ""
        # The end may be the beginning of a stop text.
        shown = max(len(text) - max((len(stop) - 1 for stop in self._texts), default=0), self._said)
        piece, self._said = text[self._said : shown], shown
        return piece

    def close(self, tokens: Sequence[int]) -> None:
        """These are all its tokens."""
        self.tokens = [*tokens]

    def rest(self) -> str:
        """Return what has not been shown, once there will be no more."""
        piece, self._said = self.text[self._said :], len(self.text)
        return piece

    @property
    def finish(self) -> str:
        """Why it ended: ``stop`` or ``length``."""
        ended = self.tokens and (self.tokens[-1] in self._stop or self.holds_stop(self.tokens))
        return "stop" if ended else "length"

    @property
    def text(self) -> str:
        """The new text, up to a stop text."""
        tokens = self.tokens[:-1] if self.tokens and self.tokens[-1] in self._stop else self.tokens
        text = self._tokenizer.decode(self._ids + tokens)[self._before :]
        return text[: min((text.find(stop) for stop in self._texts if stop in text), default=len(text))]
