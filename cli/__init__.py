"""Floor 6: the command line."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """What ``trilith`` in a shell runs."""
    from .app import run

    sys.exit(run(sys.argv[1:]))
