"""Starting, reading and ending the processes of ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from .messages import Ready
from .transport import pack, unpack

#: Seconds for a process to start and import torch, on a laptop with all cores busy.
START = 180.0


class Process:
    """The parent's handle on one rank's process, the pipe to it, and the file that catches what it prints."""

    def __init__(self, module: str) -> None:
        self.pipe: Connection
        self.pipe, theirs = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process lives
        # -P: the working directory must not shadow packages, as the checkout's own folders would.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[theirs.fileno()],
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the parent, which then ends its ranks
        )
        theirs.close()

    def greet(self) -> None:
        """Wait until it is ready for a call; ``RuntimeError``, with what it printed, if it never is."""
        try:
            if not self.pipe.poll(START):
                raise EOFError
            assert isinstance(self.receive(), Ready)
        except EOFError:
            raise RuntimeError(f"the process of a rank did not start:\n{self.output()}") from None

    def send(self, message: object) -> None:
        """Nothing happens where the process is dead: whoever reads from it next will learn that."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(pack(message))

    def receive(self) -> Any:
        """Its next message; ``EOFError`` from a dead process."""
        try:
            return unpack(self.pipe.recv_bytes())
        except ConnectionResetError:
            raise EOFError from None

    def output(self) -> str:
        """What it printed since the last call of this."""
        fd = self._printed.fileno()
        size = os.fstat(fd).st_size
        text = os.pread(fd, size, 0).decode(errors="replace")
        # The process writes at the offset that it shares with us.
        os.lseek(fd, 0, os.SEEK_SET)
        os.ftruncate(fd, 0)
        return text

    def ask_where(self) -> None:
        """Have it print its Python stack."""
        self._process.send_signal(signal.SIGUSR1)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit code, negative for a signal; ``subprocess.TimeoutExpired`` if it is still running."""
        return self._process.wait(seconds)

    @property
    def code(self) -> int | None:
        """Its exit code, or ``None`` while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()
        self._printed.close()


class Rendezvous:
    """A store for the ranks to meet in: in the parent, on 127.0.0.1 only, outliving every rank."""

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.port: int = listener.getsockname()[1]
        # Given a port, torch would listen on all interfaces; given a socket, it takes over that one.
        self._store = dist.TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _environment() -> dict[str, str]:
    defaults = {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # names collectives that do not match instead of mixing them up
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    fixed = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # what a killed rank printed is not lost
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return defaults | dict(os.environ) | fixed


def gather_stacks(processes: dict[int, Process]) -> dict[int, str]:
    """What each of these processes has printed, and at the end where it is by its own account."""
    for process in processes.values():
        process.ask_where()
    time.sleep(0.3)
    return {rank: process.output() for rank, process in processes.items()}
