"""JSON from people we do not trust: one meaning or none, and never a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import NoReturn

from ..parallel_state import BadInput


class _Refused(ValueError):
    """What the hooks below raise; it becomes the caller's kind of error, with the file's name."""


def parse_object(raw: bytes, where: object, *, kind: type[BadInput] = BadInput) -> dict[str, object]:
    """The one JSON object in ``raw``, or an error of ``kind`` that names ``where``.

    Refused are invalid UTF-8, a key said twice (readers differ in which one counts), ``NaN`` and infinities
    (no JSON), nesting deeper than Python's recursion limit, and anything but an object at the top.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(
            where, expected="UTF-8 text", found=f"byte {raw[error.start]:#04x} at {error.start}"
        ) from None
    try:
        value = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise kind(where, expected="JSON of moderate depth", found="thousands of nested levels") from None
    except json.JSONDecodeError as error:
        place = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise kind(where, expected="valid JSON", found=place, todo=_hint(raw)) from None
    except ValueError as error:  # our own hooks, and integers of thousands of digits
        raise kind(where, expected="plain JSON", found=str(error)) from None
    if not isinstance(value, dict):
        raise kind(where, expected="a JSON object", found=f"a {type(value).__name__}")
    return value


def what_it_looks_like(raw: bytes) -> str:
    """What to do about a file whose first bytes show that it is something well known, or an empty string."""
    head = raw[:256].lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "This is a git-lfs pointer, not the file: run git lfs pull"
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "This is a web page saved under the file's name: download the file again"
    return ""


def shown(text: object, limit: int = 80) -> str:
    """Foreign text made fit for one line of an error message."""
    line = repr(text)
    return line if len(line) <= limit else f"{line[:limit]}…"


def _hint(raw: bytes) -> str:
    return what_it_looks_like(raw) or ("The file is empty" if not raw.strip() else "")


def _unique_keys(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    pairs = list(pairs)
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {shown(key)} twice")
            seen.add(key)
    return unique


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"the constant {name}")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Refused(f"the number {shown(digits)}, which no float holds")
    return value
