"""Import torch once and fork ranks from this process: an import takes seconds, a fork milliseconds.

``start`` is its command. It has one thread, so that a fork is whole.
"""

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from ..system import search_garbage_rarely
from ..system.process_end import end
from . import worker
from .messages import LIFE, Setting
from .pickling import unpack


def main(fd: int) -> int:
    """Fork ranks until the harness is gone. In a rank: do what the harness sends; the exit code."""
    parent = Connection(serve(socket.socket(fileno=fd)))
    setting = unpack(parent.recv_bytes())
    assert isinstance(setting, Setting), setting
    setting.apply()
    return worker.run_one(parent) if setting.fresh else worker.serve(parent)


def serve(requests: socket.socket) -> int:
    """Fork on each request, and report each fork's end. Returns in the forks alone: their end of the pipe."""
    lives: dict[int, int] = {}
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    search_garbage_rarely()  # a search in a fork would copy every page
    while True:
        readable, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _report_ended(lives)
        if requests.fileno() in readable:
            data, fds, _, _ = socket.recv_fds(requests, 1, 3)
            if not data:
                os._exit(0)  # the harness is gone; the ranks notice by their own pipes
            pipe, printed, life = fds
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # A shell starts what runs in its background with this signal ignored.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                requests.close()
                for fd in (woken, wake, life, *lives.values()):
                    os.close(fd)
                for stream in (1, 2):
                    os.dup2(printed, stream)
                os.close(printed)
                os.setsid()
                return pipe
            os.write(life, LIFE.pack(pid))
            lives[pid] = life
            os.close(pipe)
            os.close(printed)


def _report_ended(lives: dict[int, int]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        life = lives.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # the harness no longer asks
            os.write(life, LIFE.pack(os.waitstatus_to_exitcode(status)))
        os.close(life)


def start() -> NoReturn:
    """Be a template: the arguments of the command line are a descriptor and the modules to import."""
    # What is imported here no rank need import: pipelining and FSDP import torch's compiler, 1.5 s a rank.
    for name in sys.argv[2:]:
        importlib.import_module(name)
    end(main(int(sys.argv[1])))
