"""Define what families' configs share: Hugging Face's names, strict types, refusal of unsupported fields."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from ...parallel_state import BadInput, Layout, from_validation, nearest, nearest_divisors, nearest_multiples
from ...system import visible


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def without(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the table without these keys."""
    return {key: value for key, value in table.items() if key not in keys}


#: Keys of a config.json that do not change the forward pass of a causal language model.
INERT = names("""
    _attn_implementation _attn_implementation_autoset _name_or_path _commit_hash architectures
    _sliding_window_pattern attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping encoder_no_repeat_ngram_size eos_token_id ep_size experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label
    is_decoder keys_to_ignore_at_inference label2id length_penalty max_length
    min_length model_type n_ctx name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences
    output_attentions output_past output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id seq_aux suppress_tokens task_specific_params
    selective_checkpoint_enabled sequence_parallel_enabled summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    transformers.js_config typical_p unsloth_fixed use_bfloat16 use_cache
""")

#: Keys that change the forward pass in ways that no family here computes; null or false passes.
DENIED = names("""
    quantization_config sliding_window attn_logit_softcapping final_logit_softcapping logits_scaling
    logit_scale embedding_multiplier residual_multiplier attention_multiplier partial_rotary_factor
    num_local_experts num_experts n_routed_experts use_qk_norm qk_layernorm query_pre_attn_scalar
    rope_interleaved alibi layer_types use_sliding_window no_rope_layers attention_chunk_size
    scale_embedding scale_depth pruned_heads add_cross_attention is_encoder_decoder clip_qkv
    compression_config use_parallel_residual rotary_pct rotary_dim qk_norm attn_temperature_tuning
    per_layer_config
""")


