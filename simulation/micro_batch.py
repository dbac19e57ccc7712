"""Describe the tokens of a micro-batch on one rank, and how they are computed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Describe the tokens of a micro-batch on one rank: ``rows`` of ``length`` tokens, its piece of each row
    over the context axis, and how they are computed: ``compute``: bytes of a number; ``gpu``: by a GPU's
    kernels, or by a CPU's, where RMSNorm, dropout and attention that drops are several operators.
    """

    rows: int
    length: int
    compute: int = 4
    gpu: bool = True

    @property
    def count(self) -> int:
        return self.rows * self.length
