"""Time what one device computes for one micro-batch: products, attention, and operators bound by memory.

Each operator of a trace takes the larger of two times: its FLOPs at the rate that its kind reaches, and the
bytes that it reads and writes at the memory's rate. Where blocks are compiled, a chain of pointwise operators
is one kernel. Operators are started by the host one after the other; a GPU's work waits for that only where
it is shorter, and a CPU does both in turn.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...layers import Checkpointing
from ...simulation.recorder import Operator
from ...simulation.trace import Trace
from .machines import Machine

#: How the operators of blocks run: one at a time on a CPU or a GPU, or fused by a compiler on a GPU.
Mode = Literal["cpu", "eager", "compiled"]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Hold the seconds of a forward, and of a backward's two parts: gradients of inputs, and of weights.

    ``again``: those in which a backward computes the forward again. ``attention``: of forward and backward
    those in kernels of attention.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    attention: tuple[float, float] = (0.0, 0.0)


class Kernels:
    """Time the traced pieces of one rank's share of a model on a machine.

    ``dtype`` names the peak of products. In float8 it is that of float8's own products; all others, and
    attention, are computed in 16 bits.
    """

    def __init__(self, machine: Machine, mode: Mode, dtype: str) -> None:
        self.machine, self.mode = machine, mode
        reached, wide = machine.efficiency, "bfloat16" if dtype == "float8" else dtype
        self._products = machine.peak(wide) * reached.products
        self._float8 = machine.peak(dtype) * reached.products
        self._attention = machine.peak(wide) * reached.attention
        self._memory = machine.bandwidth * reached.memory

    def moved(self, size: float) -> float:
        """Return the seconds in which this many bytes are read or written."""
        return size / self._memory

    def compute(self, trace: Trace, mode: Checkpointing = "none", *, compiled: bool = False) -> Seconds:
        """Time the forward and the backward of a trace.

        ``compiled``: whether a compiler fuses its operators, if it does those of blocks. ``mode``: the
        activation checkpointing that it is a trace of.
        """
        fused = compiled and self.mode == "compiled"
        parts: dict[str, list[Operator]] = {"forward": [], "again": [], "inputs": [], "weights": []}
        for operator in trace.operators:
            if not fused or operator.fused is not None:
                backward = "weights" if operator.gradient else "inputs"
                parts[backward if operator.phase == "backward" else operator.phase].append(operator)
        launch, host = self.machine.efficiency.launch, self.machine.efficiency.again.get(mode)
        seconds = {name: self._all(operators, launch, fused=fused) for name, operators in parts.items()}
        if host is not None and not self.machine.asynchronous:
            # A CPU's host has more to do than to start operators; a GPU has other work meanwhile.
            again, launched = self._work(parts["again"]), len(parts["again"]) * launch
            seconds["again"] = again + max(launched, len(parts["forward"]) * host)
        forward, back = (
            self._work(operator for operator in parts[name] if _attends(operator))
            for name in ("forward", "inputs")
        )
        return Seconds(**seconds, attention=(forward, back))

    def _all(self, operators: list[Operator], launch: float, *, fused: bool) -> float:
        work, launched = self._work(operators, fused=fused), len(operators) * launch
        return max(work, launched) if self.machine.asynchronous else work + launched

    def _work(self, operators: Iterable[Operator], *, fused: bool = False) -> float:
        seconds = 0.0
        for operator in operators:
            moved = operator.fused if fused else operator.moved
            seconds += max(self._multiplying(operator), (moved or 0) / self._memory)
        return seconds

    def _multiplying(self, operator: Operator) -> float:
        if _attends(operator):
            return operator.flops / (2 if operator.causal else 1) / self._attention
        return operator.flops / (self._float8 if "scaled" in operator.name else self._products)


def _attends(operator: Operator) -> bool:
    return bool(operator.flops) and "attention" in operator.name
