"""Read prompts: given one by one or in a file, as text or as conversations."""

from collections.abc import Sequence
from pathlib import Path

from ..data.text.tokenizer_loading import Message, Tokenizer
from ..parallel_state import BadInput
from ..storage.small_files import Line, read_json_lines, read_text
from ..storage.strict_json import shown

#: A file of prompts is read whole, so it has a largest size. Unit: bytes.
PROMPTS = 64 << 20

#: Text to continue, or a conversation to answer.
Prompt = str | list[Message]


def read_prompts(texts: Sequence[str], file: Path | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of ``file``.

    A ``.jsonl`` file has a ``prompt`` or ``messages`` in each line; any other file has a prompt in each line
    that is not blank. ``BadInput`` names file and line.
    """
    prompts: list[Prompt] = [*texts]
    if file is not None:
        if file.suffix == ".jsonl":
            prompts += [_record(line, f"{file}:{line.number}") for line in read_json_lines(file, PROMPTS)]
        else:
            prompts += [line for line in read_text(file, PROMPTS).splitlines() if line.strip()]
    if not prompts:
        raise BadInput("generate", "prompt", expected="--prompt TEXT or --prompt-file FILE", found="neither")
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
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        ids = tokenizer.chat(messages)
    if not ids:
        raise BadInput(where, "prompt", expected="at least one token", found=repr(prompt)[:80])
    return ids


def _record(line: Line, where: str) -> Prompt:
    if line.value is None:
        raise BadInput(line.wrong)
    text, messages = line.value.get("prompt"), line.value.get("messages")
    if isinstance(text, str):
        return text
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        expected = "prompt (text) or messages (a list of objects with role and content)"
        raise BadInput(where, expected=expected, found=shown(line.text))
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
