"""Write a conversation with a tokenizer's chat template, and mark the assistant's tokens.

Two ways to find them. A template with ``{% generation %}`` marks them itself. Of any other, the beginnings of
the conversation are written out: what an assistant's message adds to the text before it, the prompt to answer
included, is the assistant's. That needs a template that writes a beginning as the whole begins; one that
does not (it drops earlier thoughts, say) is refused.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel_state import BadInput, require
from ...storage.small_files import read_text
from ...system import counted
from ..token_file import TokenFile
from .chat_formats import Conversation
from .tokenizer_loading import FolderTokenizer, Tokenizer, check_length, check_text

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Chat:
    """State how conversations become text: the chat template, if not the tokenizer's own, and its
    variables.
    """

    template: Path | None = None
    variables: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(template: Path | None, settings: Sequence[str]) -> "Chat":
        """Make it from ``name=value`` settings."""
        variables = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            fits = equals and name.isidentifier()
            require(fits, "--template-set", setting, "name=value, such as enable_thinking=false")
            variables[name] = value
        return Chat(template, tuple(sorted(variables.items())))

    def on_one_day(self, loaded: Tokenizer, where: Path) -> "Chat":
        """Return a copy with today's date for a template that asks the clock: all samples get one date."""
        text, variables = self.template_of(loaded, where).text, dict(self.variables)
        if "strftime_now" in text and "date_string" in text:
            variables.setdefault("date_string", date.today().strftime("%d %b %Y"))
        return Chat(self.template, tuple(sorted(variables.items())))

    def template_of(self, loaded: Tokenizer, where: Path) -> "ChatTemplate":
        if not isinstance(loaded, FolderTokenizer):
            expected = "a Hugging Face tokenizer folder, for a chat template"
            raise BadInput(where, expected=expected, found="a SentencePiece file")
        return ChatTemplate(loaded, self.template, dict(self.variables))


class ChatTemplate:
    """Hold the template in ``file``, or the tokenizer's own. ``variables`` are those that it may also use.

    ``BadInput`` if there is no template, or the tokenizer cannot map characters to tokens.
    """

    def __init__(
        self, tokenizer: FolderTokenizer, file: Path | None, variables: Mapping[str, str] | None = None
    ) -> None:
        self._loaded, self._tokenizer = tokenizer, tokenizer.backend
        self._where = file or tokenizer.path
        self.text = read_text(file) if file is not None else _own(tokenizer)
        self.marked = _MARKED.search(_COMMENT.sub("", self.text)) is not None
        self.variables: dict[str, Any] = {
            name: {"true": True, "false": False}.get(value, value)
            for name, value in (variables or {}).items()
        }
        for name in self.variables:
            used, todo = re.search(rf"\b{name}\b", self.text), "Look there how it is spelt, or leave it out"
            require(used, self._where, "--template-set", "a name in the chat template", name, todo)
        added = self._tokenizer.added_tokens_decoder.items()
        self._special = {*self._tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        if not self._tokenizer.is_fast:
            raise BadInput(tokenizer.path, "tokenizer.json", expected="one: it maps characters to tokens")

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the template and its variables."""
        variables = "".join(f"\n{name}={value!r}" for name, value in sorted(self.variables.items()))
        return hashlib.sha256((self.text + variables).encode()).hexdigest()

    def encode(self, conversation: Conversation, where: str) -> tuple[list[int], NDArray[np.uint8]]:
        """Return the ids of the whole conversation, and for each id 1 if it is to be learnt, else 0.

        A token is learnt if any of its characters is the assistant's. ``where`` names the sample in errors.
        """
        text, spans = self._apply(conversation.messages, conversation, where, marked=self.marked)
        check_text(text, where)
        _check_weights(conversation, where)
        if not self.marked:
            spans = self._spans(text, conversation, where)
        elif count := conversation.prompt_length:
            answers = conversation.messages[count]["role"] == "assistant"
            prompt = self._text(
                conversation.messages[:count], conversation, where, add_generation_prompt=answers
            )
            self._check_begins(text, prompt, where)
            spans = [(max(start, len(prompt)), end) for start, end in spans]
        encoding = self._loaded.encode_written(text, return_offsets_mapping=True)
        starts, ends = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        learnt = np.zeros(len(starts), dtype=np.uint8)
        for start, end in spans:
            learnt[(starts < end) & (ends > start)] = 1
        return encoding["input_ids"], learnt

    def learns_the_header(self) -> bool:
        """Tell whether the header of an answer, such as ``<|im_start|>assistant``, would be learnt with it.

        So it is in a template without marks that writes no prompt to answer when asked for one. Tried on a
        question and an answer; False where the template does not take these.
        """
        question, answer = {"role": "user", "content": "3+4"}, {"role": "assistant", "content": "seven7seven"}
        if self.marked:
            return False
        try:
            asked = Conversation([question])
            prompt, bare = self._prompt(asked, 1, "a question"), self._text([question], asked, "a question")
            whole = self._text([question, answer], asked, "an answer")
        except BadInput:
            return False
        header, content, _ = whole.removeprefix(prompt).partition("seven7seven")
        return prompt == bare and whole.startswith(prompt) and bool(content) and bool(header.strip())

    def differs_from_own(self) -> bool:
        """Tell whether the tokenizer's own template, by which runs and exports answer, asks otherwise or is
        not there. Tried on a question; False where this template does not take it.
        """
        question = {"role": "user", "content": "3+4"}
        try:
            prompt = self._prompt(Conversation([question]), 1, "a question")
        except BadInput:
            return False
        ids: list[int] = self._loaded.encode_written(prompt)["input_ids"]
        try:
            return self._loaded.chat([question]) != ids
        except BadInput:
            return True

    def lacks_end(self, ids: list[int], learnt: NDArray[np.uint8]) -> bool:
        """Tell whether an answer's end mark is not learnt: a special token right after the learnt text.

        Nor is one learnt if the last learnt text ends with none, whatever follows. It is learnt if the text,
        apart from blanks, ends with a special token.
        """
        edges = np.flatnonzero(np.diff(learnt, prepend=0, append=0).astype(bool)).reshape(-1, 2).tolist()
        for start, end in edges:
            if [start, end] != edges[-1] and ids[end] not in self._special:
                continue  # a pause in an answer
            last = next((id for id in ids[start:end][::-1] if self._tokenizer.decode([id]).strip()), None)
            if last not in self._special:
                return True
        return False

    def _spans(self, text: str, conversation: Conversation, where: str) -> list[tuple[int, int]]:
        """Return where in the text the assistant speaks."""
        spans, messages = [], conversation.messages
        for number in range(conversation.prompt_length, len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            end = number + 1
            answered = text if end == len(messages) else self._text(messages[:end], conversation, where)
            if number:
                prompt = self._prompt(conversation, number, where)
            else:
                prompt = self._opening(answered, conversation, where)
            self._check_begins(answered, prompt, where)
            self._check_begins(text, answered, where)
            spans.append((len(prompt), len(answered)))
        return spans

    def _opening(self, answered: str, conversation: Conversation, where: str) -> str:
        """Return what stands before an answer that nobody asked for, the first message: templates write no
        conversation without messages. It ends with what they write behind any message to ask for an answer.
        """
        bare = self._text(conversation.messages[:1], conversation, where)
        with_prompt = self._prompt(conversation, 1, where)
        header = with_prompt[_shared(bare, with_prompt) :]
        if not header.strip() or header not in answered:
            return ""
        return answered[: answered.index(header) + len(header)]

    def _prompt(self, conversation: Conversation, count: int, where: str) -> str:
        """Return what stands before an answer to the first ``count`` messages."""
        return self._text(conversation.messages[:count], conversation, where, add_generation_prompt=True)

    def _text(self, messages: Any, conversation: Conversation, where: str, **options: bool) -> str:
        text, _ = self._apply(messages, conversation, where, **options)
        check_length(text, where)
        return text

    def _apply(
        self, messages: Any, conversation: Conversation, where: str, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return what this template writes of these messages, and which characters it marks."""
        data = {"tools": conversation.tools, "chat_template": self.text, **self.variables}
        return self._loaded.apply_template(messages, where, **options, **data)

    def _check_begins(self, whole: str, beginning: str, where: str) -> None:
        if whole.startswith(beginning):
            return
        at = _shared(whole, beginning)
        expected = (
            "a template that writes the beginning of a conversation as it begins the whole one, "
            "to tell who speaks"
        )
        todo = "Mark the assistant's words in the template with {% generation %} and {% endgeneration %}"
        actual = f"{beginning[at : at + 30]!r} for {whole[at : at + 30]!r} at character {at} of {where}"
        raise BadInput(self._where, "chat template", expected=expected, found=actual, todo=todo)


def _shared(text: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))


