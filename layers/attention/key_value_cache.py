"""Keep each block's keys and values, or its recurrent state, of the tokens generated so far.

B batch  S tokens of this forward  T tokens so far  K key/value heads here  E head dim
"""

from torch import Tensor, nn

from ...parallel_state import require
from .visible import restarts


class KeyValueCache:
    """Hold the keys and values of the tokens so far, for each block on this rank.

    A block has two tensors (B, K, ``length``, E), with the head dim of its keys or values. They are allocated
    once, when the block first runs. K is the number of key/value heads that this rank computes, shared ones
    included. ``length``: the most tokens that a row can have. A recurrent layer has one tensor, whose size
    does not depend on the number of tokens.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length, self.used, self.start = batch, length, 0, 0
        #: Whether rows hold several documents.
        self.packed = False
        self._held: dict[nn.Module, tuple[Tensor, ...]] = {}

    def advance(self, positions_BS: Tensor) -> None:
        """Make room for the next S tokens of each row; call it once a forward, before any ``extend``.

        Only the first call checks whether rows hold several documents. Later tokens continue the last
        document, so the host does not wait for the device at each of them.
        """
        start, new = self.used, positions_BS.shape[1]
        expected = f"at most {self.length} tokens in a row, the cache's length"
        require(start + new <= self.length, "KeyValueCache.advance", None, expected, start + new)
        self.start, self.used = start, start + new
        if start == 0:
            self.packed = restarts(positions_BS, wait=True)

    @property
    def bytes(self) -> int:
        """Return the bytes that blocks have stored here: keys, values and states."""
        return sum(x.nbytes for tensors in self._held.values() for x in tensors)

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return all so far, (B, K, T, E), as views of the memory."""
        if block not in self._held:
            require(len(k_BKSE) == self.batch, "KeyValueCache", "rows", self.batch, len(k_BKSE))
            self._held[block] = tuple(
                x.new_empty(self.batch, x.shape[1], self.length, x.shape[3]) for x in (k_BKSE, v_BKSE)
            )
        keys, values = self.held(block)
        start = self.used - k_BKSE.shape[2]
        keys[:, :, start : self.used], values[:, :, start : self.used] = k_BKSE, v_BKSE
        return keys[:, :, : self.used], values[:, :, : self.used]

    def recall(self, layer: nn.Module) -> Tensor | None:
        """Return what a recurrent layer stored of the tokens before these, or ``None`` at the first ones."""
        return self._held.get(layer, (None,))[0]

    def remember(self, layer: nn.Module, x: Tensor) -> None:
        """Store what a recurrent layer needs of the tokens so far, in the memory of what it stored before."""
        if layer in self._held:
            self._held[layer][0].copy_(x)
        else:
            self._held[layer] = (x.clone(),)

    def held(self, block: nn.Module) -> tuple[Tensor, ...]:
        """Return all that is allocated for this block."""
        return self._held[block]
