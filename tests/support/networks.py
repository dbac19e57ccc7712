"""Make small networks on this machine for tests: hosts that are joined by links, which can be cut.

A host is a network namespace with a name of its own. Its link is a pair of interfaces that ends in a bridge,
as a cable ends in a switch. Needs Linux, ``ip`` and the right to make namespaces.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

#: The interface of a host, by which ranks have to meet.
INTERFACE = "eth0"


class NoNetworks(RuntimeError):
    """Report that this machine lets us make no networks, and why."""


class Hosts:
    """Hold the hosts of one network; ``count`` of them, called ``node1`` and so on."""

    def __init__(self, count: int) -> None:
        self._mark = f"t{secrets.token_hex(2)}"
        self._hub = f"{self._mark}-hub"
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._running: list[subprocess.Popen[str]] = []

    def address(self, name: str) -> str:
        """Return a host's address."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def make(self) -> None:
        """Make the hosts and their links; raises ``NoNetworks``."""
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            raise NoNetworks("ip or unshare is not installed")
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "switch", "up")
        for name in self.names:
            space = self._space(name)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "add", INTERFACE, "type", "veth", "peer", name, "netns", self._hub)
            _ip("-n", self._hub, "link", "set", name, "master", "switch", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", INTERFACE)
            _ip("-n", space, "link", "set", INTERFACE, "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        """End what still runs, and remove the hosts."""
        for process in self._running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for space in (self._hub, *map(self._space, self.names)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def start(
        self, name: str, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on a host, in a process group of its own; its output goes to ``log``."""
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space(name), "unshare", "--uts", "sh", "-c",
                 f'hostname {name}; exec "$@"', "sh", *words],
                stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(environment or {})},
            )  # fmt: skip
        self._running.append(process)
        return process

    def torchrun(self, name: str, words: Sequence[str]) -> list[str]:
        """Return the words by which torchrun starts a rank on a host; all meet at the first host."""
        return [
            *("torchrun", f"--nnodes={len(self.names)}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={self.address(self.names[0])}:29400", "--rdzv-id=one"),
            f"--rdzv-conf=is_host={int(name == self.names[0])}",
            *(f"--local-addr={self.address(name)}", "--no-python", *words),
        ]

    def cut(self, name: str) -> None:
        """Cut a host's link, as if its cable was pulled at the switch."""
        _ip("-n", self._hub, "link", "set", name, "down")

    def restore(self, name: str) -> None:
        """Undo ``cut``."""
        _ip("-n", self._hub, "link", "set", name, "up")

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make ``count`` hosts for the ``with`` block; ``NoNetworks`` says why that is not possible here."""
    made = Hosts(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworks(f"{' '.join(words)}: {done.stderr.strip()}")
