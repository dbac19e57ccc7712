"""What to continue: prompts given one by one, or in a file, as text or as conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..parallel_state import BadInput
from .tokenizer import Message, Tokenizer

#: Text to continue, or a conversation to answer.
Prompt = str | list[Message]


def read_prompts(given: Sequence[str], file: Path | None) -> list[Prompt]:
    """The prompts of the command line, then those of ``file``: of a ``.jsonl`` each line's ``prompt`` or
    ``messages``, of any other each line that is not blank. ``BadInput`` names file and line.
    """
    prompts: list[Prompt] = [*given]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(file, expected="a text file in UTF-8", found=str(error)) from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(_record(line, f"{file}:{number}") if file.suffix == ".jsonl" else line)
    if not prompts:
        raise BadInput("generate", "prompt", expected="--prompt TEXT or --prompts FILE", found="neither")
    return prompts


def prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer, *, chat: bool, system: str | None, where: object
) -> list[int]:
    """The ids to continue: ``chat`` makes text a user's message, after ``system`` if there is one, and the
    tokenizer's chat template writes it down, up to where the answer begins. A conversation always is chat.
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


def _record(line: str, where: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise BadInput(where, expected="JSON", found=line[:80]) from error
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        text: str = record["prompt"]
        return text
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        expected = "prompt (text) or messages (a list of objects with role and content)"
        raise BadInput(where, expected=expected, found=line[:80])
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def _is_message(one: object) -> bool:
    return isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
