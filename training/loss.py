"""Define what a loss is: named terms, each a sum over the samples divided by a count over the whole step.

A ``Step`` asks its loss, in this order: ``prepare`` and ``count``, on the host, before the forward; then
``collect`` and ``whole_step``, if it compares all rows of the step; then itself, for each micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..parallel_state import BadInput, ParallelState
from .samples import Samples

#: A scalar tensor for each term, by its name.
Scales = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Term:
    """Describe a term of a loss: ``weight`` times its sum over the step, divided by its count over the step.

    ``in_total``: whether the loss that is reported contains it. Its gradients count either way; a metric is a
    term without gradients that the total does not contain.
    """

    weight: float = 1.0
    in_total: bool = True


@dataclass(frozen=True, slots=True)
class Sums:
    """Hold a micro-batch's sums by term, each times its scale; of a loss that counts then, its count."""

    terms: Mapping[str, Tensor]
    count: Tensor | float = 0


class Fault(NamedTuple):
    """Describe in a refusal what a loss does wrong, as only its first calls show."""

    expected: str
    found: str
    todo: str = ""


_ONE_TERM: Mapping[str, Term] = MappingProxyType({"loss": Term()})


class Loss(ABC):
    """Define a loss. A subclass has its ``terms``, and defines ``__call__`` and nearly always ``count``.

    Sums and counts are equal on the ranks of a tensor group. Each context rank sums and counts what it holds:
    its own tokens; and of a row that they hold together, each of them the row (``layers.sum_over_context``).
    """

    #: The samples that context ranks cut, each with its dim. Others are given whole.
    sequence: Mapping[str, int] = MappingProxyType({})
    #: Rows that stand together, such as the two of a pair: a micro-batch holds whole groups.
    group = 1
    #: What ``find_faults`` looks for.
    faults: ClassVar[tuple[Fault, ...]] = ()
    #: For a loss that compares all rows of the step: a function of a micro-batch's output and samples, which
    #: returns a row for each sample. It is called in a forward without gradients that runs first.
    collect: Callable[[Any, Samples], Tensor] | None = None
    #: Beside ``collect``, on the last stage: a function of the rows that it returned, of all samples of the
    #: step in their order; of which of them are this data rank's; and of this rank's samples. It returns
    #: samples, a row for each of this rank's, that the calls then find beside the others.
    whole_step: Callable[[Tensor, slice, Samples], Samples] | None = None
    #: A function that tells before the forward what each term's sum is divided by, of this rank's samples,
    #: which context ranks have cut. Without it there is one term, whose count comes with its sum; gradients
    #: are divided at the end, so routers, whose losses are not, may have no losses.
    count: Callable[[Samples], Mapping[str, Tensor | float]] | None = None
    #: A function that tells the same from the number of labels that count. With it, a batch may be one whose
    #: rows are read later (``data.batch.BatchParts``).
    count_labels: Callable[[float], Mapping[str, Tensor | float]] | None = None

    @property
    def terms(self) -> Mapping[str, Term]:
        """Return the terms by name; a subclass may have a mapping in place of this."""
        return _ONE_TERM

    def for_state(self, state: ParallelState) -> Loss:
        """Return the loss for a rank; a function that names ``state`` is given it."""
        return self

    def prepare(self, batch: Any) -> Samples:
        """Check a data rank's whole rows on the host, and return them with what else the step needs.

        Raises ``BadInput``; the step then refuses on every rank alike.
        """
        if not isinstance(batch, Mapping):
            raise BadInput("batch", expected="tensors by name", found=type(batch).__name__)
        return batch

    @abstractmethod
    def __call__(self, output: Any, samples: Samples, scales: Scales) -> Sums:
        """Return the sums of a micro-batch, each times its scale. ``output``: what the last stage gives."""

    def find_faults(self, output: Any, samples: Samples) -> Sequence[bool] | None:
        """Tell for each of ``faults`` whether this loss has it; ``None`` if these samples do not show it."""
        return ()

    def for_evaluation(self) -> Loss:
        """Return the loss without what only training adds."""
        return self
