"""torchrun, for as long as the launcher lives that started it: ``python -m trilith.training.agent PID ...``.

``PID`` is the launcher's. When the launcher dies, torchrun gets SIGTERM, which it hands to the ranks: they
save and leave.
"""

from __future__ import annotations

import sys

from .process_info import end_with_parent

if __name__ == "__main__":
    end_with_parent(parent=int(sys.argv[1]))
    from torch.distributed.run import main

    main(sys.argv[2:])
