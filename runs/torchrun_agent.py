"""Run torchrun as long as its launcher lives: ``python -m trilith.runs.torchrun_agent PID ...``.

``PID`` is the launcher's. When the launcher dies, torchrun gets SIGTERM, which it hands to the ranks: they
save and leave.
"""

import sys
from collections.abc import Sequence

from ..system import search_less_often
from ..system.process_info import end_with_parent


def main(words: Sequence[str]) -> None:
    """Run torchrun on the words after the launcher's process id."""
    end_with_parent(parent=int(words[0]))
    search_less_often()
    from torch.distributed.run import main as torchrun

    torchrun([*words[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
