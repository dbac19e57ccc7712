"""Build one row's new text: without its stop text, and in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..data.text.tokenizer_loading import Tokenizer

#: Decoding gives this for bytes that are not yet a whole character.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Continuation:
    """Collect a row's new tokens and text. ``ids`` are the prompt's.

    A row ends at an id in ``stop`` or when its text has one of ``texts``; neither is shown.
    """

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], stop: Collection[int], texts: Sequence[str]
    ) -> None:
        self._tokenizer, self._ids, self._stop, self._texts = tokenizer, [*ids], stop, texts
        # Decoded together with the prompt: some tokenizers leave out a space at the start of a text.
        self._before = len(tokenizer.decode(self._ids))
        self._said = 0
        self.tokens: list[int] = []

    def holds_stop(self, tokens: Sequence[int]) -> bool:
        """Tell whether the text of these ids contains a stop text."""
        text = self._tokenizer.decode([*tokens])
        return any(stop in text for stop in self._texts)

    def grow(self, token: int) -> str:
        """Add one token; return the text that may be shown now and was not shown before."""
        self.tokens.append(token)
        text = self.text
        if text.endswith(_UNFINISHED) or token in self._stop:
            return ""
        # The end may be the beginning of a stop text.
        shown = max(len(text) - max((len(stop) - 1 for stop in self._texts), default=0), self._said)
        piece, self._said = text[self._said : shown], shown
        return piece

    def close(self, tokens: Sequence[int]) -> None:
        """Set all tokens of the row."""
        self.tokens = [*tokens]

    def rest(self) -> str:
        """Return the text that was not shown yet, once no more tokens will come."""
        piece, self._said = self.text[self._said :], len(self.text)
        return piece

    @property
    def finish(self) -> str:
        """Return why the row ended: ``stop`` or ``length``."""
        ended = self.tokens and (self.tokens[-1] in self._stop or self.holds_stop(self.tokens))
        return "stop" if ended else "length"

    @property
    def text(self) -> str:
        """Return the new text, up to a stop text."""
        tokens = self.tokens[:-1] if self.tokens and self.tokens[-1] in self._stop else self.tokens
        text = self._tokenizer.decode(self._ids + tokens)[self._before :]
        return text[: min((text.find(stop) for stop in self._texts if stop in text), default=len(text))]
