"""Simulate a device: one rank's whole training step on an accelerator that is not there.

Offers ``simulated_rank``, a rank of any layout on such a device, ``SimulatedDevice``, which counts what a
piece of code asks of it, and ``WAITS``, the one list of places at which the host waits for the device.
"""

from .device import Mixed, SimulatedDevice, Wait, Waits
from .rank import simulated_rank
from .waits import WAITS

__all__ = ["WAITS", "Mixed", "SimulatedDevice", "Wait", "Waits", "simulated_rank"]
