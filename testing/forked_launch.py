"""Start ``trilith train`` as its launcher does, each process a fork of its parent: nothing is imported."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ..runs import torchrun_agent as agent

Command = Callable[[list[str]], int]


class Forked:
    """Offer the interface of ``subprocess.Popen`` for a fork that does what the command would do."""

    def __init__(
        self,
        main: Callable[[Sequence[str]], object],
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        stderr: Any = None,
        session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if session:
                os.setsid()
            for fd, place in ((stdin, 0), (stderr.fileno() if stderr else None, 2)):
                if fd is not None:
                    os.dup2(fd, place)
            os.closerange(3, 4096)
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

    def send_signal(self, number: int) -> None:
        """Send the signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def launch_forked(command: Command, words: list[str], folder: str) -> None:
    """Run ``command`` (``trilith.cli.app.run``) on ``words``: a function for ``run_fresh``, without a group.

    The processes, their sessions, environments and standard inputs are a user's: launcher, torchrun under it,
    ranks under that. Only, none is a new interpreter, which would import torch for seconds. The launcher's
    process id is in the file ``launcher-R`` of ``folder``, R the rank of the call. What goes to standard
    output is dropped.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    number = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    (Path(folder) / f"launcher-{number}").write_text(str(os.getpid()))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)

    def be_a_rank(started: Sequence[str]) -> None:
        sys.exit(command([*started[started.index("trilith.cli") + 1 :]]))

    with (
        mock.patch("trilith.runs.launch.subprocess.Popen", _start_torchrun),
        mock.patch.object(
            SubprocessHandler, "_popen", lambda _, started, env: Forked(be_a_rank, started, env, session=True)
        ),
    ):
        sys.exit(command(words))


def _start_torchrun(words: Sequence[str], *, env: Mapping[str, str], stdin: int, stderr: Any) -> Forked:
    rest = words[words.index("trilith.runs.torchrun_agent") + 1 :]
    return Forked(agent.main, rest, env, stdin=stdin, stderr=stderr)
