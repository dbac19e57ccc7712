"""Parse JSON from untrusted sources: refuse what readers could understand in two ways, and never crash."""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from ..parallel_state import BadInput, require
from ..system import literal

#: Nested levels of lists and objects. Real configurations have fewer than ten.
DEEPEST = 100
#: Whole numbers have at most as many digits, so that a float holds each and code may compare them as one.
_MOST_DIGITS = 300

#: What to do with a text in another encoding.
SAVE_AS_UTF8 = "Save the file as UTF-8, such as with iconv -f latin1 -t utf-8"

#: How what git-lfs leaves begins.
_POINTER = b"version https://git-lfs"
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(
    raw: bytes, where: object, *, kind: type[BadInput] = BadInput, constants: bool = False
) -> dict[str, object]:
    """Return the one JSON object in ``raw``, or raise an error of ``kind`` that names ``where``.

    Refused are invalid UTF-8, half a surrogate pair (not text), a key that appears twice (readers differ in
    which one counts), ``NaN`` and infinities (not JSON), more than ``DEEPEST`` nested levels, and anything
    but an object at the top. ``constants``: NaN and infinities pass, which data sets have beside their texts.
    """
    text = decode_utf8(raw, where, kind=kind)
    if text.startswith("\ufeff"):  # other readers of the same file refuse it
        todo = "Save the file as UTF-8 without the mark"
        raise kind(where, expected="JSON without a byte order mark", found="one", todo=todo)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=float if constants else finite_float,
            parse_float=finite_float,
            parse_int=_whole,
        )
        if deeper(value, DEEPEST):
            raise RecursionError
        if _ESCAPED_SURROGATE.search(text) is not None:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise kind(where, expected=f"a depth of at most {DEEPEST} levels", found="more") from None
    except UnicodeEncodeError:
        raise kind(where, expected="text", found="half a surrogate pair, which is no character") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""  # else the caller names the line
        place = f"{error.msg} at {line}column {error.colno}"
        begun = dict.fromkeys((b"[", b"{"), "A .jsonl file has a whole object a line")
        todo = what_it_looks_like(raw) or {b"": "The file is empty", **begun}.get(raw.strip(), "")
        raise kind(where, expected="valid JSON", found=place, todo=todo) from None
    except ValueError as error:  # our own hooks, and integers of thousands of digits
        raise kind(where, expected="plain JSON", found=str(error)) from None
    if not isinstance(value, dict):
        json_type = "null" if value is None else f"a {type(value).__name__}"
        raise kind(where, expected="a JSON object", found=json_type)
    return value


def decode_utf8(raw: bytes, where: object, *, kind: type[BadInput] = BadInput) -> str:
    """Return the text in ``raw``; an error of ``kind`` names ``where`` and the first wrong byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad_byte = f"byte {raw[error.start]:#04x} at {error.start}"
        todo = what_it_looks_like(raw) or SAVE_AS_UTF8
        raise kind(where, expected="UTF-8 text", found=bad_byte, todo=todo) from None


def refuse_pointer(raw: bytes, where: object) -> None:
    """Refuse what git-lfs leaves in a file's place until the file is fetched."""
    todo = what_it_looks_like(raw)
    require(not raw.startswith(_POINTER), where, None, "the file itself", "a git-lfs pointer", todo)


def what_it_looks_like(raw: bytes) -> str:
    """Return what to do if the first bytes are of a git-lfs pointer, a web page, an archive or UTF-16, else
    nothing.
    """
    head = raw[:256].lstrip().lower()
    if head.startswith(_POINTER):
        return "This is a git-lfs pointer, not the file: run git lfs pull"
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "This is a web page saved under the file's name: download the file again"
    if raw.startswith(b"PK\x03\x04"):
        return "This is an archive, such as torch.save writes (training_args.bin), not text: write it as JSON"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "This looks like UTF-16: save it as UTF-8, such as with iconv -f utf-16 -t utf-8"
    return ""


def shown(text: object, limit: int = 80) -> str:
    """Return untrusted text as one short line for an error message."""
    line = literal(text, limit + 1)
    return line if len(line) <= limit else f"{line[:limit]}…"


def _unique_keys(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    pairs = list(pairs)
    unique = dict(pairs)
    if len(unique) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} twice")
    return unique


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def finite_float(digits: str) -> float:
    """Return the number in ``digits``; ``ValueError`` for NaN, infinities and numbers that no float holds."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(digits)}, which is not finite or fits in no float")
    return value


def deeper(value: object, most: int) -> bool:
    """Return whether lists and objects are nested more than ``most`` levels deep."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        nests = (parent.values() if isinstance(parent, dict) else parent for parent in level)
        level = [child for nest in nests for child in nest if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def fits(fields_read: Mapping[str, object], record: type[Any]) -> bool:
    """Tell whether an object has each field of a dataclass, of its type, but for those with a default.

    A float may be a whole number; no number is larger than a file or a time of ours.
    """
    return all(
        _is_one_of(fields_read[field.name], {*(get_args(field.type) or [field.type])})
        if field.name in fields_read
        else field.default is not MISSING
        for field in fields(record)
    )


def _is_one_of(value: object, kinds: set[Any]) -> bool:
    if type(value) is int:
        return not kinds.isdisjoint((int, float)) and abs(value) < 2**63
    return type(value) in kinds


Count = Annotated[int, Field(ge=0)]


class StrictRecord(BaseModel):
    """Define a record with exact types and no unknown fields, which cannot be changed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StoredFile(StrictRecord):
    """Describe one file of the checkpoint: its size in bytes and their CRC-32."""

    name: str
    size: Count
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]
