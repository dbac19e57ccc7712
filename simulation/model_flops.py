"""Model FLOPs of a token and the peaks of devices, from which MFU follows in the two conventions in use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..layers import AttentionLayer, MoE
from ..parallel_state import declarations
from .kinds_of_blocks import signature
from .micro_batch import MicroBatch
from .pieces import ModelPieces
from .trace import Piece

if TYPE_CHECKING:
    from ..models import CausalLM, Family, ModelConfig

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
    ("RTX 4090", 165.2e12),
    ("MI300X", 1307e12),
)


#: Tokens of the row that is traced to count FLOPs.
_TRACED = 128


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Count the FLOPs of one token in one forward pass; a multiplication and its addition are two.

    ``matrices``: every weight matrix. ``attention``: scores and their sum over the values, as if each token
    saw all of its sequence. ``trained``: the matrices for which a backward pass computes gradients.
    ``other``: what no convention of MFU counts: a recurrence, a convolution, looking tokens up.
    """

    matrices: float = 0.0
    attention: float = 0.0
    trained: float = 0.0
    other: float = 0.0

    @property
    def full(self) -> float:
        """Return FLOPs of forward and backward, attention without a mask, as torchtitan and nanotron do."""
        return 2 * self.matrices + self.trained + 3 * self.attention

    @property
    def causal(self) -> float:
        """Return FLOPs of forward and backward, attention under a causal mask, as Megatron-LM
        counts since 2025.
        """
        return self.full - 1.5 * self.attention

    @property
    def forward(self) -> float:
        """Return all FLOPs of the forward, attention under a causal mask."""
        return self.matrices + self.attention / 2 + self.other


class ModelFlops(NamedTuple):
    """Count the FLOPs of a token's forward: before the blocks, in each of them, and behind them."""

    first: TokenFlops
    blocks: list[TokenFlops]
    last: list[TokenFlops]

    @property
    def whole(self) -> TokenFlops:
        parts = [*self.blocks, *self.last, self.first]
        names = ("matrices", "attention", "trained", "other")
        return TokenFlops(*(sum(getattr(part, name) for part in parts) for name in names))


def flops_per_token(model: CausalLM, sequence_length: int) -> TokenFlops:
    """Count the FLOPs of a token in a whole model: the same in every layout. The model may be on the meta
    device.

    Frozen weights have no FLOPs for a gradient of their own. Padding of the vocabulary, norms, activation
    functions and recomputation do not count.
    Source: Narayanan et al. 2021 (appendix); Chowdhery et al. 2022 (appendix B).
    """
    return _of_model(model, sequence_length).whole


def flops_of_token(family: Family, config: ModelConfig, sequence_length: int) -> TokenFlops:
    """Count what ``flops_per_token`` does, of a config's model, which is traced once for a process."""
    return flops_of_config(family, config, sequence_length).whole


@lru_cache(maxsize=64)
def flops_of_config(family: Family, config: ModelConfig, sequence_length: int) -> ModelFlops:
    """Count the FLOPs of a token's forward in the parts of a config's model, traced once for a process."""
    return _of_model(family.on_meta(config), sequence_length)


def _of_model(model: CausalLM, sequence_length: int) -> ModelFlops:
    if model.family.adopted:
        return _of_weights(model, sequence_length)
    pieces = ModelPieces(model, model.state)
    # Products with weights have as many for each token of a short row; a recurrence has from a chunk on.
    batch = MicroBatch(1, min(sequence_length, _TRACED), gpu=True)

    def count(piece: Piece, block: nn.Module | None = None, looked_up: float = 0.0) -> TokenFlops:
        attention = 0.0 if block is None else attention_flops(block, sequence_length)
        of_all_ranks = (model.state.tensor.size * flops / batch.count for flops in piece.plain.forward_flops)
        matrices, trained, other = of_all_ranks
        return TokenFlops(matrices, attention, trained, looked_up + (0.0 if attention else other))

    kinds: dict[object, TokenFlops] = {}
    blocks = []
    for block in model.layers.values():
        kind = signature(block)
        if kind not in kinds:
            kinds[kind] = count(pieces.block(block, batch, reached=True), block)
        blocks.append(kinds[kind])
    widths = [getattr(module, "embedding_dim", 0) for part in model.entry for module in part.modules()]
    first = count(pieces.entry(batch), looked_up=2.0 * sum(widths))
    last = [_without_padding(count(pieces.exit(batch, reached=True, in_loss=False)), model)]
    for place, prediction in enumerate(model.mtp.values()):
        piece = pieces.prediction(place, batch, reached=True)
        last.append(count(piece, prediction, looked_up=2.0 * model.embed.embedding_dim))
    return ModelFlops(first, blocks, last)


