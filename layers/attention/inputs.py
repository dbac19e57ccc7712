"""Make the rotations and masks of one forward pass, once, for all of its attention layers."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...parallel_state import ParallelState
from ..context_chunks import default_positions, token_places
from ..host_numbers import on_host, send
from ..rope import Rope, RotaryEmbedding
from .key_value_cache import KeyValueCache
from .mask import AttentionScope
from .visible import document_lengths, exceeds

if TYPE_CHECKING:
    from .attention import AttentionLayer


class AttentionInputs:
    """Hold the rotations and the masks of one forward pass; made before the blocks and given to each of them.

    ``positions``: (B, S), of the whole sequence, best on the host, which reads them, or as ``Batch.to`` sends
    them; ``None``: each row is one document, 0 to S - 1. With a ``cache`` positions are required, and the
    cache's tokens come before them. ``like``: the hidden states that enter the first block, (B, S, D), or
    (B, S / tensor, D) with sequence parallelism; rotations get their dtype and device. ``layers``: attention
    layers, one of each kind that the blocks have; what their backends take is made here, so that no block
    makes it again. ``rotary``: modules that make a ``Rope`` from positions, by the layers' names for them.
    """

    def __init__(
        self,
        positions: Tensor | None,
        cache: KeyValueCache | None = None,
        *,
        like: Tensor,
        layers: Iterable["AttentionLayer"] = (),
        rotary: Mapping[str, RotaryEmbedding] | None = None,
        state: ParallelState,
    ) -> None:
        positions = None if positions is None else send(positions, like.device)
        self.cache = cache
        self._positions, self.state = positions, state
        if cache is not None:
            assert positions is not None, "tokens that follow a cache need positions"
            cache.advance(positions)
        places = default_positions(like, state, embedded=True) if positions is None else positions
        tokens = places.shape[-1] * state.context.size if cache is None else cache.used
        #: Each token's place in its document, (B, S); ``None``: each row is known to be one document. With a
        #: cache the places are always here. A compiled block could not look.
        self.documents = self._documents()
        self._scopes: dict[int | None, AttentionScope] = {}
        self.places, self._tokens = places, tokens
        for layer in layers:
            layer.prepare(like, places.shape[-1], self.scope(layer.window))
        lengths = None
        if any(make.by_length is not None for make in (rotary or {}).values()):
            lengths = torch.full_like(places, tokens)
            if positions is not None:
                start = 0 if cache is None else cache.start
                row_places = start + token_places(positions.shape[-1], state, positions.device)
                lengths = document_lengths(positions, row_places, tokens, state)
        self._ropes: dict[str, Rope] = {
            name: make(places, like.dtype, lengths) for name, make in (rotary or {}).items()
        }

    def rope(self, name: str) -> Rope:
        """Return the rotation of this name."""
        return self._ropes[name]

    def scope(self, window: int | None) -> AttentionScope:
        """Return the scope: which keys each query sees with this window."""
        if not exceeds(window, self._tokens):  # it hides nothing
            window = None
        if window not in self._scopes:
            positions = self._positions
            if window is not None and positions is None:  # a window needs them, and the host knows them
                positions = send(token_places(self.places.shape[-1], self.state), self.places.device)
            self._scopes[window] = AttentionScope(positions, self.cache, window=window, state=self.state)
        return self._scopes[window]

    def _documents(self) -> Tensor | None:
        positions = self._positions
        if positions is None or self.cache is not None:
            return positions
        positions = positions.reshape(-1, positions.shape[-1])
        if (host_positions := on_host(positions)) is None:
            return positions
        in_row = token_places(host_positions.shape[-1], self.state, host_positions.device)
        return None if torch.equal(host_positions, in_row.expand_as(host_positions)) else positions
