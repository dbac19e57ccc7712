"""Keep a ledger of a step: every storage's bytes from its making to its end, collectives, operators.

Bytes are counted as ``LiveBytes`` counts them, but each change is noted, so that it is known afterwards who
held the bytes at the worst instant: the kind of each storage, the module in whose forward or backward it was
made, and the phase of the step.
"""

from __future__ import annotations

import bisect
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..parallel_state.engine import (
    UncompiledMode,
    backward_number,
    forward_number,
    group_of_call,
    in_backward,
    is_dtensor,
    local_data,
)
from .collectives import collective_of
from .flops import flops_of_call
from .record import Collective, Holder, OperatorSums
from .tensors import DEVICE, device_of, tensors_in

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


class _Storage:
    """Follow one storage: what it is, who made it, and its bytes after each change, by the number of it."""

    __slots__ = ("changes", "kind", "module", "operator", "phase", "size")

    def __init__(self, kind: str, module: str, phase: str, operator: str) -> None:
        self.kind, self.module, self.phase, self.operator = kind, module, phase, operator
        self.size, self.changes = 0, list[tuple[int, int]]()

    def at(self, change: int) -> int:
        """Return the bytes after a change."""
        before = bisect.bisect_right(self.changes, change, key=lambda at: at[0])
        return self.changes[before - 1][1] if before else 0


class Ledger(UncompiledMode):
    """Count what operators leave on ``devices``, types such as "cpu", while this context is entered.

    ``heads``: the modules, by name, that make logits. ``now`` and ``peak``: bytes, the most after any
    operator. ``clear`` begins a step: its peak, collectives, operators.
    """

    def __init__(self, *devices: str, heads: Iterable[str] = ("head",)) -> None:
        super().__init__()
        self.devices, self.heads = frozenset(devices), frozenset(heads)
        self.now, self._last_change = 0, 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Storage]] = {}
        self._names: dict[nn.Module, str] = {}
        self._inside: dict[int, list[str]] = {}
        self._numbers, self._paths = array("q"), list[str]()
        self.updating, self._of_fsdp, self._hooks = False, "", list[Any]()
        self.clear()

    def clear(self) -> None:
        """Begin a step: count collectives and operators from zero, and the peak from what is alive."""
        self.peak, self.peak_change = self.now, self._last_change
        self.storages = [storage for _, storage in self._alive.values()]
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
        resize, ledger = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (known := ledger._alive.get(id(storage))) is not None:
                ledger._change(known[1], storage.nbytes())
            return result

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._resizing.stop()
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        read = [*self._storages((args, kwargs))]
        out = func(*args, **kwargs)
        name, kind, place = collective_of(func)
        phase, module = self.place()
        known = {id(storage) for storage in read}
        made = [storage for storage in self._storages(out) if id(storage) not in known]
        if made:
            what = self._kind(phase, module)
            for storage in made:
                self._follow(storage, _Storage(what, module, phase, name))
        for storage in read:
            if (entry := self._alive.get(id(storage))) is not None and entry[1].size != storage.nbytes():
                self._change(entry[1], storage.nbytes())
        if kind is not None:
            size = sum(tensor.nbytes for tensor in tensors_in(args[place]))
            group = group_of_call((*args, *kwargs.values())).group_name
            self.collectives.append(Collective(group, kind, size, phase, module))
        if "c10d" in func.namespace and name.endswith(("::send", "::recv_")):
            self.mark("messages between stages", args[0])
        if not func.is_view and (read or made):
            sums = self.operators.setdefault((name, phase), OperatorSums(name, phase))
            sums.add(flops_of_call(name, func, args, kwargs, out), _moved((args, kwargs, out)))
            self.bytes_after.append(self.now)
            self.phases.append(PHASES.index(phase))
        return out

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
        if number is None:
            return "backward", ""
        before = bisect.bisect_right(self._numbers, number)
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
        self.mark("gradients", [parameter.grad for parameter in parameters if parameter.grad is not None])
        self._of_fsdp = _OF_FSDP[kind]
        yield
        self._of_fsdp = before
        self.mark("gradients", [parameter.grad for parameter in parameters if parameter.grad is not None])

    # Bytes -------------------------------------------------------------------------------------------------

    def mark(self, kind: str, tensors: Iterable[Tensor], module: str = "") -> None:
        """Say what storages are, whenever they were made."""
        for storage in self._storages([*tensors]):
            if (known := self._alive.get(id(storage))) is not None:
                known[1].kind = kind
                known[1].module = module or known[1].module

    def holders(self) -> list[Holder]:
        """Return who holds the bytes at the peak: storages of one kind, module, phase and operator together,
        the largest first.
        """
        sums: dict[tuple[str, str, str, str], list[int]] = {}
        for storage in self.storages:
            if size := storage.at(self.peak_change):
                entry = sums.setdefault(
                    (storage.kind, storage.module, storage.phase, storage.operator), [0, 0]
                )
                entry[0] += size
                entry[1] += 1
        holders = [Holder(*key, bytes=size, count=count) for key, (size, count) in sums.items()]
        return sorted(holders, key=lambda holder: -holder.bytes)

    def _follow(self, storage: torch.UntypedStorage, entry: _Storage) -> None:
        key = id(storage)
        self._alive[key] = weakref.ref(storage, partial(self._forget, key)), entry
        self.storages.append(entry)
        self._change(entry, storage.nbytes())

    def _change(self, entry: _Storage, size: int) -> None:
        self._last_change += 1
        self.now += size - entry.size
        entry.size = size
        entry.changes.append((self._last_change, size))
        if self.now > self.peak:
            self.peak, self.peak_change = self.now, self._last_change

    def _forget(self, key: int, gone: object) -> None:
        if (known := self._alive.pop(key, None)) is not None:
            self._change(known[1], 0)

    def _storages(self, value: object) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors_in(value):
            if device_of(tensor).type in self.devices:
                yield (local_data(tensor) if is_dtensor(tensor) else tensor).untyped_storage()


def _moved(values: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(values))


def kinds_of(holders: Iterable[Holder]) -> Mapping[str, int]:
    """Return the bytes of each kind, the largest first."""
    sums: dict[str, int] = {}
    for holder in holders:
        sums[holder.kind] = sums.get(holder.kind, 0) + holder.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
