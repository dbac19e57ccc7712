"""Put the fastest layouts of a search in order: of those that are tied, the simplest first."""

from collections.abc import Iterable

from .choice import Choice
from .evaluate import Answer

#: Layouts whose seconds differ by less are not told apart: predictions differ from measured steps by more.
TIED = 0.05


def simplest_first(answers: Iterable[Answer]) -> list[Answer]:
    """Return the layouts by their seconds, but those that are tied with the fastest one, then those that are
    tied with the fastest one of the rest, and so on, by what they need.
    """
    ordered = list[Answer]()
    left = sorted(answers, key=lambda answer: answer.time.seconds)
    while left:
        tied = [answer for answer in left if ties(answer, left[0])]
        ordered += sorted(tied, key=lambda answer: (*_needs(answer.choice), answer.time.seconds))
        left = left[len(tied) :]
    return ordered


def ties(answer: Answer, fastest: Answer) -> bool:
    """Tell whether a layout's seconds are too close to those of a faster one to tell them apart."""
    return answer.time.seconds <= (1 + TIED) * fastest.time.seconds


def _needs(choice: Choice) -> tuple[int, ...]:
    """Return what makes a layout less simple, what matters most first: axes beside data, context ranks,
    computing again, several stages on a rank, and replicas.
    """
    layout = choice.layout
    axes = layout.tensor, layout.context, layout.pipeline, layout.expert
    return (
        sum(size > 1 for size in axes),
        layout.context > 1,
        choice.checkpointing != "none",
        layout.virtual_stages > 1,
        layout.zero > 0 and layout.data_replicate > 1,
    )
