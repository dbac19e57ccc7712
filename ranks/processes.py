"""Control the processes of ranks, and the templates that they are forked from."""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import torch.distributed as dist

from .failures import RankFailure
from .messages import LIFE, READY, Setting, pack, unpack

#: Seconds for a process to start and import torch, on a laptop with all cores busy.
START = 180.0

#: Seconds for a process that was asked where it is to begin its answer.
TRACE = 3.0


def _text_of(printed: IO[bytes]) -> str:
    fd = printed.fileno()
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


class Process:
    """Hold one rank's process: the pipe to it, the file that catches its output, its life line."""

    def __init__(self, template: "Template", *, fresh: bool) -> None:
        self.pipe: Connection
        self.pipe, child_pipe = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (exists as long as somebody has it open)
        self._life, their_life = os.pipe()
        self._pid: int | None = None
        self._code: int | None = None
        self._template = template
        template.fork([child_pipe.fileno(), self._printed.fileno(), their_life])
        child_pipe.close()
        os.close(their_life)
        self.send(Setting(_environment(), os.getcwd(), tuple(sys.path), fresh))

    def greet(self) -> None:
        """Wait until it is ready for a call; ``RuntimeError``, with what it printed, if it never is."""
        try:
            if not self.pipe.poll(START):
                raise EOFError
            assert self.receive() == READY
        except EOFError:
            printed = self._template.output() + self.output()
            raise RuntimeError(f"the process of a rank did not start:\n{printed}") from None

    def send(self, message: object) -> None:
        """Send a message. To a dead process nothing is sent: whoever reads from it next will notice."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(pack(message))

    def receive(self) -> Any:
        """Return the process's next message; ``EOFError`` if it is dead."""
        try:
            return unpack(self.pipe.recv_bytes())
        except ConnectionResetError:
            raise EOFError from None

    def printed_bytes(self) -> int:
        """Return how many bytes the process printed since the last ``output()``."""
        return os.fstat(self._printed.fileno()).st_size

    def output(self) -> str:
        """Return the text that the process printed since the last call."""
        text, fd = _text_of(self._printed), self._printed.fileno()
        # The process writes at the offset that it shares with us.
        os.lseek(fd, 0, os.SEEK_SET)
        os.ftruncate(fd, 0)
        return text

    @property
    def pid(self) -> int:
        """Return the process id; waits for the fork."""
        if self._pid is None:
            self._pid = self._next_fact()
        return self._pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` if it still runs after ``seconds``."""
        assert self.pid
        if self._code is None and select.select([self._life], [], [], seconds)[0]:
            self._code = self._next_fact()
        return self._code

    def end(self) -> int:
        """Wait until the process has ended by itself, and return its exit code."""
        code = self.wait()
        assert code is not None
        return code

    def _next_fact(self) -> int:
        fact = os.read(self._life, LIFE.size)
        if not fact:
            raise RuntimeError(f"the template of a rank died:\n{self._template.output()}")
        number: int = LIFE.unpack(fact)[0]
        return number

    def kill(self) -> None:
        """End it and what it started, whatever it is doing, and forget what it printed."""
        if self.wait(0) is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it is just forked, in no group of its own yet
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self.pipe.close()
        self._printed.close()
        os.close(self._life)


#: What a template runs: all that it imports stays.
_COMMAND = """
from trilith.system import search_less_often
search_less_often()
from trilith.ranks.worker import start
start()
"""


class Template:
    """Hold a process that forks ranks, with these modules imported; see ``worker.py``."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._requests, child_socket = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (exists as long as the template)
        self._process = subprocess.Popen(
            # -P: the working directory must not shadow packages, as the checkout's own folders would.
            [sys.executable, "-P", "-c", _COMMAND, str(child_socket.fileno()), *preload],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[child_socket.fileno()],
            # A fork of a process that has asked the CUDA driver can use no GPU: here torch asks NVML.
            env=_environment()
            | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            start_new_session=True,  # Ctrl-C is for the harness, which then ends its ranks
        )
        child_socket.close()

    def fork(self, fds: list[int]) -> None:
        """Fork a new rank with these descriptors: its pipe, its output, its life line."""
        try:
            socket.send_fds(self._requests, [b"f"], fds)
        except BrokenPipeError:
            raise RuntimeError(f"the template of a rank died:\n{self.output()}") from None

    def output(self) -> str:
        """Return the text that the template printed while it started."""
        return _text_of(self._printed)

    def end(self) -> None:
        """End the template; ranks that still run go on."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._printed.close()


class Templates:
    """Hold two templates, for even and odd ranks: neighbours hash strings differently, like launched ranks.

    A loop over a set that leads to a collective would pass in forks of one process, and hang in real runs.
    A template imports ``preload`` and what this process has imported of this package: no fork need do it.
    """

    def __init__(self) -> None:
        self.preload: list[str] = []
        self._templates: list[Template] = []
        self._owner = os.getpid()

    def start(self, ranks: Sequence[int], *, fresh: bool) -> dict[int, Process]:
        """Start processes for these ranks and wait until all are ready."""
        while len(self._templates) < min(2, max(ranks, default=-1) + 1):
            self._templates.append(Template([*self.preload, *_imported()]))
        started = {rank: Process(self._templates[rank % 2], fresh=fresh) for rank in ranks}
        try:
            for process in started.values():
                process.greet()
        except BaseException:
            self.close()  # the next call tries anew
            raise
        return started

    def close(self) -> None:
        """End the templates, not the ranks. A forked child of the owner leaves them alone."""
        if os.getpid() == self._owner:
            for template in self._templates:
                template.end()
            self._templates.clear()


def _imported() -> list[str]:
    """Return the modules of this package that this process has imported."""
    package = __name__.partition(".")[0] + "."
    return sorted(name for name in tuple(sys.modules) if name.startswith(package))


class Rendezvous:
    """Hold a store where ranks meet: in the harness, on 127.0.0.1 only, living longer than every rank."""

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
    defaults = {"GLOO_SOCKET_IFNAME": "lo"}
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    # Unbuffered, or what a killed rank printed is lost.
    return defaults | dict(os.environ) | threads | {"PYTHONUNBUFFERED": "1"}


def silent_ranks(processes: dict[int, Process], summary: str) -> list[RankFailure]:
    """Return failures of processes that still run: each with what it printed, ended by its stack traces."""
    now = time.monotonic()
    waited_for = {process: process.printed_bytes() for process in processes.values()}
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    while waited_for and time.monotonic() < now + TRACE:  # a busy machine runs the handler late
        waited_for = {
            process: size for process, size in waited_for.items() if process.printed_bytes() == size
        }
        time.sleep(0.1)
    if processes:
        time.sleep(0.3)  # for the rest of the threads
    return [
        RankFailure(rank, "silent", now, summary, output=process.output())
        for rank, process in processes.items()
    ]


#: The templates of this process: they serve every pool and every fresh call.
templates = Templates()
atexit.register(templates.close)
