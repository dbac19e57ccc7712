"""Hold the config of an adopted model: transformers' own, as text, and the numbers that trilith reads; and
say which axes tests have proved of which types.
"""

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from inspect import getsource, signature
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import ValidationError
from pydantic_core import from_json

from ...parallel_state import BadInput, from_validation, require
from ...storage.small_files import read_toml
from ..base.config import ModelConfig
from ..base.keys import INERT, LARGEST_NUMBER, check_file, names

#: Why each axis is refused, by the key of a layout, where the table says no more.
AXES = dict.fromkeys(("tensor", "sequence", "pipeline", "context"), "no test has proved it") | {
    "expert": "the experts of adopted models are not spread over ranks"
}
#: Keys that say nothing of the forward pass; two configs that differ in them are of one model.
_FREE = INERT - {"model_type", "is_decoder", "pad_token_id", "pretraining_tp", "chunk_size_feed_forward"}

#: Keys that transformers' classes of configs do not name, and that are read or refused before.
_READ_ELSEWHERE = names("implementation quantization_config rope_scaling rope_theta")

#: Types that decode whatever their ``is_decoder`` says.
_DECODERS = {"gpt_neox", "gpt_neox_japanese"}
#: Types that count the places of tokens from their padding token's number.
FROM_PADDING = names("""
    roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl camembert data2vec-text xmod
""")
#: What a decoder, that was one of two parts, calls the number of its blocks.
_BLOCKS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")


class AdoptedConfig(ModelConfig):
    """Hold ``raw``, all that transformers' config class says, as JSON with sorted keys."""

    head_is_last: ClassVar[bool] = False  # transformers' code may change the logits
    raw: str
    #: Not known: each layer refuses a cut of its own that is not even.
    intermediate_size: int = 0
    num_attention_heads: int = 0

    @property
    def model_type(self) -> str:
        """Return transformers' name of the type."""
        return str(self.to_hf()["model_type"])

    @property
    def text(self) -> Any:
        """Return transformers' config of what makes text, which may be a part of the whole."""
        return self.in_transformers().get_text_config(decoder=True)

    def in_transformers(self) -> Any:
        """Return a new config object of transformers: models write into theirs, and share it."""
        with quiet():  # ids of tokens that the text leaves out have their defaults
            return _read(self.to_hf())

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the dict of a config.json as transformers does. Raises ``BadInput`` for what it refuses, a
        model made of several, and one that is no decoder.
        """
        check_file(raw, where)
        kind = str(raw["model_type"])
        if raw.get("quantization_config") is not None:
            expected = "absent: quantised weights are not read"
            raise BadInput(where, "quantization_config", expected=expected, found="one")
        if raw.get("output_router_logits"):
            lost = "the balance loss that transformers adds is not computed"
            warnings.warn(f"{where}: output_router_logits is ignored; {lost}", stacklevel=2)
        with in_one_line(where, expected=f"what transformers' {kind} reads"):
            config = _read(raw)
            as_dict = config._encode_special_floats(config.to_dict())  # as its files have infinity
            fields = {key: entry for key, entry in as_dict.items() if key not in _FREE}
            raw_text = json.dumps(fields | {"model_type": kind}, sort_keys=True)
        for key in cls.unknown_keys(raw):
            warnings.warn(f"{where}: {key[:80]} is unknown and ignored", stacklevel=2)
        if config.model_type in FROM_PADDING and config.pad_token_id is None:
            expected = "a token's number, from which places are counted"
            raise BadInput(where, "pad_token_id", expected=expected, found="none")
        text = config.get_text_config(decoder=True)
        decodes = getattr(text, "is_decoder", True) or config.model_type in _DECODERS
        if (two := getattr(config, "is_encoder_decoder", False)) or not decodes:
            parts = ", ".join(sorted(getattr(config, "sub_configs", {})))
            alone = " and is_encoder_decoder to false: its decoder trains alone" if two else ""
            of_parts = f"Models that are made of others ({parts}) are not taken"
            todo = of_parts if parts else f"Set is_decoder to true{alone}"
            raise BadInput(where, "is_decoder", expected="a decoder alone", found="another model", todo=todo)
        for key in ("layerdrop", "decoder_layerdrop"):  # ranks would wait for blocks that others leave out
            todo = "Set it to 0; the weights stay as they are"
            require(not getattr(text, key, 0), where, key, "0: all blocks run", getattr(text, key, 0), todo)

        def count(*keys: str) -> int:
            numbers = (getattr(text, key, None) for key in keys)
            return next((number for number in numbers if type(number) is int and number > 0), 0)

        places = (count("max_position_embeddings") or LARGEST_NUMBER) - first_place(config)
        try:
            return cls(
                raw=raw_text, tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
                vocab_size=count("vocab_size"), hidden_size=count("hidden_size"),
                num_hidden_layers=count(*_BLOCKS), max_position_embeddings=places,
            )  # fmt: skip
        except ValidationError as error:
            raise from_validation(where, error) from None

    @classmethod
    def unknown_keys(cls, raw: Mapping[str, Any]) -> list[str]:
        """Return the keys that transformers' config class does not name and that change nothing: none of its
        other keys, and nothing that the model's code reads by itself.
        """
        kind = str(raw["model_type"])
        with quiet():  # its defaults may not fit each other
            usual = config_class(kind)()
        read = {*usual.to_dict(), *usual.attribute_map, *signature(type(usual).__init__).parameters}
        if not (unnamed := raw.keys() - read - INERT - _READ_ELSEWHERE):
            return []
        code = getsource(sys.modules[model_class(kind).__module__])

        def named(changed: Mapping[str, Any]) -> dict[str, Any] | None:
            try:
                return {key: entry for key, entry in _read(changed).to_dict().items() if key not in unnamed}
            except Exception:  # whatever its own checks raise: they read it
                return None

        with quiet():
            as_it_is = named(raw)
            idle = [key for key in sorted(unnamed) if named({**raw, key: _other(raw[key])}) == as_it_is]
        return [key for key in idle if not re.search(rf'config(\.|, "){re.escape(key)}\b', code)]

    @property
    def experts_of_token(self) -> int:
        """Return how many of a stack of experts one token goes through, as far as the config says."""
        return int(getattr(self.text, "num_experts_per_tok", None) or 1)

    def to_hf(self) -> dict[str, Any]:
        return cast(dict[str, Any], from_json(self.raw))


def _other(entry: object) -> object:
    """Return another entry of a key; null for one that is neither a truth value nor a number."""
    if isinstance(entry, bool):
        return not entry
    return entry * 2 + 1 if isinstance(entry, int | float) else None


def _read(raw: Mapping[str, Any]) -> Any:
    """Return transformers' config object of the dict of a file, which stays as it is."""
    fields = {key: entry for key, entry in raw.items() if key not in ("model_type", "auto_map")}
    of_type = config_class(raw["model_type"])
    return of_type.from_dict(of_type._decode_special_floats(fields))


