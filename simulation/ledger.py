"""Keep a ledger of a step: every storage's bytes from its making to its end, collectives, operators. What it
ends as, the record of a simulated step, is plain data.

Bytes are counted as ``LiveBytes`` counts them, but each change is noted, so that it is known afterwards who
held the bytes at the worst instant: the kind of each storage, the module in whose forward or backward it was
made, and the phase of the step.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..parallel_state.engine import tensors_in
from ..parallel_state.engine.autograd_and_compiler import backward_number, forward_number, in_backward
from ..parallel_state.engine.collectives import group_of_call
from .live_bytes import Call, LiveBytes, Storage, device_of, stored
from .operators import facts_of


@dataclass(frozen=True, slots=True)
class Holder:
    """State the bytes at the peak of storages of one ``kind``, made by one operator in one module."""

    kind: str
    module: str
    phase: str
    operator: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Collective:
    """State a collective: the axis of the layout, its kind, and the bytes that it was given."""

    axis: str
    kind: str
    bytes: int
    phase: str
    module: str = ""


@dataclass(slots=True)
class OperatorSums:
    """Add up the calls of an operator in a phase: FLOPs of products, bytes read and written."""

    name: str
    phase: str
    count: int = 0
    flops: int = 0
    moved: int = 0


@dataclass(frozen=True)
class StepRecord:
    """Hold what one rank's step needs and does, to the byte, of the program that is not compiled.

    ``peak``: the most bytes on the device after any operator. ``holders``: these by kind, module and
    operator. ``host``: the bytes that offload keeps on the host. ``timeline``: for pieces of the step in
    order, (phase, most bytes).
    """

    rank: int
    kernels: str
    peak: int
    host: int
    holders: list[Holder]
    timeline: list[tuple[str, int]]
    collectives: list[Collective] = field(repr=False)
    operators: list[OperatorSums] = field(repr=False)

    @property
    def kinds(self) -> dict[str, int]:
        """Return the bytes at the peak by kind, the largest first."""
        sums = Counter[str]()
        for holder in self.holders:
            sums[holder.kind] += holder.bytes
        return dict(sums.most_common())

    @property
    def flops(self) -> int:
        return sum(operator.flops for operator in self.operators)


#: What runs: a module's forward, the same again in a backward, a backward, and what follows all of them.
PHASES = ("forward", "recomputation", "backward", "update")
#: What a storage is that is not marked, by the phase in which it was made.
_KINDS = {
    "forward": "activations",
    "recomputation": "recomputed activations",
    "backward": "gradients of activations",
    "update": "update",
}
#: What FSDP makes while it gathers and sums.
_OF_FSDP = {"all_gather": "gathered weights", "reduce_scatter": "sums of gradients"}


class Ledger(LiveBytes):
    """Count what operators leave on ``devices``, types such as "cpu", while this context is entered.

    ``heads``: the modules, by name, that make logits. ``clear`` begins a step: its peak, collectives,
    operators.
    """

    def __init__(self, *devices: str, heads: Iterable[str] = ("head",)) -> None:
        super().__init__()
        self.devices, self.heads = frozenset(devices), frozenset(heads)
        self._names: dict[nn.Module, str] = {}
        self._inside: dict[int, list[str]] = {}
        self._numbers, self._paths = array("q"), list[str]()
        self.updating, self._of_fsdp, self._hooks = False, "", list[Any]()
        self.clear()

    def clear(self) -> None:
        """Begin a step: count collectives and operators from zero, and the peak from what is alive."""
        #: Each change of a storage's bytes in the step, and how many of them came before the peak.
        self._changes = [(storage, storage.size) for _, storage in self._alive.values()]
        self.peak, self._before_peak = self.now, len(self._changes)
        self.collectives: list[Collective] = []
        self.operators: dict[tuple[str, str], OperatorSums] = {}
        #: The bytes after each operator, and its phase, as an index of ``PHASES``.
        self.bytes_after, self.phases = array("q"), array("b")

    def name(self, model: nn.Module) -> None:
        """Note the names of a model's modules, and mark its parameters and buffers as weights."""
        self._names = {module: name or "model" for name, module in model.named_modules()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.mark("weights", [tensor], name)

    def __enter__(self) -> Ledger:
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _counted(self, value: object) -> list[Tensor]:
        return [stored(tensor) for tensor in tensors_in(value) if device_of(tensor).type in self.devices]

    def _note(self, call: Call) -> None:
        func, args = call.func, call.args
        facts, (phase, module) = facts_of(func), self.place()
        for storage in call.new:
            storage.kind, storage.operator = self._kind(phase, module), facts.name
            storage.phase, storage.module = phase, module
        if facts.sends is not None:
            size = sum(tensor.nbytes for tensor in tensors_in(args[facts.sent]))
            group = group_of_call((*args, *call.kwargs.values())).group_name
            self.collectives.append(Collective(group, facts.sends, size, phase, module))
        if "c10d" in func.namespace and facts.name.endswith(("::send", "::recv_")):
            self.mark("messages between stages", args[0])
        if not func.is_view and (call.read or call.made):
            sums = self.operators.setdefault((facts.name, phase), OperatorSums(facts.name, phase))
            sums.count += 1
            sums.flops += facts.flops(args, call.kwargs, call.out)
            sums.moved += facts.moved(call.read, call.made)
            self.bytes_after.append(self.now)
            self.phases.append(PHASES.index(phase))

    # Where an operator runs --------------------------------------------------------------------------------

    def place(self) -> tuple[str, str]:
        """Return the phase that runs in this thread, and the name of the module that it is about."""
        if self.updating:
            return "update", ""
        back, inside = in_backward(), self._inside.get(get_ident())
        if inside:
            return "recomputation" if back else "forward", inside[-1]
        if not back:
            return "forward", ""
        number = backward_number()
        before = 0 if number is None else bisect.bisect_right(self._numbers, number)
        return "backward", self._paths[before - 1] if before > 0 else ""

    def _before(self, module: nn.Module, inputs: object) -> None:
        if (name := self._names.get(module)) is not None:
            self._inside.setdefault(get_ident(), []).append(name)
            self._enter(name)

    def _after(self, module: nn.Module, inputs: object, output: object) -> None:
        if module in self._names:
            inside = self._inside[get_ident()]
            inside.pop()
            self._enter(inside[-1] if inside else "")

    def _enter(self, name: str) -> None:
        """Note that what autograd numbers from now on belongs to a module; a repetition has no backward."""
        if not in_backward():
            self._numbers.append(forward_number())
            self._paths.append(name)

    def _kind(self, phase: str, module: str) -> str:
        if self._of_fsdp:
            return self._of_fsdp
        of_loss = not module or module in self.heads
        return "logits and loss" if of_loss and phase in ("forward", "backward") else _KINDS[phase]

    @contextmanager
    def around_fsdp(self, kind: str, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Note that what is made meanwhile is FSDP's; see ``engine.watched``."""
        parameters, before = [*parameters], self._of_fsdp
        self._mark_gradients(parameters)
        self._of_fsdp = _OF_FSDP[kind]
        yield
        self._of_fsdp = before
        self._mark_gradients(parameters)

    # Bytes -------------------------------------------------------------------------------------------------

    def mark(self, kind: str, tensors: Iterable[Tensor | None], module: str = "") -> None:
        """Say what storages are, whenever they were made."""
        for tensor in self._counted([*tensors]):
            if (storage := self.storage(tensor)) is not None:
                storage.kind, storage.module = kind, module or storage.module

    def _mark_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.mark("gradients", [parameter.grad for parameter in parameters])

    def holders(self) -> list[Holder]:
        """Return who holds the bytes at the peak: storages of one kind, module, phase and operator together,
        the largest first.
        """
        sums: dict[tuple[str, str, str, str], list[int]] = {}
        for storage, size in dict(self._changes[: self._before_peak]).items():
            if size:
                key = storage.kind, storage.module, storage.phase, storage.operator
                entry = sums.setdefault(key, [0, 0])
                entry[0] += size
                entry[1] += 1
        holders = [Holder(*key, bytes=size, count=count) for key, (size, count) in sums.items()]
        return sorted(holders, key=lambda holder: -holder.bytes)

    def _change(self, storage: Storage, size: int) -> None:
        peak = self.peak
        super()._change(storage, size)
        self._changes.append((storage, size))
        if self.peak > peak:
            self._before_peak = len(self._changes)
