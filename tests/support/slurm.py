"""Run a real Slurm on this machine for tests: a controller and some nodes, of Debian's packages."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trilith.system.process_info import started_with

from support.kills import wait_for

PACKAGES = (*("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"), *("libhwloc15", "libnuma1"))
#: ProctrackType: pgid, which counts the dead too, waits for seconds where process 1 is slow to reap orphans.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=2
SchedulerParameters=sched_interval=1
SlurmdTimeout=10
SlurmctldTimeout=10
MinJobAge=300
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


#: Which node's daemon started a process; the processes of jobs know it by SLURMD_NODENAME.
_NODE = "TRILITH_TEST_NODE"
#: Waits until the test that started it is gone, however it ends, and kills every process with its mark.
_GUARD = """
import os, signal, sys
from trilith.system.process_info import started_with
sys.stdin.read()
while left := [pid for pid in started_with(sys.argv[1]) if pid != os.getpid()]:
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


class NoSlurm(RuntimeError):
    """Report that Slurm's packages cannot be had here, and why."""


def unpack(folder: Path) -> Path:
    """Fetch and unpack Slurm's packages into ``folder``; return the folder that holds ``usr``."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NoSlurm("this system has no apt-get and dpkg-deb")
    packages, root = folder / "packages", folder / "root"
    packages.mkdir(parents=True)
    found = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=packages, capture_output=True, text=True, timeout=120
    )
    if found.returncode:
        raise NoSlurm(f"apt-get download: {found.stderr.strip().splitlines()[-1]}")
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True, timeout=60)
    return root


@dataclass
class Slurm:
    """Hold a running Slurm: submit jobs, ask about them, and lose nodes."""

    folder: Path
    root: Path
    nodes: tuple[str, ...]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which Slurm's commands find it, and jobs find this Python."""
        libraries = self.root / "usr/lib/x86_64-linux-gnu"
        mine = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return mine | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{libraries / 'slurm-wlm'}:{libraries}",
            "PATH": f"{self.root / 'usr/bin'}:{os.environ['PATH']}",
        }

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands; return what it prints."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a script from its folder; return the job's number."""
        return self.command("sbatch", "--parsable", *options, script.name, cwd=script.parent).strip()

    def state(self, job: str) -> str:
        """Return the job's state, such as RUNNING or COMPLETED."""
        shown = self.command("scontrol", "show", "job", job)
        return next(word for word in shown.split() if word.startswith("JobState=")).partition("=")[2]

    def wait(self, job: str, *states: str, seconds: float = 240) -> str:
        """Wait until the job is in one of the states, which is returned."""
        seen: list[str] = []

        def is_there() -> bool:
            seen.append(self.state(job))
            return seen[-1] in states

        wait_for(is_there, seconds, f"job {job} is {' or '.join(states)}")
        return seen[-1]

    def start_soon(self, job: str) -> None:
        """Let a requeued job start without most of the seconds that Slurm waits for its earlier credentials.

        A node refuses those of the second in which it cleaned up after the job's first start.
        """
        self.wait_until_idle()
        time.sleep(2)
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until every node is free: a job that takes a range of nodes starts on those that are."""
        wait_for(self._are_idle, seconds, f"idle nodes; see {self.folder}")

    def _are_idle(self) -> bool:
        try:
            states = self.command("sinfo", "--noheader", "--Node", "--format=%T").split()
        except RuntimeError:
            return False
        return states == ["idle"] * len(self.nodes)

    def start_node(self, name: str) -> None:
        """Start the node's daemon."""
        step = str(self.root / "usr/sbin/slurmstepd-wlm")
        self._start(name, "slurmd-wlm", "-D", "-N", name, "-d", step)

    def lose(self, name: str) -> None:
        """Kill all that runs on the node, as a host that loses power: its daemon, and its jobs' processes."""
        everything = [f"SLURM_CONF={self.folder / 'slurm.conf'}"]
        for mark in (f"{_NODE}={name}", f"SLURMD_NODENAME={name}"):
            for pid in started_with(*everything, mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.processes.pop(name).wait(10)

    def _start(self, name: str, program: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.root / "usr/sbin" / program), *words],
                env=self.environment | {_NODE: name},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextmanager
def slurm(folder: Path, root: Path, nodes: Sequence[str] = ("n1", "n2")) -> Iterator[Slurm]:
    """Start a controller and a daemon for each node, of one core each.

    They and their jobs end with the block, or with this process, even if it is killed.
    """
    ports = _free_ports(len(nodes) + 1)
    host = socket.gethostname().partition(".")[0]
    described = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
        for name, port in zip(nodes, ports[1:], strict=True)
    ]
    (folder / "state").mkdir(parents=True)
    plugins = root / "usr/lib/x86_64-linux-gnu/slurm-wlm"
    user = os.environ.get("USER") or "root"
    text = _CONF.format(
        host=host, user=user, port=ports[0], plugins=plugins, folder=folder, nodes="\n".join(described)
    )
    (folder / "slurm.conf").write_text(text)
    running = Slurm(folder, root, tuple(nodes))
    guard = subprocess.Popen(
        [sys.executable, "-c", _GUARD, f"SLURM_CONF={folder / 'slurm.conf'}"],
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        running._start("controller", "slurmctld-wlm", "-D")
        # Nodes and commands that come before it listens try again only after a second.
        wait_for(lambda: _listens(ports[0]), 60, f"Slurm's controller; see {folder}")
        for name in nodes:
            running.start_node(name)
        running.wait_until_idle()
        yield running
    finally:
        guard.communicate(timeout=30)
        for process in running.processes.values():
            process.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
