"""Time what one device computes for one micro-batch: products, attention, and operators bound by memory.

Products and attention take their FLOPs at the rate that the device reaches. Every other operator reads and
writes memory: a block's bytes are counted as passes over the bytes that it keeps for its backward, which its
layers state. ``PASSES`` says how many passes. Operators are started by the host one after the other; a GPU's
work waits for that only where it is shorter, and a CPU does both in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from ...layers import Checkpointing, GatedDeltaNet, Mamba2, MoE
from ..piece import Piece
from ..stage_costs import Pieces
from .machines import Machine

#: How the operators of blocks run: one at a time on a CPU or a GPU, or fused by a compiler on a GPU.
Mode = Literal["cpu", "eager", "compiled"]

#: Passes over the kept bytes in forward and in backward. "cpu" is counted in the dense families of the zoo,
#: operator by operator (medians 2.6 and 6.7; experts 3.7 and 8.8); the others by hand for a block of Llama,
#: whose norms, rotations, sums and activations read and write so much on a GPU, fused by hand or by Inductor.
PASSES: dict[Mode, tuple[float, float]] = {"cpu": (2.6, 6.7), "eager": (1.8, 2.9), "compiled": (1.2, 1.6)}
#: How many times as many passes blocks of some kinds take, counted in the same way: those with experts, whose
#: rows are gathered, sorted and brought back, and those with a recurrence, whose states are made again.
HEAVIER = {"experts": (1.4, 1.3), "recurrent": (2.9, 3.6)}
#: Operators that a module without children starts in forward, counted as above; in backward there are twice
#: as many. A compiled block starts about one kernel for each of its modules.
OPERATORS: dict[Mode, float] = {"cpu": 2.8, "eager": 2.8, "compiled": 1.0}
#: Reads and writes of the logits by the loss, forward and backward, beside the output layer's products.
LOSS_PASSES = (2.0, 2.0)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Hold the seconds of a forward, and of a backward's two parts: gradients of inputs, and of weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


class Kernels:
    """Time the modules of one rank's share of a model on a machine.

    ``tensor``: the ranks that share a product. ``dtype`` names the peak of products.
    """

    def __init__(self, machine: Machine, mode: Mode, dtype: str, tensor: int) -> None:
        self.machine, self.mode, self.tensor = machine, mode, tensor
        reached = machine.efficiency
        self._products = machine.peak(dtype) * reached.products
        # Attention and all that is not a product in float8 is computed in 16 bits.
        self._attention = machine.peak("bfloat16" if dtype == "float8" else dtype) * reached.attention
        self._memory = machine.bandwidth * reached.memory

    def moved(self, size: float) -> float:
        """Return the seconds in which this many bytes are read or written."""
        return size / self._memory

    def compute(
        self,
        piece: Piece | Pieces,
        modules: int,
        heavier: tuple[float, float] = (1.0, 1.0),
        *,
        attention: float = 0.0,
    ) -> Seconds:
        """Time a forward and a backward of a piece; causal attention computes half of the scores.

        ``heavier``: factors of the passes over memory. ``attention``: its FLOPs over all tensor ranks. Its
        backward has five products where forward has two (Dao 2023).
        """
        product, attention = self.products(piece.matrices), self.scores(attention)
        passes = (one * more for one, more in zip(PASSES[self.mode], heavier, strict=True))
        there, back = (self.moved(one * piece.kept) for one in passes)
        launched = modules * OPERATORS[self.mode] * self.machine.efficiency.launch
        weights = self.products(piece.trained)
        return Seconds(
            forward=self._with(product + attention + there, launched),
            inputs=self._with(product + 2.5 * attention + back, launched),
            weights=self._with(weights, launched),
        )

    def again(
        self,
        piece: Piece,
        modules: int,
        mode: Checkpointing,
        heavier: tuple[float, float] = (1.0, 1.0),
        *,
        attention: float = 0.0,
    ) -> float:
        """Time what a block computes again in its backward: under selective checkpointing neither products
        nor scores.
        """
        launched = modules * OPERATORS[self.mode] * self.machine.efficiency.launch
        if mode == "selective":
            launched /= 2
            passes = PASSES[self.mode][0] * heavier[0]
            moved = max(piece.kept - piece.under(mode).kept, 0)
            found = self._with(self.moved(passes * moved), launched)
        else:
            found = self.compute(piece, modules, heavier, attention=attention).forward
        # A CPU's host has more to do than to start operators; a GPU has other work meanwhile.
        host = 0.0 if self.machine.asynchronous else modules * self.machine.efficiency.again.get(mode, 0.0)
        return found + max(0.0, host - launched)

    def products(self, flops: float) -> float:
        """Time products with weights; ``flops``: over all tensor ranks."""
        return flops / self.tensor / self._products

    def scores(self, attention: float) -> float:
        """Time attention in a forward; ``attention``: its FLOPs over all tensor ranks, without a mask."""
        return attention / 2 / self.tensor / self._attention

    def loss(self, logits: float, modules: int = 2) -> Seconds:
        """Time a loss over this many bytes of logits."""
        there, back = (self.moved(passes * logits) for passes in LOSS_PASSES)
        launched = modules * OPERATORS[self.mode] * self.machine.efficiency.launch
        return Seconds(forward=self._with(there, launched), inputs=self._with(back, launched))

    def _with(self, work: float, launched: float) -> float:
        return max(work, launched) if self.machine.asynchronous else work + launched


def heavier(block: nn.Module) -> tuple[float, float]:
    """Return the factors of a block's passes over memory, forward and backward."""
    for kind, of in (("recurrent", (GatedDeltaNet, Mamba2)), ("experts", (MoE,))):
        if any(isinstance(one, of) for one in block.modules()):
            return HEAVIER[kind]
    return 1.0, 1.0


def leaves(module: nn.Module) -> int:
    """Count the modules without children."""
    return sum(1 for one in module.modules() if not any(one.children()))


def exchanged(block: nn.Module, size: float) -> float:
    """Return the bytes that a rank gives to one exchange of tokens between experts, if they are used evenly.

    ``size``: the bytes of the micro-batch's hidden states, whole over the tensor ranks. A block exchanges
    them twice in forward and twice in backward: to the experts and back.
    """
    return sum(size * one.router.top_k for one in block.modules() if isinstance(one, MoE))
