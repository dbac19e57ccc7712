"""Rotary position embedding, in Hugging Face's half-split convention, with its linear and llama3 scalings."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi

import torch
from torch import Tensor, nn

from ..parallel_state import BadInput
from .autocast import without_autocast
from .cost import Cost, Tokens

SCALINGS = ("default", "linear", "llama3")


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, object] | None = None) -> Tensor:
    """Return the angle per position of each pair of dims: fp32, (head_dim / 2,).

    ``scaling`` has Hugging Face's keys: ``rope_type`` with ``factor`` (linear), and for llama3 also
    ``low_freq_factor``, ``high_freq_factor`` and ``original_max_position_embeddings``. Sources: Su et al.
    2021; Chen et al. 2023 (linear); Llama 3.1's release (llama3). Raises ``BadInput`` for another type.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inverse = 1.0 / (theta**exponents)
    kind = str(scaling.get("rope_type", "default")) if scaling else "default"
    if kind == "default" or scaling is None:
        return inverse
    if kind not in SCALINGS:
        raise BadInput("rope", "rope_type", expected=f"one of {', '.join(SCALINGS)}", found=kind)
    factor = _number(scaling, "factor")
    if kind == "linear":
        return inverse / factor
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    wavelength = 2 * pi / inverse
    # Long waves are stretched by the factor, short ones kept, those between blended.
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, scaled)


def _number(scaling: Mapping[str, object], key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadInput("rope", key, expected="a number", found=repr(value))
    return float(value)


class Rope:
    """Rotate queries or keys by the positions of one batch; made once a forward and given to every block.

    A head may be wider than the angles; the numbers after them get no position.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __call__(self, x_BHSE: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        if x_BHSE.shape[-1] > width:
            turned, still = x_BHSE.tensor_split((width,), dim=-1)
            # Tokens before heads in memory, as products leave them: attention's output is then no copy.
            return torch.cat((self(turned).transpose(1, 2), still.transpose(1, 2)), dim=-1).transpose(1, 2)
        first, second = x_BHSE.chunk(2, dim=-1)
        return x_BHSE * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class RotaryEmbedding(nn.Module):
    """Make a ``Rope`` from positions. It has no parameters and no buffers, so checkpoints do not contain it.

    If ``head_dim`` is smaller than that of the heads, only the first ``head_dim`` numbers of a head are
    rotated (partial rotary: GPT-J, GLM). Source: Su et al. 2021.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        # No buffer: never on the meta device, never saved.
        self._inverse = inverse_frequencies(head_dim, theta, self.scaling)

    @without_autocast
    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return the rope of ``positions``, (S,) or (B, S); angles are at least fp32, the rope has the
        given dtype.
        """
        inner = torch.promote_types(dtype, torch.float32)
        if self._inverse.device != positions.device:
            self._inverse = self._inverse.to(positions.device)
        angles = positions.to(inner).unsqueeze(-1) * self._inverse.to(inner)
        angles = torch.cat((angles, angles), dim=-1)
        if angles.ndim == 3:
            angles = angles.unsqueeze(1)  # (B, 1, S, E) meets (B, H, S, E)
        return Rope(angles.cos().to(dtype), angles.sin().to(dtype))

    def cost(self, tokens: Tokens) -> Cost:
        """Count the cosines and sines, which all blocks and rows share."""
        return Cost(kept=2 * tokens.length * self.head_dim * tokens.compute)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta}, scaling={self.scaling}"
