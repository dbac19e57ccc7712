"""Compute rotary position embedding, in Hugging Face's half-split convention or with neighbours as pairs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .autocast import without_autocast
from .rope_frequencies import attention_factor, dynamic_frequencies, inverse_frequencies


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
        self.head_dim, self.theta, self.scaling, self.interleaved = head_dim, theta, scaling, interleaved
        self.kind = scaling.get("rope_type") if scaling else None
        # No buffers: never on the meta device, never saved.
        self._inverse = inverse_frequencies(head_dim, theta, scaling)
        self._long = inverse_frequencies(head_dim, theta, scaling, long=True)
        self._factor = attention_factor(scaling)

    @property
    def by_length(self) -> int | None:
        """Return the number of tokens above which a document's angles depend on its length, or ``None``."""
        if self.scaling is None or self.kind not in ("longrope", "dynamic"):
            return None
        length = self.scaling["original_max_position_embeddings"]
        assert isinstance(length, int)
        return length

    @without_autocast
    def forward(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> Rope:
        """Return the rope of ``positions``, (S,) or (B, S); angles are at least fp32, the rope has the
        given dtype.

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
        if self.by_length is None or self.scaling is None:
            return inverse
        if lengths is None:
            lengths = (positions.amax(-1, keepdim=True) + 1).expand_as(positions)
        if self.kind == "dynamic":
            return dynamic_frequencies(lengths.float(), self.head_dim, self.theta, self.scaling)
        return torch.where((lengths > self.by_length).unsqueeze(-1), long, inverse)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta}, scaling={self.scaling}"