def _check_weights(conversation: Conversation, where: str) -> None:
    """Refuse answers that are to be learnt and weigh nothing."""
    for number, message in enumerate(conversation.messages):
        weight = message.get("weight", 1)
        if message["role"] == "assistant" and number >= conversation.prompt_length:
            expected, todo = (
                "1: an answer is learnt",
                "Give what is not as prompt, and the rest as completion",
            )
            require(weight == 1, where, f"weight of message {number}", expected, weight, todo)


def _own(tokenizer: FolderTokenizer) -> str:
    try:
        text: str = tokenizer.backend.get_chat_template()
    except ValueError:
        expected = "a chat template"
        todo = "Give a file with --chat-template, or put chat_template.jinja beside the tokenizer"
        raise BadInput(tokenizer.path, "chat_template", expected=expected, found="none", todo=todo) from None
    return text


def shown(file: TokenFile, number: int, tokenizer: Tokenizer) -> str:
    """Sample ``number`` decoded, special tokens included, runs of learnt tokens as ``[[...]]``."""
    assert file.targets is not None
    begin, end = file.documents[number : number + 2].tolist()
    pairs = zip(file.ids(begin, end).tolist(), file.learnt(begin, end).tolist(), strict=True)
    runs = [(learnt, [token for token, _ in run]) for learnt, run in groupby(pairs, key=lambda pair: pair[1])]
    texts = ((learnt, tokenizer.decode(ids)) for learnt, ids in runs)
    return "".join(f"[[{text}]]" if learnt else text for learnt, text in texts)


def warnings_of(file: TokenFile, chat: Chat, tokenizer: Tokenizer, path: Path) -> list[str]:
    """Return one line for each likely mistake in what is learnt; ``tokenizer`` was loaded from ``path``."""
    warnings, targets = [], file.index.targets
    if targets is not None and targets.unended:
        warnings.append(
            f"in {counted(targets.unended, 'sample')} no special token at the end of an answer is learnt: "
            "the model would not learn to stop. Write an end mark in the template, inside {% generation %}; "
            "see with --show 1"
        )
    template = chat.template_of(tokenizer, path)
    if template.learns_the_header():
        warnings.append(
            "the template ignores add_generation_prompt, so what stands before an answer is learnt with it. "
            "Mark the answers with {% generation %} and {% endgeneration %}; see with --show 1"
        )
    if chat.template is not None and template.differs_from_own():
        warnings.append(
            f"runs, exports and servers will not know {chat.template}, but the template beside the "
            f"tokenizer: make it {path / 'chat_template.jinja'} before training"
        )
    return warnings
