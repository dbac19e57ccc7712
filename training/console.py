"""A terminal on which text is printed as it is."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """Where all lines are printed: a path such as ``a[/b]/:run:`` is a path, neither markup nor an emoji.

    ``soft_wrap``: lines are left as long as they are.
    """
    return Console(
        stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False
    )
