"""The seal of a manifest: the SHA-256 of all that stands before it, as the last field of the same JSON.

With it a reader tells that not one bit of the manifest changed since it was written. It protects against
damage, not against somebody who writes a manifest of his own.
"""

from __future__ import annotations

import hashlib
import re

from ..parallel_state import BadCheckpoint

_MARK = b',\n"seal": '
_REST = re.compile(rb'"([0-9a-f]{64})"\n}\n')
_END = b"\n}\n"


def seal(text: bytes) -> bytes:
    """Add the seal to a JSON object that ends in a line with its closing brace."""
    assert text.endswith(_END), text[-20:]
    body = text.removesuffix(_END)
    return body + _MARK + f'"{hashlib.sha256(body).hexdigest()}"'.encode() + _END


def open_seal(raw: bytes, where: object) -> bytes:
    """Give the JSON object without its seal; ``BadCheckpoint`` if the seal is missing or does not fit."""
    body, mark, rest = raw.rpartition(_MARK)
    match = _REST.fullmatch(rest)
    if not mark or match is None:
        found = "another text there" if mark else "none"
        raise BadCheckpoint(where, "seal", expected="a SHA-256 as the last field", found=found, todo=_TODO)
    digest = hashlib.sha256(body).hexdigest()
    if match[1].decode() != digest:
        raise BadCheckpoint(where, "seal", expected=match[1].decode(), found=digest, todo=_TODO)
    return body + _END


_TODO = "The manifest was altered or damaged since it was written"
