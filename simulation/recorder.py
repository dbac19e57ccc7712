"""Note what operators without numbers make, keep, send and compute."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..layers.rounds import watched_rounds
from ..parallel_state.engine import tensors_in
from ..parallel_state.process_groups import STAND_IN
from .ledger import Collective
from .live_bytes import Call, LiveBytes, Part, Storage
from .operators import facts_of, remembered
from .waits import refuse_numbers

#: When something runs: in the forward, when a backward computes the forward again, or in the backward.
Phase = Literal["forward", "again", "backward"]


@dataclass(slots=True)
class Operator:
    """State an operator that starts a kernel: its FLOPs (a multiplication and an addition are two) and the
    bytes that it reads and writes.

    ``weight``: whether it is a product with a matrix of weights; ``trained``: whether these are trained;
    ``gradient``: whether a backward gets the gradient of a matrix of weights from it. ``causal``: whether it
    is attention that leaves out the half of the scores that a causal mask hides; the FLOPs count both halves.
    ``fused``: the bytes of the kernel that a compiler starts with it: what a chain of pointwise operators is
    given from outside, and what is there after it; ``None`` if it is part of the kernel before.
    """

    name: str
    phase: Phase
    flops: int
    moved: int
    weight: bool = False
    trained: bool = False
    gradient: bool = False
    causal: bool = False
    fused: int | None = 0


#: What a trace notes that something ran.
Step = Operator | Collective | str

#: The forwards that run now of modules that a backward may compute again.
_FORWARDS: list[object] = []


def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that tells recorders when it runs: in a backward, to compute something again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _FORWARDS.append(forward)
        try:
            return forward(*args, **kwargs)
        finally:
            _FORWARDS.pop()

    return run


class _Parts:
    """Add up the bytes of tensors that lie in some storages; those at one place of a storage count once."""

    def __init__(self) -> None:
        self._of: dict[object, tuple[int, dict[int, int]]] = {}

    def add(self, part: Part) -> None:
        places = self._of.setdefault(part.key, (part.untyped.nbytes(), {}))[1]
        places[part.place] = max(part.size, places.get(part.place, 0))

    def holds(self, part: Part) -> bool:
        return part.key in self._of and part.place in self._of[part.key][1]

    def total(self, *, alive: bool = False) -> int:
        """Return the bytes, or those in storages that are not gone."""
        return sum(
            min(whole, sum(places.values()))
            for key, (whole, places) in self._of.items()
            if not (alive and isinstance(key, Storage) and key.gone is not None)
        )


class _Chain:
    """Hold what a chain of pointwise operators is given from outside and what it writes; ``first``: the first
    of them, ``at``: its number among all; ``left_out``: the bytes of rounds that do not run.
    """

    def __init__(self, first: Operator, at: int) -> None:
        self.first, self.at, self.given, self.made = first, at, _Parts(), _Parts()
        self.left_out = 0

    def moved(self) -> int:
        """Return the bytes that the kernel of the chain moves, if it ends here."""
        return self.given.total() + self.made.total(alive=True) + self.left_out

    def add(self, read: Iterable[Part], made: Iterable[Part]) -> None:
        for part in read:
            inside = part.storage is not None and part.storage.made >= self.at
            if not (inside or self.made.holds(part)):
                self.given.add(part)
        for part in made:
            self.made.add(part)


class Recorder(LiveBytes):
    """Note each storage that operators make and when it goes, and what the operators do.

    ``weights``: whether weights are trained, by their storages. ``steps``: each operator that
    starts a kernel, each collective, and the names of what is neither, in order, first of all nothing;
    ``after``: the bytes after each of them that were made while it was entered. ``sliced``: whether there was
    a loop of ``rounds`` that are not of ranks. A number that the host reads is 0.
    """

    def __init__(self, weights: Mapping[torch.UntypedStorage, bool] | None = None) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.steps: list[Step] = [""]
        self.after = [0]
        self.sliced = False
        self._watched = watched_rounds(self._few)
        #: Whether a weight is trained, by its storage and those of casts of it.
        self._trained = dict[object, bool]((weights or {}).items())
        self._chain: _Chain | None = None

    @property
    def collectives(self) -> list[Collective]:
        return [step for step in self.steps if isinstance(step, Collective)]

    def __enter__(self) -> Any:
        self._watched.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._watched.__exit__(*raised)

    def _few(self, rounds: Sequence[Any], of_ranks: bool) -> Iterator[Any]:
        """Yield the first, the second and the last of the rounds; the second stands for those between. Of
        those of ranks it is the third, which no collective parts from the next one, so this runs, too.

        What the first one leaves in variables is there from the second one on.
        """
        self.sliced, last, repeated = self.sliced or not of_ranks, len(rounds) - 1, 1 + of_ranks
        for number in sorted({*range(min(repeated, last) + 1), max(last - of_ranks, 0), last}):
            if not of_ranks:
                self.end_chain()  # no kernel is of several rounds
            start, chain = len(self.steps), self._chain
            moved = 0 if chain is None else chain.moved()
            yield rounds[number]
            if number == repeated:
                steps, after, repeats = self.steps[start:], self.after[start:], max(last - 2 * repeated, 0)
                self.at += len(steps) * repeats
                self.steps += steps * repeats
                self.after += after * repeats
                if chain is not None and chain is self._chain:  # it goes on through all rounds
                    chain.left_out += repeats * (chain.moved() - moved)
        if not of_ranks:
            self.end_chain()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (without := _WITHOUT_NUMBERS.get(func)) is not None:
            return without(args[0])
        if (facts := facts_of(func)).gives != "view":
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = self._call(func, args, kwargs or {})
        self.at += 1
        self._ran(facts.name)  # half of all operators, which make nothing
        return out

    def _counted(self, value: object) -> list[Tensor]:
        return tensors_in(value)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return remembered(func, args, kwargs)

    def _note(self, call: Call) -> None:
        facts, args, read, made, phase = facts_of(call.func), call.args, call.read, call.made, self.phase
        if _FORWARDS and phase == "backward":
            phase = "again"
        step: Step = facts.name
        if facts.sends is not None and call.func.namespace == "_c10d_functional":
            self.end_chain()
            group = next(word for word in reversed(args) if isinstance(word, str))
            step = Collective(group.removeprefix(STAND_IN), facts.sends, args[0].nbytes, phase)
        elif facts.starts:
            step = Operator(
                facts.name, phase, facts.flops(args, call.kwargs, call.out), moved := facts.moved(read, made),
                causal=facts.is_causal(args, call.kwargs), fused=moved,
            )  # fmt: skip
            if facts.product:
                trained = [self._trained.get(part.key) for part in read]
                step.weight, step.trained = True, False not in trained
                step.gradient = phase == "backward" and trained.count(None) == len(trained)
            elif facts.casts and (cast := self._trained.get(read[0].key)) is not None:
                self._trained[made[0].key] = cast
            if not facts.fuses or (self._chain is not None and self._chain.first.phase != phase):
                self.end_chain()
            if facts.fuses:
                if self._chain is None:
                    self._chain = _Chain(step, self.at)
                else:
                    step.fused = None
                self._chain.add(facts.read(read, made), made)
        self._ran(step)

    def _ran(self, step: Step) -> None:
        self.steps.append(step)
        self.after.append(self.now)

    def end_chain(self) -> None:
        """Note what the last chain of pointwise operators moves, if a compiler makes one kernel of it."""
        if (chain := self._chain) is not None:
            chain.first.fused, self._chain = chain.moved(), None

    def alive_since(self, start: int) -> int:
        """Return the bytes alive that the operators from ``start`` on made."""
        return sum(storage.size for _, storage in self._alive.values() if storage.made >= start)

    def bytes(self, start: int, leaving_out: Iterable[Storage] = ()) -> list[int]:
        """Return the bytes after each operator from ``start`` on, but for storages that are alive."""
        sizes = self.after[start:]
        for storage in leaving_out:
            for place in range(max(storage.made - start, 0), len(sizes)):
                sizes[place] -= storage.size
        return sizes


def _number(tensor: Tensor) -> float:
    refuse_numbers("aten::_local_scalar_dense")
    return 0.0 if tensor.is_floating_point() else 0


def _places(tensor: Tensor) -> Tensor:
    """Give the places where documents start: each row is one."""
    refuse_numbers("aten::nonzero")
    shape = tensor.shape
    return tensor.new_empty((shape[0] if len(shape) > 1 else 1, len(shape)), dtype=torch.int64)


#: What needs numbers, and what waits for a collective: torch's form without numbers makes another tensor.
_WITHOUT_NUMBERS: dict[Any, Callable[[Tensor], Any]] = {
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten.nonzero.default: _places,
    torch.ops._c10d_functional.wait_tensor.default: lambda tensor: tensor,
}
