"""Keep constant numbers on each device that uses them, because a copy at each call would wait for the
device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostNumbers:
    """Hold a few numbers that never change; copy them once to each device and dtype that asks for them."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = tuple(values)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the numbers, (N,), on ``device``. In a traced graph they are constants of the graph."""
        if torch.compiler.is_compiling():
            return torch.tensor(self._values, dtype=dtype, device=device)
        if (device, dtype) in self._copies:
            return self._copies[device, dtype]
        with torch.inference_mode(False):  # a backward may need them later
            copy = torch.tensor(self._values, dtype=dtype, device=device)
        if type(copy) is Tensor and not copy.is_meta:  # not one without numbers, of a trace
            self._copies[device, dtype] = copy
        return copy
