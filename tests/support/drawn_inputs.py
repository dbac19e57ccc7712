"""Draw odd inputs of a command: another content of a file that it reads, an odd value of an option."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from trilith.recipes.recipe import Recipe

from support.command_lines import RECIPE_PATHS, Place, parameters_of, places, values_of, words, words_of
from support.damage import damaged
from support.drawn_outputs import OUTPUTS, Drawn, draw_output

#: Values of JSON, as text: of another type, too large, too deep, not printable.
JSON_VALUES = [
    *("null", "3", "-1", "0", "1.5", "1e300", "-1e18", "NaN", "true", '""', '"²"', "[]", "{}", "[null]"),
    *(r'"a\nb"', r'"\u001b[31m"', r'"\ud800"', "9" * 5000, "[" * 3000 + "]" * 3000, f'"{"x" * 100_000}"'),
]
#: Words for an option or a number.
WORDS = [
    *("", " ", "-1", "0", "1.5", "²", "٨", "9" * 400, "1e309", "-1e309", "nan", "inf", "null", "[]", "{}"),
    *("a\nb", "\x1b[31m", "\udcff", "a" * 5000, "%s", "~", "*", "../x", "--", "1,,2", "=", "a=b"),
]
#: Whole files of text.
TEXTS = [
    *(b"", b"\n", b"\0" * 64, b"\xff\xfe\xfd", b"\xef\xbb\xbf", b"null", b"3", b"[]"),
    *(b"{" * 5000, b"x" * 10**6),
]
#: The keys of a recipe that take no path.
SECTIONS = {each.alias or name: each.annotation for name, each in Recipe.model_fields.items()}
KEYS = [
    f"{name}.{key}" if section is not Recipe else key
    for name, section in [("", Recipe), *SECTIONS.items()]
    for key in getattr(section, "model_fields", ())
    if f"{name}.{key}".strip(".") not in RECIPE_PATHS
]
TEXT_SUFFIXES = {".json", ".jsonl", ".toml", ".txt", ".jinja", ".index", ".log", ""}
#: The argument with which a command reads a run's folder, here ``trained``, which has a checkpoint.
READS_RUN = {
    **dict.fromkeys(("inspect", "verify", "generate", "evaluate"), "source"),
    **{"convert": "src", "diff": "b", "parity": "folder", "status": "run", "report": "runs"},
    **{"merge_lora": "base", "train": "recipe: out"},
}
#: What ``recipe`` reads of each trainer.
ORIGINS = [("from-trainer", "trainer.json"), ("from-deepspeed", "zero3.json")] + [
    ("from-megatron", name) for name in ("small.log", "small.json")
]


def draw(command: str, number: int, inputs: Path, where: Path, kind: str = "input") -> Drawn:
    """Return the command line of this number, below the folder ``where``; it depends on nothing else.

    ``kind``: what is odd, besides an "input" or an option the "output", a "run" or the "origin" of a recipe.
    """
    random = Random(f"{command} {number}")
    match kind:
        case "output":
            return draw_output(random, random.choice(OUTPUTS[command]), inputs, where)
        case "run":
            place = Place(command, READS_RUN[command], output=False)
            return _with_file(random, place, inputs / "trained", inputs, where)
        case "origin":
            origin, name = random.choice(ORIGINS)
            drawn = _with_file(random, Place(command, "file", False), inputs / name, inputs, where)
            return replace(drawn, words=[drawn.words[0], origin, *drawn.words[2:]])
    inner = [place for place in places() if place.command == command and not place.output]
    odd = [
        (name, flag, kinds)
        for name, flag, hidden, kinds in parameters_of(command)
        if not hidden and bool not in kinds and Path not in kinds
    ]
    if inner and (not odd or random.random() < 0.65):
        place = random.choice(inner)
        return _with_file(random, place, Path(place.good.format(inputs)), inputs, where)
    return _with_option(random, command, odd or [("unknown", "--unknown", set())], inputs, where)


def _with_option(random: Random, command: str, odd: list[Any], inputs: Path, where: Path) -> Drawn:
    (name, flag, _), word = random.choice(odd), random.choice(WORDS)
    values = values_of(command, inputs, where)
    if command == "train":
        values["+"] = [f"out={where / 'out'}"]
    names = [flag or name, name.rstrip("s")]
    if name == "overrides":
        key = random.choice(KEYS)
        values[name], names = [f"{key}={word}"], [*names, key.split(".")[-1], "override"]
    elif flag is None:
        word = word.lstrip("-")  # else it is an option
        values[name] = [word]
    else:
        values.pop(name, None)
        others = [each for each in values.get("+", []) if not each.startswith(f"{flag}=")]
        values["+"] = [*others, f"{flag}={word}"]
        if flag == "-p":
            values.pop("prompt_file", None)
    switches = [each for _, each, hidden, kinds in parameters_of(command) if bool in kinds and not hidden]
    if switches and random.random() < 0.3:
        names.append(random.choice(switches))
        values["+"] = [*values.get("+", []), names[-1]]
    names += [repr(word), *(part[:8] for part in (*word.split(), repr(word)[1:-1]) if len(part) > 1)]
    return Drawn(words_of(command, values), names, f"{name}={word[:20]!r}")


def _with_file(random: Random, place: Place, good: Path, inputs: Path, where: Path) -> Drawn:
    at = where / good.name
    if good.is_dir():
        shutil.copytree(good, at)
        files = sorted(path for path in at.rglob("*") if path.is_file())
    else:
        files = [where / path.name for path in sorted(good.parent.glob(f"{good.name}*")) if path.is_file()]
        for file in files:
            shutil.copy(good.parent / file.name, file)
    file = random.choice(files)
    raw = file.read_bytes()
    change = random.choice(CHANGES_OF_TEXT if file.suffix in TEXT_SUFFIXES else CHANGES)
    file.write_bytes(change(random, raw))
    names = [file.name, file.stem, at.name, str(place.key or place.name).split(".")[-1].rstrip("s")]
    line = words(place.command, inputs, where, place, str(at))
    return Drawn(line, names, f"{place} {file.relative_to(where)} {change.__name__}")


def _damaged(random: Random, raw: bytes) -> bytes:
    return damaged(raw, random)


def _cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(len(raw) + 1)]


def _byte_order_mark(_: Random, raw: bytes) -> bytes:
    return b"\xef\xbb\xbf" + raw


def _line_ends(_: Random, raw: bytes) -> bytes:
    return raw.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _other_text(random: Random, _: bytes) -> bytes:
    return random.choice(TEXTS)


def _other_value(random: Random, raw: bytes) -> bytes:
    """Replace a value of JSON, in JSON, a line of JSON Lines, or after the "=" of a line of TOML."""
    lines = raw.decode().splitlines() or [""]
    number = random.randrange(len(lines))
    key, equals, _ = lines[number].partition(" = ")
    try:
        whole = json.loads(raw)
    except ValueError:
        lines[number] = (
            f"{key} = {random.choice(JSON_VALUES)}" if equals else _replaced(random, lines[number])
        )
        return "\n".join(lines).encode()
    return _replaced(random, json.dumps(whole)).encode()


def _replaced(random: Random, text: str) -> str:
    """Return JSON in which one value is another, or gone; for other text another value alone."""
    try:
        whole = json.loads(text)
    except ValueError:
        return random.choice(JSON_VALUES)
    nodes = [*_nodes(whole)]
    if not nodes:
        return random.choice(JSON_VALUES)
    holder, key = random.choice(nodes)
    if random.random() < 0.2:
        del holder[key]
        return json.dumps(whole)
    holder[key] = "\0here"
    return json.dumps(whole).replace(json.dumps("\0here"), random.choice(JSON_VALUES))


def _nodes(node: Any) -> list[tuple[Any, Any]]:
    """Return each value inside a nest of dicts and lists, as its holder and its key there."""
    keys = [*node] if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    return [pair for key in keys for pair in ((node, key), *_nodes(node[key]))]


CHANGES: list[Callable[[Random, bytes], bytes]] = [_damaged, _cut]
CHANGES_OF_TEXT = [*CHANGES, _byte_order_mark, _line_ends, _other_text, *[_other_value] * 3]
