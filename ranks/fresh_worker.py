"""Run one call as a rank of ``run_fresh``, and end."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from .messages import Call, Ready
from .pickling import pack, unpack
from .worker import enter


def main(parent: Connection) -> int:
    """Run the function that the parent sends, and give the code to exit with.

    The interpreter then ends as any script's does, threads, process group and all: tests look at just that.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    faulthandler.enable()  # and where it was when a signal of the system's ended it
    parent.send_bytes(pack(Ready()))
    call = unpack(parent.recv_bytes())
    assert isinstance(call, Call), call
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    np.random.seed()  # forks share numpy's state, launched processes do not
    try:
        enter(call)
        call.function.load()(*unpack(call.arguments))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        return code if isinstance(code, int) else 1
    return 0


def leave(code: int) -> NoReturn:
    """End this process after its threads and exit functions, but take the interpreter apart no further.

    The rest of an end copies most of the memory that a fork shares: 0.3 s of processor time.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with(parent: Connection) -> None:
    """End this process when the parent dies: the parent's end of the pipe closes then."""
    try:
        parent.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
