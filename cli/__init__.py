"""Floor 11: the command line, one short file per command.

Offers ``main``, which ``trilith`` in a shell runs.
"""

import sys
import warnings
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; ``trilith`` in a shell calls this."""
    from ..system import search_less_often
    from ..system.process_end import end
    from ..system.standard_streams import open_closed_streams

    search_less_often()
    open_closed_streams()
    from ..system import format_warning
    from .app import run

    warnings.formatwarning = format_warning
    end(run(sys.argv[1:]))
