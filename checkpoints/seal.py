"""Write a manifest's text with its seal, and check it. The seal, its last key, is the SHA-256 of the text
before.

With the seal a reader notices if one bit of the manifest has changed since it was written. It protects
against damage, not against a person who writes another manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from ..parallel_state import BadCheckpoint

_MARK = b',\n"seal": '
_REST = re.compile(rb'"([0-9a-f]{64})"\n}\n')
_END = b"\n}\n"


def text_of(fields: Mapping[str, object]) -> bytes:
    """Write a JSON object with a line for each field, and for each member of a field that has several."""
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in fields.items()]
    return b"{\n" + ",\n".join(lines).encode() + _END


def seal(text: bytes) -> bytes:
    """Add the seal to a JSON object that ends in a line with its closing brace."""
    assert text.endswith(_END), text[-20:]
    body = text.removesuffix(_END)
    return body + _MARK + f'"{hashlib.sha256(body).hexdigest()}"'.encode() + _END


def open_seal(raw: bytes, where: object) -> bytes:
    """Return the JSON object without its seal; ``BadCheckpoint`` if the seal is missing or wrong."""
    body, mark, rest = raw.rpartition(_MARK)
    match = _REST.fullmatch(rest)
    if not mark or match is None:
        last_field = "another text there" if mark else "none"
        raise BadCheckpoint(
            where, "seal", expected="a SHA-256 as the last field", found=last_field, todo=_TODO
        )
    digest = hashlib.sha256(body).hexdigest()
    if match[1].decode() != digest:
        raise BadCheckpoint(where, "seal", expected=match[1].decode(), found=digest, todo=_TODO)
    return body + _END


def _lines(value: object) -> str:
    if isinstance(value, dict | list) and len(value) > 1:
        if isinstance(value, dict):
            inner = [f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
            return "{\n" + ",\n".join(inner) + "\n}"
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n]"
    return json.dumps(value)


_TODO = "The manifest was altered or damaged since it was written"
