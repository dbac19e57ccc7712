"""Hold the config of an adopted model: transformers' own, as text, and the numbers that trilith reads."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from typing import Any, Self

from pydantic import Field
from pydantic_core import from_json

from ...parallel_state import BadInput, Layout, nearest
from ..base.config import ModelConfig, check_dtype
from ..base.fields import Count, Whole
from ..base.keys import INERT, MOST_BLOCKS, check_keys, names

#: Keys that say nothing of the forward pass; two configs that differ in them are of one model.
_FREE = INERT - {"model_type", "is_decoder", "pad_token_id", "pretraining_tp", "chunk_size_feed_forward"}


#: The largest sizes that are read.
_MOST = {"num_hidden_layers": MOST_BLOCKS, "vocab_size": 2**24, "hidden_size": 2**24}
#: Types that decode whatever their ``is_decoder`` says.
_DECODERS = {"gpt_neox", "gpt_neox_japanese"}
#: Types that count the places of tokens from their padding token's number.
FROM_PADDING = names("""
    roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl camembert data2vec-text xmod
""")
#: What a decoder that was one of two parts calls the number of its blocks.
_BLOCKS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")


class AdoptedConfig(ModelConfig):
    """Hold ``raw``, all that transformers' config class says, as JSON with sorted keys."""

    raw: str
    vocab_size: Count
    hidden_size: Whole
    intermediate_size: int = 0
    num_hidden_layers: Whole
    num_attention_heads: int = 1
    max_position_embeddings: Whole
    initializer_range: float = Field(default=0.02)

    @property
    def model_type(self) -> str:
        """Return transformers' name of the type."""
        return str(from_json(self.raw)["model_type"])

    def in_transformers(self) -> Any:
        """Return a new config object of transformers: models write into theirs, and share it."""
        stated = from_json(self.raw)
        with quiet():  # ids of tokens that the text leaves out have their defaults
            return config_class(stated.pop("model_type")).from_dict(stated)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the dict of a config.json as transformers does. Raises ``BadInput`` for what it refuses, a
        model made of several, and one that is no decoder.
        """
        check_keys(raw, where)
        kind = str(raw["model_type"])
        if raw.get("quantization_config") is not None:
            raise BadInput(
                where, "quantization_config", expected="absent: quantised weights are not read", found="one"
            )
        for key in ("dtype", "torch_dtype"):
            check_dtype(key, raw.get(key), where)
        if raw.get("auto_map"):
            warnings.warn(f"{where}: auto_map is ignored; no code from a checkpoint is run", stacklevel=2)
        if raw.get("output_router_logits"):
            lost = "the balance loss that transformers adds is not computed"
            warnings.warn(f"{where}: output_router_logits is ignored; {lost}", stacklevel=2)
        stated = {key: entry for key, entry in raw.items() if key not in ("model_type", "auto_map")}
        try:
            config = config_class(kind).from_dict(deepcopy(stated))
            known = {**config.to_dict()}
        except Exception as error:  # whatever its own checks raise
            first = " ".join(str(error).split())[:200]
            expected = f"what transformers' {kind} reads"
            raise BadInput(where, expected=expected, found=f"{type(error).__name__}: {first}") from None
        for key in cls.unknown_keys(raw):
            warnings.warn(f"{where}: {key[:80]} is unknown and ignored", stacklevel=2)
        # No checkpoint holds infinity, but where it is a type's default it comes back by itself.
        usual, free = usual_config(kind).to_dict(), {*_FREE}
        endless = [key for key, entry in known.items() if "Infinity" in json.dumps(entry, default=str)]
        free |= {key for key in endless if known[key] == usual.get(key)}
        text = {key: entry for key, entry in known.items() if key not in free} | {"model_type": kind}
        try:
            written = json.dumps(text, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(where, expected="numbers, texts and lists", found=str(error)) from None
        return cls._read(config, written, where)

    @classmethod
    def _read(cls, config: Any, written: str, where: str) -> Self:
        text = text_of(config)
        decodes = getattr(text, "is_decoder", True) or config.model_type in _DECODERS
        if (two := getattr(config, "is_encoder_decoder", False)) or not decodes:
            todo = (
                "Set is_decoder to true" + " and is_encoder_decoder to false: its decoder trains alone" * two
            )
            if parts := ", ".join(sorted(getattr(config, "sub_configs", {}))):
                todo = f"Models that are made of others ({parts}) are not taken"
            raise BadInput(where, "is_decoder", expected="a decoder alone", found="another model", todo=todo)

        def number(name: str, default: int) -> int:
            entry = getattr(text, name, None)
            return entry if type(entry) is int and entry > 0 else default

        fields = {key: number(key, 0) for key in _MOST}
        fields["num_hidden_layers"] = next((count for key in _BLOCKS if (count := number(key, 0))), 0)
        for key, most in _MOST.items():
            if not 0 < fields[key] <= most:
                raise BadInput(where, key, expected=f"1 to {most}", found=fields[key])
        spread = getattr(text, "initializer_range", 0.02)
        places = number("max_position_embeddings", 2**31 - 1) - first_place(config)
        return cls(
            raw=written,
            **fields,
            intermediate_size=number("intermediate_size", 0),
            num_attention_heads=number("num_attention_heads", 1),
            max_position_embeddings=places,
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            initializer_range=float(spread) if isinstance(spread, int | float) else 0.02,
        )

    @classmethod
    def unknown_keys(cls, raw: Mapping[str, Any]) -> list[str]:
        """Return the keys that transformers' config class does not name."""
        return sorted(raw.keys() - readable_keys(str(raw["model_type"])) - INERT - {"implementation"})

    @property
    def experts_of_token(self) -> int:
        """Return how many of a stack of experts one token goes through, as far as the config says."""
        return int(getattr(text_of(self.in_transformers()), "num_experts_per_tok", None) or 1)

    @property
    def drops(self) -> bool:
        """Tell whether some share of numbers may be dropped in training."""
        stated = from_json(self.raw).items()
        return any("drop" in key and isinstance(share, float | int) and share > 0 for key, share in stated)

    @property
    def head_is_last(self) -> bool:
        """Tell no: transformers' code may change the logits."""
        return False

    @property
    def tensor_units(self) -> dict[str, int]:
        """Return nothing: each layer refuses a cut of its own that is not even."""
        return {}

    def check_layout(self, layout: Layout) -> None:
        """Refuse more stages than there are blocks."""
        if layout.stages > self.num_hidden_layers:
            most = max(self.num_hidden_layers // layout.virtual_stages, 1)
            expected, todo = f"at most {most}", nearest("pipeline", [most], layout.pipeline)
            raise BadInput("layout", "pipeline", expected=expected, found=layout.pipeline, todo=todo)

    def to_hf(self) -> dict[str, Any]:
        """Return the dict of a config.json."""
        stated: dict[str, Any] = from_json(self.raw)
        return stated


def config_class(kind: str) -> Any:
    """Return transformers' config class of a model type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


def text_of(config: Any) -> Any:
    """Return the part of transformers' config that describes the blocks which make text."""
    return config if getattr(config, "is_encoder_decoder", False) else config.get_text_config(decoder=True)


def first_place(config: Any) -> int:
    """Return the number of the first token's place in the table of positions."""
    return int(config.pad_token_id) + 1 if config.model_type in FROM_PADDING else 0


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
def usual_config(kind: str) -> Any:
    """Return transformers' config of a type with all defaults, of which it warns where they do not fit."""
    with quiet():
        return config_class(kind)()


@lru_cache
def readable_keys(kind: str) -> frozenset[str]:
    """Return the keys that transformers' config class of a type reads."""
    from inspect import signature

    made = usual_config(kind)
    keys = {*made.to_dict(), *made.attribute_map, *signature(type(made).__init__).parameters}
    return frozenset(keys | {"rope_scaling", "rope_theta"})
