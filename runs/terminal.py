"""Print text on a terminal as it is, and the lines of a run."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..system import visible

if TYPE_CHECKING:  # commands that print no run do without torch
    from .metrics import StepMetrics


class _PlainConsole(Console):
    """Show control characters as visible text, wherever in a line or a table they stand."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text) if self.is_terminal else text, **options)

    def on_broken_pipe(self) -> None:
        """Raise the ``BrokenPipeError`` at hand: rich would leave without an error that a rank could note."""
        raise


def plain_console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """Make the console that prints all lines; ``a[/b]/:run:`` is printed as it is, not as markup or emoji.

    ``soft_wrap``: lines are left as long as they are.
    """
    return _PlainConsole(
        stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
    )


class Terminal:
    """Print a line after the first step, at multiples of ``interval``, after each step that was skipped, and
    after the last step of this run (``stop``; the default is ``steps``).

    It has loss, gradient norm, learning rate, tokens a second, MFU, memory, why the step was skipped, a slow
    rank, time left. MFU counts half of attention, as a causal mask leaves it; in brackets all of it.
    """

    def __init__(self, *, steps: int, interval: int, stop: int | None = None, quiet: bool = False) -> None:
        self.steps, self.interval, self._stop = steps, interval, min(stop or steps, steps)
        self._console = plain_console(quiet=quiet, soft_wrap=True)
        self._began, self._first = time.monotonic(), -1

    def say(self, text: str) -> None:
        self._console.print(text)

    def step(self, metrics: "StepMetrics") -> None:
        if self._first < 0:
            self._first, self._began = metrics.step, time.monotonic()
        done = metrics.step - self._first
        last = metrics.step + 1 == self._stop
        if (metrics.step + 1) % self.interval and not last and done and not metrics.skipped:
            return
        seconds = (time.monotonic() - self._began) * (self.steps - 1 - metrics.step)
        time_left = timedelta(seconds=int(seconds / done)) if done else "-:--:--"
        parts = [
            f"step {metrics.step + 1:>{len(str(self.steps))}}/{self.steps}",
            f"loss {metrics.loss:.4f}",
            f"grad norm {metrics.grad_norm:.3f}",
            f"lr {metrics.lr:.2e}",
            f"{metrics.tokens_per_second:,.0f} tokens/s",
        ]
        if metrics.mfu_causal is not None and metrics.mfu_full is not None:
            parts.append(f"MFU {metrics.mfu_causal:.1%} (full {metrics.mfu_full:.1%})")
        if metrics.memory is not None:
            parts.append(f"{metrics.memory / 2**30:.2f} GiB")
        if metrics.skipped:
            parts.append(f"skipped: {metrics.skipped}, {metrics.skips} so far")
        if metrics.slow_rank is not None:
            parts.append(f"slow: rank {metrics.slow_rank} on {metrics.slow_host}, {metrics.slow_times:.1f} x")
        self._console.print("  ".join([*parts, f"{time_left} left"]))

    def evaluation(self, metrics: "StepMetrics") -> None:
        """Print a line after a step that an evaluation followed."""
        perplexity = metrics.evaluation_perplexity
        beside = "" if perplexity is None else f"  perplexity {perplexity:,.2f}"
        self._console.print(
            f"step {metrics.step + 1:>{len(str(self.steps))}}/{self.steps}  "
            f"evaluation loss {metrics.evaluation_loss:.4f}{beside}"
        )
