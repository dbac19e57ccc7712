"""Make a recipe from another trainer's configuration, and list what could not be translated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ...parallel_state import BadInput
from ..recipe import Recipe, parse_recipe

#: No count or time of a run is larger; products of two are still numbers.
LARGEST = 1e18

#: Stand-ins for blanks while the rest is checked.
_STAND_INS: dict[str, Any] = {
    "steps": 10**9,
    "model.init_from": "model",
    "data.tokens": "tokens",
    "data.sequence_length": 1024,
    "data.global_batch": 2**20,
    "model.config.vocab_size": 2**16,
}


class Translation:
    """Collect the keys of a recipe. Keys are dotted, ``section.key``."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.values: dict[str, Any] = {}
        self._remarks: dict[str, str] = {}
        #: Keys that the recipe needs and the file does not say, and why.
        self.blanks: dict[str, str] = {}
        #: One line each: what could not be mapped, and why.
        self.missed: list[str] = []

    def set(self, key: str, value: Any, remark: str = "") -> None:
        """Set a key of the recipe; ``remark`` becomes a comment beside it."""
        self.values[key] = value
        self.blanks.pop(key, None)
        if remark:
            self._remarks[key] = remark

    def blank(self, key: str, why: str) -> None:
        """Note a key that the user has to fill in."""
        self.blanks[key] = why

    def miss(self, key: str, value: Any, why: str) -> None:
        """Note that ``value`` of the file's ``key`` is not in the recipe."""
        self.missed.append(f"{key} = {_short(value)}: {why}")

    def check(self) -> Recipe:
        """Parse the recipe with stand-ins for blanks; if it is refused, the file asks for the impossible."""
        raw: dict[str, Any] = {}
        stand_ins = {key: _STAND_INS[key] for key in self.blanks}
        for key, value in (self.values | stand_ins).items():
            *sections, last = key.split(".")
            here = raw
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        return parse_recipe(raw, self.where)

    def toml(self) -> str:
        """Return the recipe with its blanks as comments, and after it what could not be mapped."""
        lines = [f"# From {self.where}. Lines that begin with '# FILL IN' have to be filled in."]
        sections: dict[str, list[str]] = {"": []}
        for key in [*self.values, *self.blanks]:
            section, _, last = key.rpartition(".")
            here = sections.setdefault(section, [])
            if key in self.blanks:
                here.append(f"# FILL IN: {last} = ...  # {self.blanks[key]}")
            else:
                remark = f"  # {self._remarks[key]}" if key in self._remarks else ""
                here.append(f"{last} = {to_toml(self.values[key])}{remark}")
        for section, keys in sections.items():
            lines += ["", f"[{section}]", *keys] if section else keys
        if self.missed:
            lines += ["", "# Not mapped:", *(f"# {line}" for line in self.missed)]
        return "\n".join(lines) + "\n"


class Given:
    """Read a JSON object key by key, and list the keys that nobody asked for, also in its sections.

    ``autos`` has the value of each string "auto", by dotted key; ``unsaid`` lists the other autos.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, prefix: str = "", autos: Mapping[str, Any] | None = None
    ) -> None:
        self.raw, self.where, self.prefix, self.autos = raw, where, prefix, autos or {}
        self._unsaid: list[str] = []
        self._asked: set[str] = set()
        self._sections: dict[str, Given] = {}

    def path(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key

    def value(self, key: str) -> Any:
        """Return the file's value; ``None`` if there is none, or it is an "auto" without a known value."""
        self._asked.add(key)
        value = self.raw.get(key)
        if value != "auto":
            return value
        if self.path(key) not in self.autos:
            self._unsaid.append(self.path(key))
        return self.autos.get(self.path(key))

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = LARGEST
    ) -> float | None:
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, str):  # HF writes 5e-5 as a string where YAML was read
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            above = isinstance(value, int | float) and value > most
            raise self.bad(key, f"a number of at {f'most {most:g}' if above else f'least {least:g}'}", value)
        return value

    def whole(
        self, key: str, default: int | None = None, *, least: int = 0, most: float = LARGEST
    ) -> int | None:
        value = self.number(key, default, least=least, most=most)
        if value is not None and value != int(value):
            raise self.bad(key, "a whole number", value)
        return None if value is None else int(value)

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.bad(key, "true or false", value)
        return value

    def text(self, key: str) -> str | None:
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, "a string", value)
        return value

    def section(self, key: str) -> Given:
        """Return the object under ``key``; an empty one if there is none."""
        self._asked.add(key)
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.bad(key, "an object", value)
        if key not in self._sections:
            self._sections[key] = Given(value or {}, self.where, self.path(key), self.autos)
        return self._sections[key]

    def left(self) -> Iterator[tuple[str, Any]]:
        """Yield keys that nobody asked for, with their values, unless these are off, empty or automatic."""
        for key, value in self.raw.items():
            if key in self._sections:
                if not self._sections[key].off:
                    yield from self._sections[key].left()
            elif key not in self._asked and not is_off(value) and value != "auto":
                yield self.path(key), value

    def unsaid(self) -> Iterator[str]:
        """Yield keys that were asked for, are "auto", and have no known value."""
        yield from self._unsaid
        for section in self._sections.values():
            yield from section.unsaid()

    @property
    def off(self) -> bool:
        """Tell whether the whole object asks for nothing."""
        enabled = self.raw.get("enabled")
        if enabled == "auto":
            enabled = self.autos.get(self.path("enabled"))
        return enabled is False or is_off(self.raw)

    def bad(self, key: str, expected: str, found: Any) -> BadInput:
        return BadInput(self.where, self.path(key), expected=expected, found=_short(found))


def is_off(value: Any) -> bool:
    """Tell whether a value turns a setting off: null, false, zero, empty, "no", or an object with enabled:
    false.
    """
    if isinstance(value, dict):
        return value.get("enabled") is False or all(is_off(one) for one in value.values())
    return value in (None, False, 0, "", "no", "none") or value == []


def to_toml(value: Any) -> str:
    """Return plain data as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {to_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value)  # strings, numbers and booleans are written alike in both


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
