"""Run one call as a rank of ``run_fresh``, and end."""

import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch.distributed as dist

from .messages import Ready
from .pickling import pack
from .worker import begin, run


def main(parent: Connection) -> int:
    """Run the function that the parent sends, and give the code to exit with.

    The interpreter then ends as any script's does, threads, process group and all: tests look at just that.
    """
    inbox = begin(parent)
    parent.send_bytes(pack(Ready()))
    np.random.seed()  # forks share numpy's state, launched processes do not
    call = inbox.get()
    try:
        run(call)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
        return code if isinstance(code, int) else 1
    return 0