def config_class(kind: str) -> Any:
    """Return transformers' config class of a model type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


@lru_cache
def adopted_types() -> dict[str, str]:
    """Return the types of the installed transformers that make text from tokens, be it with images, and the
    class of each: of a model of several parts that of the whole.
    """
    from transformers.models.auto import modeling_auto as auto

    named = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {kind: name if isinstance(name, str) else name[0] for kind, name in named.items()}


def model_class(kind: str) -> Any:
    """Return transformers' class of a type's models."""
    return getattr(importlib.import_module("transformers"), adopted_types()[kind])


def first_place(config: Any) -> int:
    """Return the number of the first token's place in the table of positions."""
    return int(config.pad_token_id) + 1 if config.model_type in FROM_PADDING else 0


@contextmanager
def in_one_line(*where: object, expected: str) -> Iterator[None]:
    """Refuse in one line what transformers' code raises."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # whatever its own checks raise
        raised = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise BadInput(*where, expected=expected, found=raised) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers' logger say errors alone."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@lru_cache
def proved() -> dict[str, Any]:
    """Return the table that ``make any-model`` writes: ``transformers``, its version, and ``types``, each
    with its largest difference by axis, and ``why`` other axes are refused.
    """
    return read_toml(Path(__file__).with_name("proved.toml"))


def refusals(kind: str) -> dict[str, str]:
    """Return why axes of a type are not offered, by axis; why the whole type is not, under an empty name."""
    row, tried = proved()["types"].get(kind), proved()["transformers"]
    if row is None or "refused" in row:
        return {"": row["refused"] if row else f"no test has tried it with transformers {tried}"}
    reasons = AXES | row.get("why", {})
    return {axis: reasons[axis] for axis in AXES if axis not in row["proved"]}


def offered() -> dict[str, tuple[str, ...]]:
    """Return the types that pass, and of each the axes that tests have proved."""
    reasons_of = {kind: refusals(kind) for kind in proved()["types"]}
    passed = ((kind, reasons) for kind, reasons in reasons_of.items() if "" not in reasons)
    return {kind: tuple(axis for axis in AXES if axis not in reasons) for kind, reasons in passed}
