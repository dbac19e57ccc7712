"""Read and build the header of a safetensors file: an 8-byte length, then JSON about each tensor.

https://huggingface.co/docs/safetensors describes the format; its reader leaves some doubtful files in (a key
said twice, hundreds of thousands of empty tensors), which are refused here.
"""

import json
from collections.abc import Container, Mapping
from math import prod
from typing import NoReturn

from ..parallel_state import BadInput, require
from .dtypes import BITS
from .safe_open import is_plain
from .strict_json import parse_object, shown, what_it_looks_like
from .strides import View

MAX_HEADER = 16 << 20
MAX_TENSORS = 100_000
MAX_DIMS = 64
_LENGTH = 8
#: What to do about a file that ends too early.
_CUT_SHORT = "The file is cut short: copy or download it again"


def header_length(first: bytes, size: int, where: object) -> int:
    """Return how many bytes of JSON follow the first 8; check the number before they are read."""
    if hint := what_it_looks_like(first):
        raise BadInput(where, expected="a safetensors file", found=shown(first[:24]), todo=hint)
    actual = f"a file of {size} bytes"
    require(size >= _LENGTH, where, None, "a safetensors file", actual, _CUT_SHORT)
    length = int.from_bytes(first[:_LENGTH], "little")
    require(length >= 2, where, "header length", "at least 2", length)
    if length > MAX_HEADER and length > size - _LENGTH:
        length_and_size = f"{length:,} in a file of {size:,} bytes"
        raise BadInput(where, "header length", expected="a safetensors file", found=length_and_size)
    expected = f"{length + _LENGTH:,} bytes of header"
    require(length <= size - _LENGTH, where, None, expected, f"{size:,} bytes in all", _CUT_SHORT)
    require(length <= MAX_HEADER, where, "header length", f"at most {MAX_HEADER:,}", f"{length:,}")
    return length


def parse_header(
    raw: bytes, size: int, where: object, *, expected: Container[str] = ()
) -> tuple[dict[str, View], int]:
    """Parse the header from its JSON bytes and the size of the whole file; return the tensors and the first
    byte behind the header. Every byte of the file belongs to exactly one tensor or to it.

    Names that look like paths are refused unless they are in ``expected``: a name must never become a path.
    """
    require(raw.startswith(b"{"), where, "header", "a JSON object", shown(raw[:24]))
    if raw.count(b'"data_offsets"') > MAX_TENSORS:  # before a parse that would take seconds
        raise BadInput(where, "header", expected=f"at most {MAX_TENSORS:,} tensors", found="more")
    fields = parse_object(raw, f"{where}: header")
    _check_metadata(fields.pop("__metadata__", {}), where)
    if len(fields) > MAX_TENSORS:
        raise BadInput(where, "header", expected=f"at most {MAX_TENSORS:,} tensors", found=f"{len(fields):,}")
    data_begin = _LENGTH + len(raw)
    tensors = {}
    for name, value in fields.items():
        if name not in expected and not is_plain(name):
            what = "a name of printable letters, not a path"
            raise BadInput(where, "tensor", expected=what, found=shown(name))
        tensors[name] = _entry(name, value, data_begin, where)
    _check_tiling(tensors, data_begin, size, where)
    return tensors, data_begin


def build_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, View]]:
    """Return the first bytes of a file with these ``{name: (dtype, shape)}``, and each tensor's place.

    Tensors keep their order, but those of wider elements come first, as in the format's own writer: then
    every tensor is aligned to its element. The header is padded with spaces to 8 bytes.
    """
    order = sorted(tensors, key=lambda name: -BITS[tensors[name][0]])
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    views: dict[str, View] = {}
    at = 0
    for name in order:
        view = views[name] = View.row_major(*tensors[name], at)
        at = view.end
        fields[name] = {"dtype": view.dtype, "shape": [*view.shape], "data_offsets": [view.begin, at]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = _LENGTH + len(text)
    entries = {name: View.row_major(*tensors[name], data + view.begin) for name, view in views.items()}
    return len(text).to_bytes(_LENGTH, "little") + text, entries


def _check_metadata(value: object, where: object) -> None:
    if not isinstance(value, dict):
        raise BadInput(where, "__metadata__", expected="an object", found=shown(value))
    for key, text in value.items():
        if not isinstance(text, str):
            raise BadInput(where, f"__metadata__ {shown(key)}", expected="a string", found=shown(text))


def _entry(name: str, value: object, data_begin: int, where: object) -> View:
    def refuse(expected: str, found: object) -> NoReturn:
        raise BadInput(where, f"tensor {shown(name)}", expected=expected, found=shown(found))

    if not isinstance(value, dict):
        refuse("an object", value)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        refuse("a dtype of the format", dtype)
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(n) for n in shape):
        refuse(f"a shape of at most {MAX_DIMS} whole numbers", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        refuse("data_offsets of two whole numbers", offsets)
    begin, end = offsets
    if begin > end:
        refuse("data_offsets in order", offsets)
    # Dims of 0 are left out of this product: [0, 2**62, 2**62] is no shape that anybody can hold either.
    if prod(n for n in shape if n) >= 1 << 63:
        refuse("a shape of fewer than 2^63 elements", shape)
    bits = prod(shape) * BITS[dtype]
    if bits != (end - begin) * 8:
        refuse(f"{bits / 8:,.10g} bytes for {dtype} {shape}", f"{end - begin:,} bytes in data_offsets")
    return View(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_tiling(tensors: dict[str, View], data_begin: int, size: int, where: object) -> None:
    """Check that tensors follow one another: no hole, no overlap, nothing behind the last."""
    at, before = data_begin, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            flaw = "an overlap with" if entry.begin < at else "a hole after"
            place, key = f"byte {entry.begin - data_begin:,}, {flaw} {before}", f"tensor {shown(name)}"
            raise BadInput(where, key, expected=f"data from {at - data_begin:,}", found=place)
        if entry.end > size:
            key, todo = f"tensor {shown(name)}", _CUT_SHORT
            raise BadInput(
                where, key, expected=f"{entry.end:,} bytes in the file", found=f"{size:,}", todo=todo
            )
        at, before = entry.end, f"tensor {shown(name)}"
    require(at == size, where, None, f"{at:,} bytes, the end of {before}", f"{size:,}")
