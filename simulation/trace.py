"""Hold what a trace notes of a piece of a stage; more rows of a micro-batch follow from a few."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..layers import Checkpointing
from .ledger import Collective
from .recorder import Operator, Step


@dataclass(frozen=True)
class Trace:
    """Hold what a piece does for one micro-batch on one rank. Bytes do not count the piece's weights.

    ``kept``: alive from its forward to its backward, what it is given included (``kept_input``), what it
    gives excluded. The next four are the most bytes beside ``kept``: ``forward``: in its forward,
    what it gives included; ``backward``: in its backward, with the gradient of what it gives, without
    gradients of weights; ``with_gradient``: the same with the gradient of a weight until it is added to that
    of earlier micro-batches; ``with_gradients``: with those of all weights that are made by then.
    ``gradients``: the bytes of these at the end; ``weights``: those of all weights.

    Of experts, frozen or not, that FSDP gathers and sums apart from their block: ``apart``: the bytes of
    their weights; ``experts``: of their gradients; ``at_experts``: those beside ``kept`` without these, with
    those of other weights, when the last one is there. The next four are the most with those of all weights:
    ``copied_experts`` while they run again, or else as their backward begins, ``to_experts`` until then,
    ``in_experts`` from then until the last one is there, and without theirs ``after_experts`` since then.

    Of a backward in two parts: ``first_part``: the most beside ``kept`` in the first one; ``waiting``: the
    gradients that it leaves to the second one, for which weights were waiting; ``between``: these without
    what of ``kept`` only the first part needed, which goes at the end of the whole stage's. If other pieces
    follow, ``second_with_gradient`` and ``second_with_gradients``: the most of the second part beside what
    the first one left, with gradients of weights as above; and what the second part has ``freed`` at its end.
    """

    kept: int = 0
    forward: int = 0
    weights: int = 0
    kept_input: int = 0
    backward: int = 0
    with_gradient: int = 0
    with_gradients: int = 0
    gradients: int = 0
    apart: int = 0
    experts: int = 0
    at_experts: int = 0
    copied_experts: int = 0
    to_experts: int = 0
    in_experts: int = 0
    after_experts: int = 0
    first_part: int = 0
    waiting: int = 0
    between: int = 0
    second_with_gradient: int = 0
    second_with_gradients: int = 0
    freed: int = 0
    #: Whether the number of its operators depends on the sizes of tensors.
    sliced: bool = False
    #: What ran before each instant of the forward, then of the backward: what is counted, or its name.
    steps: Sequence[Step] = field(default=(), repr=False)
    #: The bytes of which some of these are the most, after each operator, by their names.
    instants: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """Return the operators that start a kernel, in order."""
        return tuple(step for step in self.steps if isinstance(step, Operator))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives in order."""
        return tuple(step for step in self.steps if isinstance(step, Collective))

    @property
    def forward_flops(self) -> tuple[int, int, int]:
        """Return the FLOPs of the forward: of products with weights, of those with weights that are trained,
        and of all other products: a recurrence's, a convolution's, attention's.
        """
        forward = [operator for operator in self.operators if operator.phase == "forward"]
        matrices = sum(operator.flops for operator in forward if operator.weight)
        trained = sum(operator.flops for operator in forward if operator.trained)
        return matrices, trained, sum(operator.flops for operator in forward) - matrices


#: Whether a backward has two parts; and, if more pieces follow, both are noted.
InTwo = bool | Literal["followed"]


class Piece:
    """Hold what one piece of a stage does for a micro-batch, in each mode; ``what``: what it sends, in words;
    ``silent``: it only keeps something, the same in every mode, and sends nothing.

    See ``Trace`` for the bytes.
    """

    def __init__(
        self, take: Callable[[Checkpointing, InTwo], Trace], *, what: str = "", silent: bool = False
    ) -> None:
        self._take, self.what, self._silent = take, what, silent
        self._known: dict[tuple[Checkpointing, InTwo], Trace] = {}

    def under(self, mode: Checkpointing, *, in_two: InTwo = False) -> Trace:
        """Return the trace in a mode of activation checkpointing; ``in_two``: of a backward in two parts."""
        if self._silent:
            mode, in_two = "none", False
        key = "full" if mode == "every" else mode, in_two
        if key not in self._known:
            self._known[key] = self._take(*key)
        return self._known[key]

    @cached_property
    def plain(self) -> Trace:
        """Return the trace without activation checkpointing."""
        return self.under("none")

    @property
    def in_two(self) -> Trace:
        """Return the trace with a backward in two parts."""
        return self.under("none", in_two=True)

    @property
    def second_part(self) -> Trace:
        """Return the trace with the second part of a backward in two, where other pieces follow."""
        return self.under("none", in_two="followed")

    def sends(self, mode: Checkpointing = "none", *, again: bool = False) -> tuple[Collective, ...]:
        """Return the collectives of forward and backward, or those that a backward computes ``again``."""
        if self._silent:
            return ()
        return tuple(sent for sent in self.under(mode).collectives if (sent.phase == "again") == again)


def of_more_rows(few: Trace, longer: Trace, times: int) -> Trace | None:
    """Return the trace of a micro-batch with so many ``times`` as many rows more than ``few`` has as
    ``longer`` has; ``None`` if these two differ in their operators.

    Each row runs the same operators, so that bytes and FLOPs are affine in the number of rows.
    """
    if [*map(_name_of, few.steps)] != [*map(_name_of, longer.steps)]:
        return None

    def larger(size: int, of_longer: int) -> int:
        return size + times * (of_longer - size)

    def step(of_few: Step, of_longer: Step) -> Step:
        if of_few == of_longer or isinstance(of_few, str):
            return of_few
        sizes: dict[str, Any] = {
            name: larger(size, getattr(of_longer, name))
            for name in ("flops", "moved", "fused", "bytes")
            if (size := getattr(of_few, name, None)) is not None
        }
        return replace(of_few, **sizes)

    instants = {name: [*map(larger, sizes, longer.instants[name])] for name, sizes in few.instants.items()}
    whole: dict[str, Any] = {
        name: larger(size, vars(longer)[name]) for name, size in vars(few).items() if type(size) is int
    }
    whole |= {name: max(values) for name, values in instants.items() if values}
    steps = tuple(map(step, few.steps, longer.steps))
    return Trace(**whole, sliced=longer.sliced, steps=steps, instants=instants)


def _name_of(step: Step) -> str:
    return step if isinstance(step, str) else step.name if isinstance(step, Operator) else step.kind
