"""Print text on a terminal as it is."""

from typing import Any

from rich.console import Console
from rich.text import Text

from ..system import visible


class _PlainConsole(Console):
    """Show control characters as visible text, wherever in a line or a table they stand."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text) if self.is_terminal else text, **options)


def plain_console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """Make the console that prints all lines; ``a[/b]/:run:`` is printed as it is, not as markup or emoji.

    ``soft_wrap``: lines are left as long as they are.
    """
    return _PlainConsole(
        stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
    )
