"""Give large blocks of freed memory back to the operating system at once."""

import ctypes
import os

#: ``M_MMAP_THRESHOLD`` of glibc's ``mallopt``, and from how many bytes on a block is the system's.
_THRESHOLD, LARGE = -3, 4 << 20


def return_large_blocks() -> bool:
    """Let glibc take each block of at least ``LARGE`` bytes from the system, and return it when it is freed.

    By itself glibc takes blocks of up to 32 MB from its heap. There it seldom uses aligned ones again, which
    torch's are: a rank under ZeRO 3, with 0.34 GB of tensors between steps, grew by 60 MB a step, to 3.9 GB.
    Returns whether it was done: not if the environment states a threshold, or another library is used.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    stated = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in tunables
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return not stated and mallopt is not None and mallopt(_THRESHOLD, LARGE) == 1
