"""Limit the number of processes or threads that one machine runs at once."""

from __future__ import annotations

import os

#: For each core, and on a machine with few cores. Tests of layouts run many more ranks than there are cores.
_FOR_EACH_CORE, _ON_A_SMALL_MACHINE = 4, 64


def most_at_once() -> int:
    """Return the largest number of processes, or of threads that work, that a command starts here.

    A larger number is a slip of the keyboard: starting so many would exhaust the machine.
    """
    return max(_ON_A_SMALL_MACHINE, _FOR_EACH_CORE * (os.cpu_count() or 1))
