"""Compute rotary position embedding, its halves in Hugging Face's order or with neighbours as pairs, and the
angles of each type of scaling that config files know.

Sources: Su et al. 2021; Chen et al. 2023 (linear); Peng et al. 2023 (yarn; dynamic in its section 3.3); Ding
et al. 2024 (longrope); Llama 3.1's release (llama3); transformers 5 (proportional), whose formulas these are.
"""

from collections.abc import Mapping
from math import ceil, floor, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel_state import require
from ..system import literal
from .autocast import without_autocast


class Rope:
    """Rotate queries or keys by the positions of one batch; made once a forward and given to every block.

    A head may be wider than the angles; the numbers after them get no position. ``interleaved``: the two
    numbers of a pair are neighbours (GPT-J, Cohere); otherwise they are half a head apart. ``sin`` has a
    minus for the first number of a pair, so that no number of a head is negated.
    """

    def __init__(self, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
        self.cos, self.sin, self.interleaved = cos, sin, interleaved

    def __call__(self, x_BHSE: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        if x_BHSE.shape[-1] > width:
            turned, still = x_BHSE.tensor_split((width,), dim=-1)
            # Tokens before heads in memory, as products leave them: attention's output is then no copy.
            return torch.cat((self(turned).transpose(1, 2), still.transpose(1, 2)), dim=-1).transpose(1, 2)
        if self.interleaved:
            first, second = x_BHSE[..., ::2], x_BHSE[..., 1::2]
            return x_BHSE * self.cos + torch.stack((second, first), dim=-1).flatten(-2) * self.sin
        first, second = x_BHSE.chunk(2, dim=-1)
        return x_BHSE * self.cos + torch.cat((second, first), dim=-1) * self.sin


class RotaryEmbedding(nn.Module):
    """Make a ``Rope`` from positions. It has no parameters and no buffers, so checkpoints do not contain it.

    If ``head_dim`` is smaller than that of the heads, only the first ``head_dim`` numbers of a head are
    rotated (partial rotary: GPT-J, GLM). ``scaling``: see ``inverse_frequencies``. Source: Su et al. 2021.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: Mapping[str, object] | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.theta, self.interleaved = head_dim, theta, interleaved
        self.scaling = scaling or {}
        self.kind = self.scaling.get("rope_type")
        # No buffers: never on the meta device, never saved.
        self._inverse = inverse_frequencies(head_dim, theta, scaling)
        self._long = inverse_frequencies(head_dim, theta, scaling, long=True)
        self._factor = attention_factor(scaling)

    @property
    def by_length(self) -> int | None:
        """Return the number of tokens above which a document's angles depend on its length, or ``None``."""
        return int(_number(self.scaling, ORIGINAL)) if self.kind in ("longrope", "dynamic") else None

    @without_autocast
    def forward(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> Rope:
        """Return the rope of ``positions``, (S,) or (B, S), in this dtype; angles are at least fp32.

        ``lengths``: number of tokens of each position's document, of the same shape; the default: each row
        of ``positions`` is one document.
        """
        inner = torch.promote_types(dtype, torch.float32)
        angles = positions.to(inner).unsqueeze(-1) * self._inverses(positions, lengths).to(inner)
        pair = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        if pair.ndim == 3:
            pair = pair.unsqueeze(1)  # (B, 1, S, E) meets (B, H, S, E)
        cos, sin = pair.cos(), pair.sin()
        (sin[..., ::2] if self.interleaved else sin[..., : sin.shape[-1] // 2]).neg_()
        if self._factor != 1:
            cos, sin = cos * self._factor, sin * self._factor
        return Rope(cos.to(dtype), sin.to(dtype), interleaved=self.interleaved)

    def _inverses(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the angles per position, (E / 2,), or those of each token."""
        inverse, long = self._inverse.to(positions.device), self._long.to(positions.device)
        if not positions.is_meta:
            self._inverse, self._long = inverse, long
        if self.by_length is None:
            return inverse
        if lengths is None:
            lengths = (positions.amax(-1, keepdim=True) + 1).expand_as(positions)
        if self.kind == "dynamic":
            return dynamic_frequencies(lengths.float(), self.head_dim, self.theta, self.scaling)
        return torch.where((lengths > self.by_length).unsqueeze(-1), long, inverse)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta}, scaling={self.scaling or None}"


SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
ORIGINAL = "original_max_position_embeddings"
Scaling = Mapping[str, object]


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Scaling | None = None, *, long: bool = False
) -> Tensor:
    """Return the angle per position of each pair of dims: fp32, (head_dim / 2,).

    ``scaling`` has the keys of a config's ``rope_scaling``: ``rope_type``, ``factor`` and the keys of this
    type. ``long``: whether the document has more tokens than ``original_max_position_embeddings`` (longrope).
    With dynamic scaling the angles are those of a document within this length; see ``dynamic_frequencies``
    for longer ones. Raises ``BadInput`` for an unknown type or a missing number.
    """
    scaling = scaling or {}
    kind = str(scaling.get("rope_type", "default"))
    require(kind in SCALINGS, "rope", "rope_type", f"one of {', '.join(SCALINGS)}", kind)
    waves = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    inverse: Tensor = 1.0 / waves
    if kind == "default":
        return inverse
    original = 0.0 if kind in ("linear", "proportional") else _number(scaling, ORIGINAL)
    if kind == "longrope":
        key = "long_factor" if long else "short_factor"
        factors: Any = scaling.get(key)
        numbers = isinstance(factors, list | tuple) and len(factors) == len(waves)
        require(numbers, "rope", key, f"{len(waves)} numbers", literal(factors))
        inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * waves)
        return inverse
    factor = _number(scaling, "factor")
    if kind == "dynamic":
        return inverse
    if kind == "proportional":  # pairs beyond the share do not turn
        inverse[int(_number(scaling, "partial_rotary_factor") * head_dim // 2) :] = 0.0
    if kind in ("linear", "proportional"):
        return inverse / factor
    if kind == "yarn":
        extrapolation = 1 - _yarn_ramp(head_dim, theta, scaling, original)
        inverse = 1.0 / (factor * waves) * (1 - extrapolation) + inverse * extrapolation
        return inverse
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    wavelength = 2 * pi / inverse
    # Long waves are stretched by the factor, short ones kept, those between blended.
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, scaled)


def dynamic_frequencies(lengths: Tensor, head_dim: int, theta: float, scaling: Scaling) -> Tensor:
    """Return angles per position, (..., head_dim / 2), of tokens whose documents have these ``lengths``."""
    factor, original = _number(scaling, "factor"), _number(scaling, ORIGINAL)
    stretch = factor * lengths.clamp(min=original) / original - (factor - 1)
    base = theta * stretch ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=base.dtype, device=base.device) / head_dim
    inverse: Tensor = 1.0 / base.unsqueeze(-1) ** exponents
    return inverse


def attention_factor(scaling: Scaling | None) -> float:
    """Return the factor of cosine and sine; scores grow with its square (yarn, longrope)."""
    scaling = scaling or {}
    kind = scaling.get("rope_type")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")
    if kind == "longrope":
        return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(_number(scaling, ORIGINAL)))
    keys = "mscale", "mscale_all_dim"
    over, under = (_number(scaling, key) for key in keys) if all(map(scaling.get, keys)) else (1.0, 0.0)
    return yarn_scale(factor, over) / yarn_scale(factor, under)


def yarn_scale(factor: float, scale: float) -> float:
    """Return the factor by which yarn stretches queries and keys, for ``mscale`` or ``mscale_all_dim``."""
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


def _yarn_ramp(head_dim: int, theta: float, scaling: Scaling, original: float) -> Tensor:
    """Return, for each pair, 0 (many rotations within the original length: kept) to 1 (few: stretched)."""

    def pair_of(rotations: float) -> float:
        return head_dim * log(original / (rotations * 2 * pi)) / (2 * log(theta))

    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    assert isinstance(fast, int | float) and isinstance(slow, int | float)
    first, last = pair_of(fast), pair_of(slow)
    if scaling.get("truncate") is not False:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    return ((pairs - first) / (last - first)).clamp(0, 1)


def _number(scaling: Scaling, key: str) -> float:
    number: Any = scaling.get(key)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    require(is_number, "rope", key, "a number", literal(number))
    return float(number)
