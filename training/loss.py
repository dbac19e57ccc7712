"""Define what a loss is: named terms, each a sum over the samples divided by a count over the whole step.
Make one of a user's function, which returns a sum and a count, and find out what it does wrong.

A ``Step`` asks its loss, in this order: ``prepare`` and ``count``, on the host, before the forward; then
``collect`` and ``whole_step``, if it compares all rows of the step; then itself, for each micro-batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..layers.host_numbers import change_alike
from ..parallel_state import BadInput, Layout, ParallelState, require
from ..parallel_state.engine import accelerator, map_tensors, tensors_in
from .own_code import signature_of
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


# No proxy: a loss that has them is sent to other processes.
_ONE_TERM: Mapping[str, Term] = {"loss": Term()}


class Loss(ABC):
    """Define a loss. A subclass has its ``terms``, and defines ``__call__`` and nearly always ``count``.

    Sums and counts are equal on the ranks of a tensor group. Each context rank sums and counts what it holds:
    its own tokens; and of a row that they hold together, each of them the row (``layers.sum_over_context``).

    A subclass may have as attributes or methods; its constructor is its own:

    - ``sequence``: the samples that context ranks cut, each with its dim. Others are given whole.
    - ``group``: rows that stand together, such as the two of a pair: a micro-batch holds whole groups.
    - ``count(samples)`` tells before the forward what each term's sum is divided by, of this rank's samples,
      which context ranks have cut. Without it there is one term, whose count comes with its sum; gradients
      are divided at the end, so routers, whose losses are not, may have no losses.
    - ``count_labels(number)`` tells the same from the number of labels that count. With it, a batch may be
      one whose rows are read later (``data.batch.BatchParts``).
    - ``collect(output, samples)``, for a loss that compares all rows of the step, returns a row for each
      sample of a micro-batch. It is called in a forward without gradients that runs first.
    - ``whole_step(rows, mine, samples)``, beside it, on the last stage: ``rows`` are what it returned of all
      samples of the step in their order, ``mine`` the slice of them that is this data rank's, ``samples``
      this rank's. It returns samples, a row for each of this rank's, that ``__call__`` then finds beside the
      others.
    """

    sequence: Mapping[str, int] = MappingProxyType({})
    group = 1
    #: What ``find_faults`` looks for.
    faults: ClassVar[tuple[Fault, ...]] = ()
    collect: Callable[[Any, Samples], Tensor] | None = None
    whole_step: Callable[[Tensor, slice, Samples], Samples] | None = None
    count: Callable[[Samples], Mapping[str, Tensor | float]] | None = None
    count_labels: Callable[[float], Mapping[str, Tensor | float]] | None = None

    @cached_property  # unlike a property's, its place may be set
    def terms(self) -> Mapping[str, Term]:
        """Return the terms by name; a subclass may have a mapping in place of this, or set one."""
        return _ONE_TERM

    def for_state(self, state: ParallelState) -> "Loss":
        """Return the loss for a rank; a function that names ``state`` is given it."""
        return self

    def prepare(self, batch: Any) -> Samples:
        """Check a data rank's whole rows on the host, and return them with what else the step needs.

        Raises ``BadInput``; the step then refuses on every rank alike.
        """
        require(isinstance(batch, Mapping), "batch", None, "tensors by name", type(batch).__name__)
        samples: Samples = batch
        return samples

    @abstractmethod
    def __call__(self, output: Any, samples: Samples, scales: Scales) -> Sums:
        """Return the sums of a micro-batch, each times its scale. ``output``: what the last stage gives."""

    def find_faults(self, output: Any, samples: Samples) -> Sequence[bool]:
        """Tell for each of ``faults`` whether this loss has it; nothing as long as no samples showed it."""
        return ()

    def for_evaluation(self) -> "Loss":
        """Return the loss without what only training adds."""
        return self


_TODO = "Return (losses.sum(), how_many): the step divides by the counts of all micro-batches and data ranks"


class FunctionLoss(Loss):
    """Make a loss of ``function(output, samples)``, which returns the sum of the losses and their number.

    A function that names ``state`` is given it as a keyword. ``count(samples)``: the number of the losses of
    some samples, told from the samples alone; then the function may return the sum alone, and routers may
    have losses. ``sequence``: the samples that context ranks cut, each with its dim, such as ``{"ids": 1}``.
    """

    faults = (
        Fault(
            "the sum of the losses, with their number",
            "a mean: one sample given twice has the same loss as once, and twice the count",
            _TODO + ". A mean of means is (mean, 1)",
        ),
        Fault(
            "the function to count as count= does", "two counts of one micro-batch",
            "Let the function return the sum alone",
        ),
        Fault(
            "a sum over the samples",
            "a part that is the same for any number of samples, such as a penalty of weights, which would "
            "count once for each micro-batch of each data rank",
            "Multiply that part by the count",
        ),
    )  # fmt: skip

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        count: Callable[[Samples], Tensor | float] | None = None,
        sequence: Mapping[str, int] | None = None,
    ) -> None:
        self.function, self.stated_count, self.sequence = function, count, sequence or {}
        self.count = None if count is None else partial(_as_term, count)
        self._faults: Sequence[bool] = ()

    def for_state(self, state: ParallelState) -> "FunctionLoss":
        if "state" not in signature_of(self.function).parameters:
            return self
        function = partial(self.function, state=state)
        return FunctionLoss(function, count=self.stated_count, sequence=self.sequence)

    def __call__(self, output: Any, samples: Samples, scales: Scales) -> Sums:
        total, count = self._sum_and_count(output, samples)
        return Sums({"loss": total * scales["loss"].to(total.dtype)}, count)

    def find_faults(self, output: Any, samples: Samples) -> Sequence[bool]:
        if self._faults:
            return self._faults
        counts_otherwise = False
        if self.stated_count is not None:
            with torch.no_grad(), accelerator.fork_random(next(iter(samples.values())).device):
                _, count = self._sum_and_count(output, samples)
            counts_otherwise = float(count) != float(self.stated_count(samples))
        growth = wrong_growth(self._sum_and_count, output, samples)
        if counts_otherwise or growth is not None:
            mean, constant = growth or (False, False)
            self._faults = mean, counts_otherwise, constant
        return self._faults

    def _sum_and_count(self, output: Any, samples: Samples) -> tuple[Tensor, Tensor | float]:
        returned = self.function(output, samples)
        if self.stated_count is not None and isinstance(returned, Tensor):
            returned = returned, self.stated_count(samples)
        return sum_and_count(returned)


def _as_term(count: Callable[[Samples], Tensor | float], samples: Samples) -> dict[str, Tensor | float]:
    """Return the count of the one term; no lambda, which could not be sent to other processes."""
    return {"loss": count(samples)}


def as_loss(loss: Any, state: ParallelState) -> Loss:
    """Return the loss of a rank, from a ``Loss`` or from a function; ``BadInput`` if it lacks a part."""
    require(callable(loss), "step", "loss", "a Loss, or a function", type(loss).__name__)
    own = (loss if isinstance(loss, Loss) else FunctionLoss(loss)).for_state(state)
    name = type(own).__name__
    counts, todo = own.count is not None, "A loss that counts with its sums has one term, loss"
    require(counts or [*own.terms] == ["loss"], "step", f"{name}.count", "a method", "none", todo)
    whole = own.collect is None or own.whole_step is not None
    require(whole, "step", f"{name}.whole_step", "a method, beside collect", "none")
    return own


def refuse_uncut(loss: Loss, layout: Layout) -> None:
    """Refuse context ranks for a loss that does not say what they cut."""
    require(
        layout.context == 1 or loss.sequence, "layout", "context", "1 for a loss that names no sequence",
        layout.context, 'FunctionLoss(loss, sequence={"tokens": 1, "labels": 1}) names what ranks cut, and '
        "the model's attention must look at other ranks' keys",
    )  # fmt: skip


def sum_and_count(returned: Any) -> tuple[Tensor, Tensor | float]:
    """Return the sum and the count that a loss returned; ``BadInput`` unless they are a scalar and a
    number.
    """
    numbers = returned if isinstance(returned, tuple) else (returned,)
    pair: tuple[Any, Any] = numbers if len(numbers) == 2 else (None, None)
    total, count = pair
    if not isinstance(total, Tensor) or total.ndim or not _is_number(count):
        actual = " and ".join(
            f"a tensor of shape {[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__ for x in numbers
        )
        expected = "the sum of the losses, a scalar tensor, and their number"
        raise BadInput("step", "loss", expected=expected, found=actual, todo=_TODO)
    return total, count


def wrong_growth(
    loss: Callable[..., tuple[Tensor, Tensor | float]], output: Any, samples: Samples
) -> tuple[bool, bool] | None:
    """Tell whether a loss wrongly returns a mean where it should return a sum, beside its count; and whether
    its sum has a part that no sample has.

    The first sample is given once, and then twice. A sum is then twice as large, but a mean stays the same.
    If it is neither, more copies follow: with a constant part each adds as much as the one before.
    Returns ``None`` if this test says nothing: no label of the first sample counts, the loss is zero, the
    count does not grow with the samples, or the model's output is not made of tensors with the samples on
    dim 0, in tuples, dicts or dataclasses.
    """
    tensors, size = tensors_in(output, records=True), len(next(iter(samples.values())))
    if not tensors or not all(tensor.ndim and len(tensor) == size for tensor in tensors):
        return None

    def of_first(times: int) -> tuple[float, float]:
        repeat = partial(_repeated, times=times)
        with torch.no_grad(), accelerator.fork_random(tensors[0].device):  # a loss may draw numbers
            repeated = {name: change_alike(repeat, sample) for name, sample in samples.items()}
            total, count = loss(map_tensors(output, repeat), repeated)
            return float(total), float(count)

    (once, count), (twice, twice_count) = of_first(1), of_first(2)
    if once == 0 or count == 0 or twice_count != 2 * count:
        return None
    step, near = twice - once, 1e-3 * abs(once)
    if abs(step) <= near or abs(step - once) <= near:
        return abs(step) <= near, False
    further = (of_first(times)[0] - once - (times - 1) * step for times in (3, 4, 5))  # drawn losses differ
    return False, all(abs(deviation) <= 1e-5 * abs(once) for deviation in further)


def _repeated(x: Tensor, times: int) -> Tensor:
    return torch.cat([x.detach()[:1]] * times)


def _is_number(count: Any) -> bool:
    if isinstance(count, Tensor):
        return count.ndim == 0
    return isinstance(count, int | float) and not isinstance(count, bool)
