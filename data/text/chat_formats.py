"""Read records of chat sets in their usual forms into one form: a list of messages.

===========================  ==========================================================================
``messages``                 a list of ``{"role": ..., "content": ...}``
``conversations``            the same as ``{"from": "human", "value": ...}`` (ShareGPT)
``prompt``, ``completion``   two texts, or two lists of messages; only the completion is learnt
``instruction``, ``output``  with ``input``, if any (Alpaca)
===========================  ==========================================================================

Each may have ``system`` beside, the text of a system message before the others, and ``tools``.
"""

import json
from dataclasses import dataclass
from typing import Any

from ...parallel_state import BadInput, require
from ...system import literal

_SHARED_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold messages and tools. The first ``prompt_length`` messages are never learnt, whoever speaks."""

    messages: list[dict[str, Any]]
    prompt_length: int = 0
    tools: list[dict[str, Any]] | None = None


def conversation_of(record: dict[str, Any], where: str) -> Conversation:
    """Return the conversation in a record; for any other form ``BadInput`` names ``where`` and the key."""
    # A table has every column in every row, and None where a row has nothing.
    record = {key: value for key, value in record.items() if value is not None}
    tools, first = _tools(record.get("tools"), where), list[dict[str, Any]]()
    if record.get("system"):
        first.append({"role": "system", "content": _text(record["system"], where, "system")})
    for key in ("messages", "conversations"):
        if key in record:
            return Conversation(_after(first, _messages(record[key], where, key), where), 0, tools)
    if "prompt" in record and "completion" in record:
        prompt = _after(first, _turn(record["prompt"], where, "prompt", "user"), where)
        completion = _turn(record["completion"], where, "completion", "assistant")
        return Conversation(prompt + completion, len(prompt), tools)
    if "instruction" in record and "output" in record:
        instructions = [_text(record[key], where, key) for key in ("instruction", "input") if record.get(key)]
        question = {"role": "user", "content": "\n\n".join(instructions)}
        answer = {"role": "assistant", "content": _text(record["output"], where, "output")}
        return Conversation([*first, question, answer], 0, tools)
    expected = "messages, conversations, prompt and completion, or instruction and output"
    raise BadInput(where, expected=expected, found=f"the keys {', '.join(record) or 'of nothing'}")


def _after(first: list[dict[str, Any]], messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages after the record's own system message, which they may repeat and not contradict."""
    if first and messages[0]["role"] == "system":
        same, todo = messages[0]["content"] == first[0]["content"], "Leave one of them out"
        require(same, where, "system", "the text of the first message, a system message", "another", todo)
        return messages
    return first + messages


def _turn(value: Any, where: str, key: str, role: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, where, key)


def _messages(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadInput(where, key, expected="a list of messages", found=f"{value!r:.80}")
    messages = []
    for number, message in enumerate(value):
        at = f"{key}[{number}]"
        if key == "conversations" and isinstance(message, dict) and "from" in message:
            role = message["from"]
            message = {"role": _SHARED_ROLES.get(str(role), role), "content": message.get("value")}
        if not isinstance(message, dict):
            raise BadInput(where, at, expected="a message", found=f"{message!r:.80}")
        present = {name: part for name, part in message.items() if part is not None}
        if not isinstance(present.get("role"), str):
            raise BadInput(where, f"{at}.role", expected="text", found=literal(message.get("role")))
        if not isinstance(present.get("content"), str | list) and "tool_calls" not in present:
            expected = "text or a list of parts"
            raise BadInput(where, f"{at}.content", expected=expected, found=literal(message.get("content")))
        messages.append(present)
    return messages


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise BadInput(where, key, expected="text", found=f"{value!r:.80}")
    return value


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadInput(where, "tools", expected="a list in JSON", found=f"{value!r:.80}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadInput(where, "tools", expected="a list of JSON schemas", found=f"{value!r:.80}")
    return value
