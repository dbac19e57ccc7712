"""Hold what the data ranks exchange for a group of parameters, and which part of it nothing hides."""

from typing import NamedTuple

from .collectives import Links


class Exchange(NamedTuple):
    """Hold the seconds in which the data ranks gather a group's weights, and sum its gradients: into pieces
    (``scatter``), and each piece over the replicas.

    ``unpacking``: those in which FSDP copies gathered weights to their places; ``packing``: gradients into
    the buffer that is summed. The device computes nothing meanwhile.
    """

    gather: float
    scatter: float
    replicas: float
    unpacking: float = 0.0
    packing: float = 0.0

    def around(
        self,
        forward: float,
        backward: float,
        links: Links,
        *,
        zero: int,
        apart: bool,
        replicas: float,
        gathers: int = 1,
    ) -> tuple[float, float, float]:
        """Return the seconds of what FSDP exchanges at every micro-batch, as far as they are longer than what
        runs beside: in forward, and in the two parts of a backward.

        ``apart``: whether a backward has two parts; ``replicas``: the share of the sums that the replicas sum
        too; ``gathers``: those in a backward with ZeRO 3.
        """
        gather, unpacking = (self.gather, self.unpacking) if zero == 3 else (0.0, 0.0)
        summed = self.scatter + self.replicas * replicas
        back = links.exposed(gather * gathers + (0.0 if apart else summed), backward)
        back += unpacking * gathers + (0.0 if apart else self.packing)
        there = links.exposed(gather, forward) + unpacking
        return there, back, summed + self.packing if apart else 0.0
