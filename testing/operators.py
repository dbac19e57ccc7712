"""Count the operators that run in a piece of code, and what the collectives among them send."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parallel_state.engine import tensors_in
from ..parallel_state.engine.autograd_and_compiler import UncompiledMode
from ..parallel_state.engine.collectives import group_of_call
from ..simulation.operators import facts_of


class Operators(UncompiledMode):
    """Record, while it is entered, every operator that runs on this rank.

    ``names`` are the operators in order, as ``aten::mm``. ``collectives`` counts those that send by their
    kind, ``sent`` the bytes that they were given; a wait, a barrier and a ``recv`` send nothing.
    ``in_groups`` has both for each process group, by its name, and kind. ``largest`` is the number of
    elements of the largest tensor that an operator made on this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.collectives: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.in_groups: dict[tuple[str, str], tuple[int, int]] = {}
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = facts_of(func)
        self.names.append(facts.name)
        if (kind := facts.sends) is not None:
            size = sum(tensor.nbytes for tensor in tensors_in(args[facts.sent]))
            self.collectives[kind] += 1
            self.sent[kind] += size
            group = group_of_call((*args, *(kwargs or {}).values())).group_name, kind
            count, before = self.in_groups.get(group, (0, 0))
            self.in_groups[group] = count + 1, before + size
        result = func(*args, **(kwargs or {}))
        for output in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if not isinstance(output, DTensor):
                self.largest = max(self.largest, output.numel())
        return result


def collectives_of(function: Callable[[], object]) -> Counter[str]:
    """Call ``function``; the number of collectives that it starts on this rank, by kind."""
    operators = Operators()
    with operators:
        function()
    return operators.collectives
