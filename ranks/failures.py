"""Define the errors of the harness: which ranks failed, in which order, and what each of them printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

from ..system.errors import PeerFailed


@dataclass(frozen=True)
class RankFailure:
    """Describe one rank that did not return.

    ``kind`` is ``raised``, ``died`` or ``silent`` (it had not answered when the call was given up).
    ``seconds``: when, on the machine's monotonic clock. ``cause``: the exception itself, if it could be
    pickled.
    """

    rank: int
    kind: str
    seconds: float
    summary: str
    detail: str = ""
    output: str = ""
    cause: BaseException | None = None

    def __str__(self) -> str:
        parts = [f"--- rank {self.rank} {self.summary}"]
        parts += [self.detail.rstrip()] if self.detail.strip() else []
        parts += ["it printed:", self.output.rstrip()] if self.output.strip() else []
        return "\n".join(parts)


class RankError(RuntimeError):
    """Report that a rank raised, died or did not answer.

    The message names the first failure first and carries the traceback and output of every failed rank. A
    death comes before an exception, because the collectives of other ranks often break before the parent
    learns of the death, and an exception before the ``PeerFailed`` of ranks that were told of it.
    ``failures`` holds them in that order; ``rank`` is the number of the first one, ``cause`` its exception or
    ``None``.
    """

    def __init__(self, failures: Sequence[RankFailure], headline: str = "") -> None:
        order = {"died": 0, "raised": 1, "silent": 2}

        def place(failure: RankFailure) -> tuple[int, bool, float]:
            return order[failure.kind], isinstance(failure.cause, PeerFailed), failure.seconds

        self.failures = sorted(failures, key=place)
        first = self.failures[0]
        self.rank = first.rank
        self.cause = first.cause
        title = headline or f"rank {first.rank} {first.summary}"
        super().__init__("\n".join([title, *(str(failure) for failure in self.failures)]))


def describe_exit(code: int) -> str:
    """Return ``died with exit code 3``, or ``was killed by SIGKILL`` for a negative code."""
    if code >= 0:
        return f"died with exit code {code}"
    try:
        return f"was killed by {Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