def _of_weights(model: CausalLM, sequence_length: int) -> ModelFlops:
    """Count by the sizes of weights, of a model whose code is not ours: two for each number of a matrix, and
    of stacks of experts for the part that one token goes through; attention as if heads were as wide as D.
    """
    config, declared = model.config, declarations(model)

    def count(names: Mapping[str, nn.Parameter], attention: float = 0.0) -> TokenFlops:
        matrices = trained = 0.0
        for name, parameter in names.items():
            shape = declared[name].shape
            if len(shape) >= 2:
                share = config.experts_of_token / shape[0] if len(shape) == 3 else 1.0
                matrices += 2.0 * prod(shape) * min(share, 1.0)
                trained += 2.0 * prod(shape) * min(share, 1.0) * parameter.requires_grad
        return TokenFlops(matrices, attention, trained)

    everything = dict(model.named_parameters())
    paths = {module: path for path, module in model.named_modules()}
    counted = []
    for block in model.layers.values():
        inner = {name: p for name, p in everything.items() if name.startswith(f"{paths[block]}.")}
        counted.append(count(inner, 4.0 * config.hidden_size * sequence_length))
    width = 2.0 * config.vocab_size * config.hidden_size
    last = TokenFlops(width, 0.0, width)
    return ModelFlops(TokenFlops(other=2.0 * config.hidden_size), counted, [last])


def _without_padding(counted: TokenFlops, model: CausalLM) -> TokenFlops:
    """Take away the products with rows that only pad the vocabulary, once for each prediction."""
    weight = model.head_weight
    rows, width = weight.shape
    padding = 2.0 * (rows - model.config.vocab_size) * width * (1 + len(model.mtp))
    trained = counted.trained - padding * weight.requires_grad
    return replace(counted, matrices=counted.matrices - padding, trained=trained)


def attention_flops(block: nn.Module, length: int) -> float:
    """Return the FLOPs of attention of one token in a forward, over all tensor ranks: its scores with all
    tokens of its row, and their sum over the values.
    """
    layers = (layer for layer in block.modules() if isinstance(layer, AttentionLayer))
    return length * sum(2.0 * layer.heads * (layer.key_dim + layer.value_dim) for layer in layers)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Count the parameters of a model: ``whole``, those that are ``trained``, and the ``active`` ones, which
    one token uses: of each layer's experts as many as the router chooses. Padding and buffers, which no
    gradient moves, do not count; embedding tables do.
    """

    whole: int
    trained: int
    active: int


def parameters_of(model: nn.Module) -> Parameters:
    """Count the parameters of a whole model, which may be on the meta device."""
    declared = declarations(model).items()
    sizes = {name: prod(declaration.shape) for name, declaration in declared if not declaration.buffer}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    idle = 0
    for mixture in (module for module in model.modules() if isinstance(module, MoE)):
        size = sum(prod(declaration.shape) for declaration in declarations(mixture.experts).values())
        idle += size - size * mixture.router.top_k // mixture.router.num_experts
    whole = sum(sizes.values())
    return Parameters(whole, sum(sizes[name] for name in trained & sizes.keys()), whole - idle)


@dataclass(frozen=True, slots=True)
class Utilization:
    """State MFU in both conventions: the share of the devices' peak that the model's own FLOPs take."""

    causal: float
    full: float


class Mfu:
    """Compute ``mfu(tokens_per_second)`` of all ranks together; ``None`` if a device's peak is not known."""

    def __init__(self, flops: TokenFlops, world: int, peak: float | None) -> None:
        self.flops, self.world, self.peak = flops, world, peak

    def __call__(self, tokens_per_second: float) -> Utilization | None:
        if self.peak is None:
            return None
        peak = self.world * self.peak
        return Utilization(
            tokens_per_second * self.flops.causal / peak, tokens_per_second * self.flops.full / peak
        )


def peak_flops(device: torch.device, compute: torch.dtype) -> float | None:
    """Return the FLOP/s of a device by its name, in bf16 or fp16; ``None`` if not known, and for a CPU."""
    if device.type != "cuda" or compute not in (torch.bfloat16, torch.float16):
        return None
    return peak_named(torch.cuda.get_device_name(device))


def peak_named(name: str) -> float | None:
    """Return the table's peak for a device of this name."""
    return next((peak for words, peak in PEAKS if re.search(rf"\b{words}\b", name)), None)
