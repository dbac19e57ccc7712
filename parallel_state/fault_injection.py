"""Named points at which a test can make a rank fail; in a run without ``TRILITH_FAULT`` they do nothing.

``TRILITH_FAULT="rank=1;at=checkpoint.after_data;step=3;act=kill"``: at that point of that step rank 1 is
killed. Without ``step`` it is any step, without ``rank`` whichever rank comes there. ``time=2`` means the
second time that the rank comes there. Acts: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise``, ``enospc``,
``memory`` (none is left), ``sleep:SECONDS``. Once a process.
"""

import errno
import os
import resource
import signal
import time

import torch

from ..system.process_info import own_memory

_met = 0


def fault(point: str, *, rank: int, step: int | None = None) -> None:
    """Fail here if the environment asks for it; for tests."""
    setting = os.environ.get("TRILITH_FAULT")
    global _met
    if not setting:
        return
    fields = dict(part.split("=", 1) for part in setting.split(";"))
    if (fields["at"], fields.get("rank", str(rank))) != (point, str(rank)):
        return
    if str(step) != fields.get("step", str(step)):
        return
    _met += 1
    if _met != int(fields.get("time", 1)):
        return
    act, _, argument = fields["act"].partition(":")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif act == "sleep":
        time.sleep(float(argument))
    elif act == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
    elif act == "memory":
        memory = own_memory()
        assert memory is not None, "this fault needs Linux"
        resource.setrlimit(resource.RLIMIT_AS, (memory.virtual,) * 2)
        torch.empty(1 << 30, dtype=torch.uint8)
    elif act == "raise":
        raise RuntimeError(f"asked to fail at {point}")
    else:
        raise AssertionError(f"TRILITH_FAULT: unknown act {act}")
