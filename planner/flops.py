"""Model FLOPs of a token and the peaks of devices, from which MFU follows in the two conventions in use."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch

from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Declaration

#: Tables that are looked up, not multiplied by; tied to the output layer, the first is its matrix after all.
_TOKENS, _LOOKED_UP = "embed.weight", frozenset({"embed.weight", "position.weight"})

#: Dense bf16 FLOP/s by words of the device's name, the first that fits. Source: the makers' data sheets.
PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2.25e15),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("MI300X", 1307e12),
)


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """FLOPs of one token in one forward pass; a multiplication and its addition are two.

    ``matrices``: every weight matrix. ``attention``: scores and their sum over the values, as if each token
    saw all of its sequence. ``trained``: the matrices that a backward pass makes gradients of.
    """

    matrices: float
    attention: float
    trained: float

    @property
    def full(self) -> float:
        """Forward and backward, attention as if without a mask: torchtitan's and nanotron's count."""
        return 2 * self.matrices + self.trained + 3 * self.attention

    @property
    def causal(self) -> float:
        """Forward and backward, the half of attention that a causal mask leaves: Megatron-LM's count."""
        return self.full - 1.5 * self.attention


def flops_per_token(
    family: Family, config: ModelConfig, sequence_length: int, *, frozen: Collection[str] = ()
) -> TokenFlops:
    """What the model costs by its config, the same in every layout; ``frozen``: our names of what stays.

    Padding of the vocabulary, norms, activations and what is computed again to save memory do not count.
    Source: Narayanan et al. 2021 (appendix); Chowdhery et al. 2022 (appendix B).
    """
    (trained,) = family.declarations(config)
    trained = {name: one for name, one in trained.items() if name not in frozen}
    (whole,) = (family.base if isinstance(family, AdaptedFamily) else family).declarations(config)
    heads = config.num_attention_heads * int(getattr(config, "head_dim", 0))
    return TokenFlops(
        matrices=_multiplied(whole | trained, config),
        attention=4.0 * config.num_hidden_layers * heads * sequence_length,
        trained=_multiplied(trained, config),
    )


def forward_flops(
    family: Family, config: ModelConfig, sequence_length: int
) -> tuple[list[float], float, float]:
    """Of a token's forward: of each block, of the embedding, of the output layer. Attention is causal.

    Looking a row up multiplies nothing; its numbers are read and, backwards, added: two a number.
    """
    (stated,) = family.declarations(config)
    heads = config.num_attention_heads * int(getattr(config, "head_dim", 0))
    blocks = []
    for number in range(config.num_hidden_layers):
        own = {name: one for name, one in stated.items() if name.startswith(f"layers.{number}.")}
        blocks.append(_multiplied(own, config) + 2.0 * heads * sequence_length)
    tables = [one for name, one in stated.items() if name in _LOOKED_UP]
    embedding = 2.0 * sum(one.shape[1] for one in tables)
    head = _multiplied({n: one for n, one in stated.items() if not n.startswith("layers.")}, config)
    return blocks, embedding, head


def active_parameters(stated: Mapping[str, Declaration], config: ModelConfig) -> int:
    """Of these weights, those that one token meets: of a stack of experts as many as the token goes through.

    Padding is left out, and what no gradient moves; tables that are looked up count.
    """
    return sum(_met(one, config) for one in stated.values() if not one.buffer)


def _met(one: Declaration, config: ModelConfig) -> int:
    size = prod(one.shape)
    return size * config.experts_of_token // one.shape[0] if one.experts else size


def _multiplied(stated: Mapping[str, Declaration], config: ModelConfig) -> float:
    """Two a weight of each matrix that a token is multiplied with."""
    return 2.0 * sum(
        _met(one, config)
        for name, one in stated.items()
        if (len(one.shape) == 2 or one.experts)
        and (name not in _LOOKED_UP or (config.tie_word_embeddings and name == _TOKENS))
    )


@dataclass(frozen=True, slots=True)
class Utilization:
    """MFU in both conventions: the share of the devices' peak that the model's own FLOPs take."""

    causal: float
    full: float


class Mfu:
    """``mfu(tokens_per_second)`` of all ranks together; ``None`` where the peak of a device is not known."""

    def __init__(self, flops: TokenFlops, world: int, peak: float | None) -> None:
        self.flops, self.peak = flops, None if peak is None else peak * world

    def __call__(self, tokens_per_second: float) -> Utilization | None:
        if self.peak is None:
            return None
        share = tokens_per_second / self.peak
        return Utilization(share * self.flops.causal, share * self.flops.full)


def peak_flops(device: torch.device, compute: torch.dtype) -> float | None:
    """FLOP/s of one device by its name, in bf16 or fp16; ``None`` for a CPU, other formats, other devices."""
    if device.type != "cuda" or compute not in (torch.bfloat16, torch.float16):
        return None
    return peak_named(torch.cuda.get_device_name(device))


def peak_named(name: str) -> float | None:
    """The table's peak for a device of this name."""
    return next((peak for words, peak in PEAKS if re.search(rf"\b{words}\b", name)), None)
