"""Compare a folder's model in transformers, here in one process, and here in a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ...checkpoints import check_whole, read_source
from ...parallel_state import BadInput, Layout, check_local_ranks
from ...pipeline import check_schedule
from ...ranks.failures import RankError
from .case import Difference, Observation, Question, compared, first_beyond
from .ours import observe_ours
from .transformers import observe_hf

#: Largest difference, relative to the largest number of a tensor, that rounding explains. In 16 bits much is
#: rounding: only gross errors show there.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}

#: Tokens of a batch: three forwards and backwards of more would take hours.
MOST_TOKENS = 2**18

#: transformers computes some things in fp32 whatever the model's dtype (rotary angles).
_OF_FP32 = 1e-5


@dataclass(frozen=True)
class Comparison:
    """Hold the differences of every output, the loss and every gradient, and the ``tolerance`` for each."""

    what: str
    tolerance: float
    found: list[Difference]

    @property
    def first(self) -> Difference | None:
        """Return the first difference beyond the tolerance, in the order of computation."""
        return first_beyond(self.found, self.tolerance)

    def worst(self, kind: str) -> Difference:
        """Return the largest difference of the outputs, the loss or the gradients."""
        return max((one for one in self.found if one.kind == kind), key=lambda one: one.relative)


def check(question: Question) -> None:
    """Refuse, before anything starts, a layout that cannot hold the model or a batch that cannot be cut."""
    check_local_ranks(question.layout.world)
    source, layout = read_source(question.folder), question.layout
    check_whole(source)
    source.family.declarations(source.model_config, layout, split=question.split)
    if question.length > source.model_config.max_position_embeddings:
        most = source.model_config.max_position_embeddings
        raise BadInput("parity", "--length", expected=f"at most {most}", found=question.length)
    if question.samples * question.length > MOST_TOKENS:
        expected = f"at most {MOST_TOKENS // question.length:,} rows of {question.length:,} tokens"
        raise BadInput("parity", "--samples", expected=expected, found=f"{question.samples:,}")
    each, rest = divmod(question.samples, layout.data)
    if rest or each < layout.pipeline:
        expected = f"a multiple of data={layout.data}, at least {layout.data * layout.pipeline}"
        raise BadInput("parity", "--samples", expected=expected, found=question.samples)
    check_schedule(question.schedule, layout, each, "parity")
    layout.check_length(question.length, "parity", "--length")


def parity(
    question: Question,
    *,
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    timeout: float = 600,
) -> list[Comparison]:
    """Compare one process with transformers, then the layout with one process (unless it is one).

    ``tolerance`` replaces ``TOLERANCES``. ``say`` is told what runs; ``timeout``, in seconds, applies to each
    run. Raises ``BadInput`` for a layout or batch that does not fit.
    """
    check(question)
    # Not every process need be in this one's directory: those of the pool may be older than a change of it.
    question = replace(question, folder=str(read_source(question.folder).path.absolute()))
    single = replace(question, layout=Layout(), split=None)
    try:
        say("transformers")
        theirs = observe_hf(single, timeout=timeout)
        say("one process")
        ours = observe_ours(single, timeout=timeout)
        return [*_comparisons(question, tolerance, theirs, ours, say, timeout)]
    except RankError as error:
        if isinstance(error.cause, BadInput):  # the folder's fault, not a rank's
            raise error.cause from None
        raise


def _comparisons(
    question: Question,
    tolerance: float | None,
    theirs: Observation,
    ours: Observation,
    say: Callable[[str], None],
    timeout: float,
) -> Iterator[Comparison]:
    allowed = TOLERANCES[question.dtype] if tolerance is None else tolerance
    against = max(allowed, _OF_FP32) if tolerance is None else tolerance
    yield Comparison("one process / transformers", against, [*compared(theirs, ours)])
    if question.layout != Layout():
        say(str(question.layout))
        cut = observe_ours(question, timeout=timeout)
        yield Comparison(f"{question.layout} / one process", allowed, [*compared(ours, cut)])