#: Limits of a config.json. Every tensor of a model has an entry in several tables long before it has memory,
#: so a huge number would fill the memory with tables. The largest published models have 126 blocks, or 61
#: with 256 experts each.
MOST_KEYS, MOST_BLOCKS, MOST_EXPERTS, LARGEST_NUMBER = 2**12, 2**14, 2**20, 2**31 - 1


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Refuse more keys, on all levels together, than there is a use for: each that is unknown costs a warning
    or an error of its own.
    """
    left: list[Mapping[str, Any]] = [raw]
    count = 0
    while left:
        one = left.pop()
        count += len(one)
        left += [value for value in one.values() if isinstance(value, Mapping)]
        if count > MOST_KEYS:
            raise BadInput(where, expected=f"at most {MOST_KEYS} keys in all", found="more")


class ModelConfig(BaseModel):
    """List the fields of a config.json that a family computes with, under Hugging Face's names."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    #: The family's names of our fields, if its config.json does not use the common names of transformers.
    OWN_NAMES: ClassVar[Mapping[str, str]] = {}
    #: Keys that the family has no choice in, and the values that say what it does anyway. Any other value is
    #: refused. They are no fields of the config, even where the class that this one inherits from has one.
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    #: Fields whose names are no keys of the family's config.json: transformers ignores a key of this name
    #: and reads the family's own (``OWN_NAMES``). Such a key may repeat what the own key says, and no more.
    NOT_KEYS: ClassVar[frozenset[str]] = frozenset()

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the dict of a config.json. Raises ``BadInput`` with the key, the value expected and the value
        found.

        An unknown key gives a warning only, unless it is known to change the forward pass.
        """
        check_keys(raw, where)
        raw = cls._without_unread(raw)
        repeated = {key: raw[key] for key in sorted(cls.NOT_KEYS & raw.keys())}
        raw = without(raw, *repeated)
        for key in sorted(cls.HARMLESS.keys() & raw):
            _judge_fixed(key, raw[key], cls.HARMLESS[key], where)
        raw = {key: value for key, value in raw.items() if key not in cls.HARMLESS}
        fields = cls.read(raw, where)
        for key in cls.unknown_keys(raw):
            _judge(key, raw[key], where)
        for key in ("dtype", "torch_dtype"):
            _check_dtype(key, raw.get(key), where)
        if raw.get("auto_map"):
            warnings.warn(f"{where}: auto_map is ignored; no code from a checkpoint is run", stacklevel=2)
        for key, value in fields.items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise BadInput(where, cls.spelled(key), expected="a finite number", found=value)
            if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
                expected, found = f"at most {LARGEST_NUMBER}", f"{value:.3e}"
                raise BadInput(where, cls.spelled(key), expected=expected, found=found)
        try:
            config = cls(**fields)
        except ValidationError as error:
            raise from_validation(where, error, spelled=lambda key: cls.spelled(key or "config")) from None
        for key, value in repeated.items():
            config._check_repeated(key, value, where)
        config._check_count(where)
        config.check(where)
        config.check_stated(raw, where)
        return config

    def _check_repeated(self, key: str, value: object, where: str) -> None:
        """Refuse a key that is not read and says something else than the family's own key."""
        stated = getattr(self, key)
        if value is not None and value != stated:
            expected = f"absent or {repr(stated)[:80]}, as {self.spelled(key)} says"
            todo = f"transformers does not read this key: state it as {self.spelled(key)}"
            raise BadInput(where, key, expected=expected, found=repr(value)[:80], todo=todo)

    def _check_count(self, where: str) -> None:
        """Refuse more blocks than could be listed."""
        blocks = self.num_hidden_layers
        if blocks > MOST_BLOCKS:
            key = self.spelled("num_hidden_layers")
            raise BadInput(where, key, expected=f"at most {MOST_BLOCKS}", found=blocks)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the fields of this class from Hugging Face's dict; a family extends it if its form
        differs.
        """
        fields: dict[str, Any] = {}
        for key, value in raw.items():
            name = cls.OWN_NAMES.get(key, key)
            if name not in cls.model_fields or value is None:
                continue
            if name in fields and fields[name] != value:
                expected = f"{fields[name]!r}, as {name} has under its other name"
                raise BadInput(where, key, expected=expected, found=repr(value))
            fields[name] = value
        return fields

    @classmethod
    def read_keys(cls) -> set[str]:
        """Return the keys that ``read`` uses in addition to the names of the fields."""
        return set()

    @classmethod
    def unknown_keys(cls, raw: Mapping[str, Any]) -> list[str]:
        """Return the keys that the family neither reads nor knows to have no effect."""
        known = {*cls.model_fields, *cls.OWN_NAMES, *cls.HARMLESS, *cls.read_keys()}
        return sorted(raw.keys() - known - INERT)

    @classmethod
    def spelled(cls, name: str) -> str:
        """Return the name of a field in this family's config.json."""
        return next((theirs for theirs, ours in cls.OWN_NAMES.items() if ours == name), name)

    def check(self, where: str) -> None:
        """Refuse numbers that do not fit together."""

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        """Refuse keys of the config.json that are not true of this model."""

    @property
    def embedding_width(self) -> int:
        """Return how many numbers the embedding of a token has, and the output layer takes."""
        return self.hidden_size

    @property
    def further_blocks(self) -> int:
        """Return the number of blocks that a checkpoint may hold after the last one and that are not
        modelled here.
        """
        return 0

    @property
    def mtp_blocks(self) -> int:
        """Return the number of blocks after the last one that the model has, to predict further tokens."""
        return 0

    @property
    def mtp_numbers(self) -> range:
        """Return the numbers of these blocks."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.mtp_blocks)

    @property
    def tensor_units(self) -> dict[str, int]:
        """Return the numbers that the tensor axis must divide, by names for users."""
        return {
            self.spelled("num_attention_heads"): self.num_attention_heads,
            self.spelled("intermediate_size"): self.intermediate_size,
        }

    def check_layout(self, layout: Layout) -> None:
        """Refuse axes that do not divide what they cut, naming the nearest that do."""
        units = self.tensor_units
        common = math.gcd(*units.values())
        for key, number in units.items():
            if number % layout.tensor:
                raise BadInput(
                    "layout",
                    "tensor",
                    expected=f"a divisor of {key}={number}",
                    found=layout.tensor,
                    todo=f"{nearest_divisors('tensor', common, layout.tensor)}. "
                    + nearest_multiples(f"{key} on tensor={layout.tensor}", layout.tensor, number),
                )
        if layout.stages > self.num_hidden_layers:
            virtual = layout.virtual_stages
            most = max(self.num_hidden_layers // virtual, 1)
            blocks = "one block a stage" if virtual == 1 else f"{virtual} stages a rank, one block a stage"
            raise BadInput(
                "layout",
                "pipeline",
                expected=f"at most {most}, {blocks}",
                found=layout.pipeline,
                todo=nearest("pipeline", [most], layout.pipeline),
            )

    @classmethod
    def _without_unread(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out what means nothing in a config by ``to_hf``, which at first wrote every field."""
        if not set(cls.model_fields) <= set(raw):
            return raw
        unread = {key for key in cls.HARMLESS if key in cls.model_fields and raw[key] is False}
        return {key: value for key, value in raw.items() if key not in unread}

    def to_hf(self) -> dict[str, Any]:
        """Return the dict of a config.json for a model that did not come from Hugging Face."""
        return {key: value for key, value in self.model_dump().items() if key not in self.HARMLESS}


def _check_dtype(key: str, value: object, where: str) -> None:
    """Refuse what is no data type of weights: it is what a converted model's config would state anew."""
    known = getattr(torch, value, None) if isinstance(value, str) else None
    if value not in (None, "auto") and not (isinstance(known, torch.dtype) and known.is_floating_point):
        expected = "float32, bfloat16 or another floating type of torch's"
        raise BadInput(where, key, expected=expected, found=repr(value)[:80])


def _judge_fixed(key: str, value: object, legal: tuple[object, ...], where: str) -> None:
    if value is not None and not any(type(value) is type(one) and value == one for one in legal):
        expected = " or ".join(map(repr, legal)) or "absent"
        raise BadInput(where, key, expected=f"{expected}: this family has no other", found=repr(value)[:80])


def _judge(key: str, value: object, where: str) -> None:
    if key in DENIED:
        if value not in (None, False, [], {}):
            raise BadInput(
                where,
                key,
                expected="absent: it changes the model and is not supported",
                found=repr(value)[:80],
            )
    else:
        unknown = f"{visible(key[:80])}={repr(value)[:80]}"
        warnings.warn(f"{where}: {unknown} is unknown and ignored", stacklevel=3)
