"""Make a recipe from another trainer's configuration, and list what could not be translated."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from ...parallel_state import BadInput
from ...storage.small_files import read_toml
from ..recipe import Recipe, parse_recipe, set_key
from ..recipe_text import Blank, comment, commented_recipe
from ..section import LossScaleSection

Setting = TypeVar("Setting", bool, str)

#: No count or time of a run is larger; products of two are still numbers.
LARGEST = 1e18


@lru_cache(maxsize=3)
def settings_of(origin: str) -> Mapping[str, Any]:
    """Return what ``settings.toml`` says of ``deepspeed``, ``trainer`` or ``megatron``."""
    settings: Mapping[str, Any] = read_toml(Path(__file__).with_name("settings.toml"))[origin]
    return settings


def reason_of(origin: str, key: str) -> str:
    """Return why a setting is not in the recipe."""
    reasons = {start: why for why, words in settings_of(origin)["reasons"].items() for start in words.split()}
    fits = [start for start in reasons if key.startswith(start)]
    return reasons[max(fits, key=len)] if fits else "there is nothing of this kind here"


ULYSSES = "Ulysses deals heads out; here keys and values are gathered"

#: Keys that a recipe needs: what the user fills in, and what stands there while the rest is checked.
_BLANKS: dict[str, tuple[str, Any]] = {
    "steps": ("how many updates", 10**9),
    "model.init_from": ("a Hugging Face folder, or model.config to start from scratch", "model"),
    "data.tokens": ("what `trilith tokenize` wrote", "tokens"),
    "data.sequence_length": ("tokens a row", 1024),
    "data.global_batch": ("rows a step, over all ranks", 2**20),
    "model.config.vocab_size": ("the number of the tokenizer's ids", 2**16),
}


class RecipeDraft:
    """Collect the keys of a recipe, dotted as in ``section.key``, and what is left to the user."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.values: dict[str, Any] = {}
        self._remarks: dict[str, str] = {}
        #: One line each: what could not be mapped, and why.
        self.missed: list[str] = []

    def set(self, key: str, value: Any, remark: str = "") -> None:
        """Set a key of the recipe, unless its value is ``None``; ``remark`` becomes a comment beside it."""
        if value is None:
            return
        self.values[key] = value
        if remark:
            self._remarks[key] = remark

    def set_axes(self, **sizes: int) -> None:
        """Set the axes of the layout that have several ranks."""
        for axis, size in sizes.items():
            if size > 1:
                self.set(f"layout.{axis}", size)

    def set_offload(self) -> None:
        self.set("memory.offload", True, "weights, gradients and moments together")

    @property
    def blanks(self) -> dict[str, str]:
        """Return the keys that the recipe needs and the file does not have, and what belongs there."""
        from_scratch = any(key.startswith("model.config.") for key in self.values)
        idle = "model.init_from" if from_scratch else "model.config.vocab_size"
        return {key: why for key, (why, _) in _BLANKS.items() if key not in {*self.values, idle}}

    def miss(self, key: str, value: Any, why: str) -> None:
        """Note that ``value`` of the file's ``key`` is not in the recipe."""
        self.missed.append(f"{key} = {_short(value)}: {why}")

    def miss_ranks(self, assumed: str) -> None:
        """Note that the file does not have the number of ranks, and what is assumed."""
        self.miss("ranks", None, f"the file does not say how many there are: taken as {assumed}; say --ranks")

    def finish(
        self, config: "ForeignConfig", origin: str, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> Self:
        """List what was not read and is no default, with the reason, and check the recipe."""
        settings = settings_of(origin)
        silent, usual = settings["meaningless"].split(), {**defaults, **settings.get("usual", {})}
        for key, setting in config.unread():
            if key not in silent and not (key in usual and usual[key] == setting):
                self.miss(key, setting, reason_of(origin, key))
        self.check()
        return self

    def check(self) -> Recipe:
        """Parse the recipe with stand-ins for blanks; if it is refused, the file asks for the impossible."""
        return parse_recipe(_nested(self.values | {key: _BLANKS[key][1] for key in self.blanks}), self.where)

    def toml(self) -> str:
        """Return the recipe with its blanks as comments, and after it what could not be mapped."""
        head = f"From {self.where}. Lines that begin with '# FILL IN' have to be filled in."
        blanks = {key: Blank(why) for key, why in self.blanks.items()}
        text = commented_recipe(_nested(self.values | blanks), " ".join(head.split()), self._remarks)
        missed = ["", "# Not mapped:", *map(comment, self.missed), ""] if self.missed else []
        return text + "\n".join(missed)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of dotted keys."""
    raw: dict[str, Any] = {}
    for key, value in values.items():
        set_key(raw, key, value)
    return raw


class ForeignConfig:
    """Read another trainer's configuration key by key, and list the keys that were not read.

    ``autos`` has the value of each string "auto", by dotted key; ``unknown_autos`` lists the other autos.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, prefix: str = "", autos: Mapping[str, Any] | None = None
    ) -> None:
        self.raw, self.where, self.prefix, self.autos = raw, where, prefix, autos or {}
        self._unknown_autos: list[str] = []
        self._read: set[str] = set()
        self._sections: dict[str, ForeignConfig] = {}

    def check_kind(self, keys: Set[str], expected: str, *, noun: str = "keys") -> None:
        """Refuse a file without any of ``keys``: it is no such configuration."""
        if not self.raw.keys() & keys:
            first = ", ".join(list(self.raw)[:5]) or "(none)"
            raise BadInput(self.where, expected=expected, found=f"{noun} {first}")

    def path(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key

    def value(self, key: str) -> Any:
        """Return the file's value; ``None`` if there is none, or it is an "auto" without a known value."""
        self._read.add(key)
        value = self.raw.get(key)
        if value != "auto":
            return value
        if self.path(key) not in self.autos:
            self._unknown_autos.append(self.path(key))
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
        self.require(value is None or value == int(value), key, "a whole number", value)
        return None if value is None else int(value)

    def flag(self, key: str) -> bool:
        return bool(self._of_type(bool, key, "true or false"))

    def text(self, key: str) -> str | None:
        return self._of_type(str, key, "a string")

    def one_of(self, key: str, choices: Iterable[str]) -> str | None:
        """Return the text, which must be one of those that are known."""
        text = self.text(key)
        self.require(text is None or text in choices, key, " or ".join(choices), text)
        return text

    def _of_type(self, kind: type[Setting], key: str, expected: str) -> Setting | None:
        value = self.value(key)
        if value is not None and not isinstance(value, kind):
            raise self.bad(key, expected, value)
        return value

    def section(self, key: str) -> "ForeignConfig":
        """Return the object under ``key``; an empty one if there is none."""
        self._read.add(key)
        value = self.raw.get(key)
        self.require(value is None or isinstance(value, dict), key, "an object", value)
        if key not in self._sections:
            self._sections[key] = ForeignConfig(value or {}, self.where, self.path(key), self.autos)
        return self._sections[key]

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys that were not read, with their values, unless these are off, empty or automatic."""
        for key, value in self.raw.items():
            if key in self._sections:
                if not self._sections[key].off:
                    yield from self._sections[key].unread()
            elif key not in self._read and not is_off(value) and value != "auto":
                yield self.path(key), value

    def unknown_autos(self) -> Iterator[str]:
        """Yield the keys that were read, are "auto", and have no known value."""
        yield from self._unknown_autos
        for section in self._sections.values():
            yield from section.unknown_autos()

    @property
    def off(self) -> bool:
        """Tell whether the whole object asks for nothing."""
        enabled = self.raw.get("enabled")
        if enabled == "auto":
            enabled = self.autos.get(self.path("enabled"))
        return enabled is False or is_off(self.raw)

    def bad(self, key: str, expected: str, actual: Any) -> BadInput:
        return BadInput(self.where, self.path(key), expected=expected, found=_short(actual))

    def require(self, holds: object, key: str, expected: str, actual: Any) -> None:
        """Raise ``BadInput`` about a key unless something ``holds``."""
        if not holds:
            raise self.bad(key, expected, actual)


def is_off(value: Any) -> bool:
    """Tell whether a value turns a setting off: null, false, zero, empty, "no", or an object with enabled:
    false.
    """
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(is_off, value.values()))
    return value in (None, False, 0, "", "no", "none", [])


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def half_dtype(config: ForeignConfig, key: str, *, fp16: bool, bf16: bool) -> str | None:
    """Return the data type that mixed precision computes in, if it is on; refuse ``key`` if both are."""
    config.require(not (fp16 and bf16), key, "fp16 or bf16", "both")
    return "float16" if fp16 else "bfloat16" if bf16 else None


def set_compute(draft: RecipeDraft, dtype: str | None) -> None:
    """Set the data type of forward and backward."""
    draft.set("compute", dtype, "weights and moments stay in float32")


def set_loss_scale(config: ForeignConfig, draft: RecipeDraft, initial: float, *, static: bool) -> None:
    """Set the loss scale from its first value and from the keys that DeepSpeed and Megatron share."""
    scale = _power_of_two(initial)
    if scale != initial:
        key = config.path("loss_scale" if static else "initial_loss_scale")
        draft.miss(key, initial, "not a power of two; the nearest below is taken")
    draft.set("loss_scale.initial", scale)
    if static:
        draft.set("loss_scale.growth_interval", 0, "a fixed scale; here it still halves at an overflow")
    else:
        draft.set("loss_scale.growth_interval", config.whole("loss_scale_window", 1000))
    draft.set("loss_scale.minimum", min(_power_of_two(config.number("min_loss_scale", 1.0) or 1.0), scale))
    if scale > LossScaleSection().maximum:
        draft.set("loss_scale.maximum", scale)
    if (hysteresis := config.whole("hysteresis", 2)) != 1 and not static:
        draft.miss(config.path("hysteresis"), hysteresis, "the scale halves at the first overflow")


def _power_of_two(scale: float) -> float:
    return 2.0 ** math.floor(math.log2(scale))
