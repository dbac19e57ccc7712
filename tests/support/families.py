"""Make a model of transformers with random weights, and ours with the same, to compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from trilith.models import CausalLM, Family, ModelConfig, family_of

#: Some of the families' own ids lie outside a small vocabulary.
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}

#: Families with delta nets.
DELTA_NETS = {"qwen3_next", "qwen3_5_text"}


def close(raw: Mapping[str, Any]) -> float:
    """Return how far our logits may be from transformers' in fp32: 1e-5, and 2e-5 after a delta net.

    A delta net divides small numbers by their own size: both sides are then up to 1.5e-5 from fp64.
    """
    return 2e-5 if raw["model_type"] in DELTA_NETS else 1e-5


def family_and_config(raw: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Return the family of a config.json's dict, and what it reads in it."""
    family = family_of(raw)
    return family, family.from_hf(raw)


def model_of(raw: Mapping[str, Any], **options: Any) -> CausalLM:
    """Build our model of a config.json's dict; ``options`` are those of ``Family.build``."""
    family, config = family_and_config(raw)
    return family.build(config, **options)


def transformers_model(raw: Mapping[str, Any], *, spread: float = 0.1, seed: int = 0) -> Any:
    """Make transformers' model of a config.json's dict, in fp32 and ready for inference, all tensors random.

    Norms are not 1 and biases not 0: the default initialisation hides most mistakes. ``spread`` is the
    standard deviation of matrices; with a large one a model writes many different tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**(TOKENS | deepcopy({**raw})))  # which writes into what it is given
    made: Any = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(seed)
    for name, parameter in made.named_parameters():
        flat = parameter.ndim == 1
        mean = 0.5 if flat and not name.endswith("bias") else 0.0
        nn.init.normal_(parameter, mean, 0.3 if flat else spread)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):  # as far apart as the scores, all between 0 and 1
            nn.init.normal_(buffer, 0.0, 0.2)
    return made.eval()


def config_of(theirs: Any) -> dict[str, Any]:
    """Return the config.json's dict that transformers saves with this model."""
    return {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}


def ours_from(
    theirs: Any, raw: Mapping[str, Any] | None = None, stored: Mapping[str, Tensor] | None = None
) -> tuple[Family, ModelConfig, CausalLM]:
    """Build our model with their weights, through the table of names; ``raw`` replaces their config.

    ``stored``: what ``on_disk`` gives for their weights, where the caller has it already.
    """
    raw = config_of(theirs) if raw is None else raw
    family, config = family_and_config(raw)
    model = family.build(config).to_empty(device="cpu").eval()  # initial weights take longer than all else
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.zero_()
    tensors = dict(on_disk(theirs, theirs.state_dict()) if stored is None else stored)
    if theirs.config.tie_word_embeddings:
        del tensors[family.tied_head]
    for link in family.links(config)[0]:
        piece = tensors[link.hf][link.hf_box.slices]
        target = parameters[link.ours].data[link.ours_box.slices]
        target.copy_((piece.T if link.transpose else piece).view(target.shape))
    return family, config, model


def on_disk(theirs: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that files bear: transformers holds experts in stacks of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(theirs, dict(tensors))
    return {name: tensor.detach() for name, tensor in found.items()}


def in_files(family: Family, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of our parameters under the names that files bear; zeros where there are none."""
    links, shapes = family.links(config)
    like = next(iter(tensors.values()))
    written = {name: torch.zeros(shape, dtype=like.dtype) for name, shape in shapes.items()}
    for link in links:
        if link.ours in tensors:
            piece = tensors[link.ours].detach()[link.ours_box.slices]
            piece = piece.permute(*range(piece.ndim)[::-1]) if link.transpose else piece
            written[link.hf][link.hf_box.slices] = piece.reshape(link.hf_box.shape)
    return written


def with_adapters(model: Any, **lora: Any) -> Any:
    """Put PEFT's adapters on a model of transformers, all random: a B of zero would hide A's effect."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.2)
    return adapted.eval()
