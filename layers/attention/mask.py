"""Which tokens a token sees in one forward: those before it, in its own document; if need be, in a cache.

B batch  S tokens of this forward  T tokens so far  K key/value heads here  E head dim
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...parallel_state import ParallelState
from .context_mask import ContextScope


class KeyValueCache:
    """What generation keeps of the tokens so far: of each block on this rank their keys and values.

    A block's are two tensors (B, K, ``length``, E), allocated once, when the block first runs; K are the
    key/value heads that this rank computes, shared ones included. ``length``: the most tokens a row can have.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length, self.used = batch, length, 0
        self._documents: Tensor | None = None
        self._packed = False
        self._held: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def admit(self, positions_BS: Tensor, window: int | None = None) -> Tensor | None:
        """Make room for the next S tokens of each row; their mask (B, 1, S, T), or ``None`` if they need
        none.

        Only the first call looks whether rows hold several documents: later tokens go on with the last one,
        and the device is not waited for at each of them.
        """
        start, new = self.used, positions_BS.shape[1]
        assert start + new <= self.length, f"a cache of {self.length} cannot hold {start} tokens and {new}"
        self.used = start + new
        documents_BS = documents(positions_BS)
        if self._documents is None:
            self._packed = _restart(positions_BS)
            self._documents = documents_BS.new_zeros(self.batch, self.length)
        else:
            documents_BS = documents_BS + self._documents[:, start - 1 : start]
        self._documents[:, start : self.used] = documents_BS
        if not self._packed and (start == 0 or new == 1) and not _bites(window, self.used):
            return None
        return _same_document_before(documents_BS, self._documents[:, : self.used], window)

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new tokens' keys and values; all so far, (B, K, T, E), sharing the cache's memory."""
        if block not in self._held:
            shape = (self.batch, k_BKSE.shape[1], self.length, k_BKSE.shape[3])
            self._held[block] = (k_BKSE.new_empty(shape), v_BKSE.new_empty(shape))
        keys, values = self.held(block)
        start = self.used - k_BKSE.shape[2]
        keys[:, :, start : self.used], values[:, :, start : self.used] = k_BKSE, v_BKSE
        return keys[:, :, : self.used], values[:, :, : self.used]

    def held(self, block: nn.Module) -> tuple[Tensor, Tensor]:
        """All that is allocated for this block's keys and values."""
        return self._held[block]


class AttentionScope:
    """Made once a forward, from the positions, and given to every block.

    ``positions``: (B, S) or (S,), int64, of the whole sequence. They restart at 0 where a document starts,
    and a token sees its own document alone, up to itself. Rows that hold one document each (and ``None``)
    need no mask: attention is then plainly causal. With a ``cache`` positions (B, S) are those of the tokens
    that follow what it holds. With a ``window`` a token sees so many tokens, itself included, and positions
    must be given (Beltagy et al. 2020).

    Where the ``state`` has several context ranks, tokens and positions are this rank's chunks of the sequence
    (``cut_sequence``), keys and values are fetched from the others, and there is no cache.
    """

    def __init__(
        self,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        window: int | None = None,
        state: ParallelState | None = None,
    ) -> None:
        assert window is None or positions is not None, "a window needs positions"
        #: (B, 1, S, T), true where a query (second to last) sees a key; ``None``: all that is before it.
        self.mask: Tensor | None = None
        #: Whether keys and queries are the same tokens, in need of nothing but their order.
        self.causal = True
        #: What is seen of the sequence over several context ranks; ``None``: all of it is here.
        self.context: ContextScope | None = None
        self._cache = cache
        if state is not None and state.context_size > 1:
            assert cache is None, "a cache holds whole sequences, not a context rank's chunks"
            self.context = ContextScope(positions, window=window, state=state)
        elif cache is not None:
            assert positions is not None, "what follows a cache needs positions"
            first = cache.used == 0
            self.mask = cache.admit(positions, window)
            self.causal = first and self.mask is None
        elif positions is not None and (_bites(window, positions.shape[-1]) or _restart(positions)):
            documents_BS = documents(positions.reshape(-1, positions.shape[-1]))
            self.mask, self.causal = _same_document_before(documents_BS, documents_BS, window), False

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that this forward's queries meet in ``block``: the cache's and these."""
        return (k_BKSE, v_BKSE) if self._cache is None else self._cache.extend(block, k_BKSE, v_BKSE)

    def asked(self, x_BSD: Tensor) -> Tensor:
        """Of the last block's output what logits are wanted of: all tokens, or with a cache the last one."""
        return x_BSD if self._cache is None else x_BSD[:, -1:]


def documents(positions_BS: Tensor) -> Tensor:
    """The number of the document that each token belongs to, counted within its row: (B, S) int64."""
    return (positions_BS == 0).cumsum(1)


def _same_document_before(queries_BS: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """(B, 1, S, T): the queries are the last S of the T tokens."""
    same_BST, first = queries_BS.unsqueeze(2) == keys_BT.unsqueeze(1), keys_BT.shape[1] - queries_BS.shape[1]
    seen_BST = same_BST.tril(first)
    if window is not None:
        seen_BST = seen_BST.triu(first - window + 1)
    return seen_BST.unsqueeze(1)


def _bites(window: int | None, tokens: int) -> bool:
    return window is not None and tokens > window


def _restart(positions: Tensor) -> bool:
    """Whether a row holds more than one document; on an accelerator this waits for it, once a forward.

    Where the numbers cannot be looked at (a traced or meta tensor) it is taken for granted.
    """
    if torch.compiler.is_compiling() or positions.is_meta:
        return True
    return bool((positions[..., 1:] == 0).any())
