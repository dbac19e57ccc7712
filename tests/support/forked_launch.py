"""Start launchers and their ranks as forks of their parent: nothing is imported."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from trilith.ranks import processes, worker
from trilith.system.process_end import leave

Command = Callable[[list[str]], int]
#: Variables by which a launcher tells a process its rank, and where ranks meet.
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Forked:
    """Offer the interface of ``subprocess.Popen`` for a fork that does what the command would do."""

    def __init__(
        self,
        main: Callable[[Sequence[str]], object],
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: Any = None,
        stderr: Any = None,
        session: bool = False,
        keep: Sequence[int] = (),
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        gc.freeze()  # or a search would close files of the parent by numbers that are other files' here
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if session:
                os.setsid()
            streams = [(stream.fileno() if stream else None, fd) for stream, fd in ((stdout, 1), (stderr, 2))]
            for source, fd in ((stdin, 0), *streams):
                if source is not None:
                    os.dup2(source, fd)
            for first, last in pairwise([2, *sorted(keep), 4096]):
                os.closerange(first + 1, last)
            os.environ.clear()
            os.environ.update(env)
            main(words)
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; ``None`` while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, however long it takes; return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """End it at once unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send the signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_templates() -> None:
    """Let each template that this process starts from now on be a fork of it, which imports nothing."""

    def be_a_template(words: Sequence[str]) -> None:
        atexit._clear()  # what the test's process does at its end is not for ranks to do
        leave(worker.main(int(words[0])))

    def start(
        words: Sequence[str], *, env: Mapping[str, str], pass_fds: list[int], stdout: Any, **_: Any
    ) -> Forked:
        # Libraries, such as Arrow, close files of theirs in each fork by numbers that may be other files'
        # here; none of them is so high, and ``select`` takes it.
        requests, printed = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 900) for fd in (*pass_fds, stdout.fileno())
        )
        with open(printed, "wb") as output:
            how: dict[str, Any] = {"stdout": output, "stderr": output, "session": True, "keep": [requests]}
            template = Forked(be_a_template, [str(requests)], env, **how)
        os.close(requests)
        return template

    like = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    mock.patch.object(processes, "subprocess", like).start()


def launch_forked(command: Command, words: list[str], folder: str) -> None:
    """Run ``command`` (``trilith.cli.app.run``) on ``words``: a function for ``run_fresh``, without a group.

    The processes, their sessions, environments and standard inputs are a user's: launcher, ranks under it.
    Only, none is a new interpreter, which would import torch for seconds. The launcher's
    process id is in the file ``launcher-R`` of ``folder``, R the rank of the call. What goes to standard
    output is dropped.
    """
    _leave_the_test(Path(folder), "launcher")

    def start(words: Sequence[str], *, env: Mapping[str, str], stdin: int, stderr: Any, **_: Any) -> Forked:
        return Forked(be_a_rank(command), words, env, stdin=stdin, stderr=stderr, session=True)

    with mock.patch("trilith.runs.launch.subprocess.Popen", start):
        leave(command(words))


@dataclass(frozen=True)
class Node:
    """Describe a host of a test: its name, its address (127.0.0.1, ...), and the ``TRILITH_FAULT`` of its
    ranks.
    """

    name: str
    address: str
    fault: str = ""


def node_forked(command: Command, words: list[str], folder: str, nodes: list[Node], port: int) -> None:
    """Be torchrun on node R, with one rank: a function for ``run_fresh`` on as many ranks as there are nodes.

    R is the rank of the call. The first node is the head, where torchruns meet; ``port`` must be free.
    torchrun gives rank 0 to the node whose address is the first by its letters. As on hosts of their own,
    torchrun and rank know the node's name as that of their host, so they do not look for each other's
    processes. The rest is as in ``torchrun_forked``.
    """
    number = int(os.environ["RANK"])
    node = nodes[number]
    os.environ["TRILITH_FAULT"] = node.fault
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:{port}", "--rdzv-id", "one"]
    meeting += [f"--rdzv-conf=is_host={int(number == 0)}", "--local-addr", node.address]
    shape = ["--nnodes", str(len(nodes)), "--nproc-per-node", "1"]
    with mock.patch("socket.gethostname", lambda: node.name):
        torchrun_forked(command, [*shape, *meeting, "--no-python", "trilith", *words], folder)


def torchrun_forked(command: Command, words: list[str], folder: str) -> None:
    """Be ``torchrun`` with these words, which start ``trilith``: a function for ``run_fresh``.

    The process id of torchrun is in the file ``torchrun-R`` of ``folder``, R the rank of the call; the rest
    is as in ``launch_forked``.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main as torchrun

    def start(_: object, words: Sequence[str], env: Mapping[str, str]) -> Forked:
        return Forked(be_a_rank(command), words, env, session=True)

    _leave_the_test(Path(folder), "torchrun")
    with mock.patch.object(SubprocessHandler, "_popen", start):
        torchrun(words)
    leave(0)


def forget_the_launcher() -> None:
    """Be no rank of a launcher's."""
    for name in OF_LAUNCHERS:
        os.environ.pop(name, None)


def _leave_the_test(folder: Path, what: str) -> None:
    """Drop the test's variables and standard output, and note the process id."""
    number = int(os.environ["RANK"])
    forget_the_launcher()
    (folder / f"{what}-{number}").write_text(str(os.getpid()))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def be_a_rank(command: Command) -> Callable[[Sequence[str]], None]:
    """Return what a rank does that is started with words such as ``trilith train recipe.toml``."""

    def main(words: Sequence[str]) -> None:
        ours = next(number for number, word in enumerate(words) if word in ("trilith", "trilith.cli"))
        sys.exit(command([*words[ours + 1 :]]))

    return main
