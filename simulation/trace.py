"""Hold what a trace notes of a piece of a model; bytes of larger micro-batches follow from small ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .record import Collective
from .recorder import Operator


@dataclass(frozen=True)
class Trace:
    """Hold what a piece does for one micro-batch on one rank. Bytes do not count the piece's weights.

    ``kept``: alive from its forward to its backward, what it is given included (``kept_input``), what it
    gives (``made``) excluded. The next four are the most bytes beside ``kept``: ``forward``: in its forward,
    what it gives included; ``backward``: in its backward, with the gradient of what it gives, without
    gradients of weights; ``with_gradient``: the same with the gradient of a weight until it is added to that
    of earlier micro-batches; ``with_gradients``: with those of all weights that are made by then.
    ``gradients``: the bytes of these at the end; ``weights``: those of all weights.

    Of a backward in two parts: ``first_part``: the most beside ``kept`` in the first one; ``waiting``: the
    gradients that it leaves to the second one, for which weights were waiting; ``between``: these without
    what of ``kept`` only the first part needed, which goes at the end of the whole stage's.
    """

    kept: int
    made: int
    forward: int
    weights: int
    kept_input: int = 0
    backward: int = 0
    with_gradient: int = 0
    with_gradients: int = 0
    gradients: int = 0
    first_part: int = 0
    waiting: int = 0
    between: int = 0
    collectives: tuple[Collective, ...] = ()
    operators: tuple[Operator, ...] = ()
    #: The bytes of which some of these are the most, after each operator, by their names.
    instants: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False, repr=False)


def of_more_rows(two: Trace, three: Trace, rows: int) -> Trace | None:
    """Return the trace of so many rows from those of two and three; ``None`` if these run other operators.

    The bytes after each operator are affine in the rows, and so are those of its collectives.
    """
    lengths = [
        [len(values) for values in (*each.instants.values(), each.collectives, each.operators)]
        for each in (two, three)
    ]
    if lengths[0] != lengths[1]:
        return None

    def more(here: int, there: int) -> int:
        return here + (rows - 2) * (there - here)

    instants = {name: [*map(more, sizes, three.instants[name])] for name, sizes in two.instants.items()}
    sizes: dict[str, Any] = {
        name: more(size, vars(three)[name]) for name, size in vars(two).items() if isinstance(size, int)
    }
    sizes |= {name: max(values) for name, values in instants.items() if values}
    collectives = tuple(
        replace(here, bytes=more(here.bytes, there.bytes))
        for here, there in zip(two.collectives, three.collectives, strict=True)
    )

    def longer(here: Operator, there: Operator) -> Operator:
        if here == there:
            return here
        fused = None if here.fused is None or there.fused is None else more(here.fused, there.fused)
        flops, moved = more(here.flops, there.flops), more(here.moved, there.moved)
        return replace(here, flops=flops, moved=moved, fused=fused)

    operators = tuple(map(longer, two.operators, three.operators))
    return Trace(**sizes, collectives=collectives, operators=operators, instants=instants)


def of_more_tokens(two: Trace, three: Trace, times: float) -> Trace:
    """Return the trace of ``times`` as many tokens as a part has, from those of two and three parts.

    Bytes are affine in the tokens. A part that is computed by itself adds operators and collectives;
    otherwise the same ones are given more bytes.
    """
    sizes: dict[str, Any] = {
        name: int(size + (times - 2) * (getattr(three, name) - size))
        for name, size in vars(two).items()
        if isinstance(size, int)
    }
    rest = times / 2 % 1

    def part(operator: Operator) -> Operator:
        fused = None if operator.fused is None else int(operator.fused * rest)
        flops, moved = int(operator.flops * rest), int(operator.moved * rest)
        return replace(operator, flops=flops, moved=moved, fused=fused)

    operators = two.operators * int(times / 2) + (tuple(map(part, two.operators)) if rest else ())
    return Trace(**sizes, collectives=_of_parts(two, three, times), operators=operators)


def _of_parts(two: Trace, three: Trace, times: float) -> tuple[Collective, ...]:
    grown = Counter(two.collectives) - Counter(three.collectives)
    of_all = [replace(collective, bytes=int(collective.bytes * times / 2)) for collective in grown.elements()]
    at_once = Counter(replace(collective, bytes=collective.bytes * 3 // 2) for collective in grown.elements())
    of_part = [*(Counter(three.collectives) - Counter(two.collectives) - at_once).elements()]
    rest = times % 1
    last = [replace(collective, bytes=int(collective.bytes * rest)) for collective in of_part if rest]
    before = Counter(two.collectives) - grown
    return *before.elements(), *of_part * (int(times) - 2), *last, *of_all
