"""Find the launcher that started this process as one of several ranks: torchrun, Open MPI's mpirun, or srun.

Each launcher sets environment variables, whose names are only in ``LAUNCHERS``. Variables of several
launchers may be set, because mpirun may start its ranks through srun, and both may start torchrun. Then the
first of these launchers in ``LAUNCHERS`` is used.
"""

import os
import re
from dataclasses import dataclass

from ..system.errors import BadInput
from ..system.text import whole_number

_HIGHEST_PORT = 65535
#: No count of ranks and no job's number is larger.
_MOST = 10**9 - 1
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Name a launcher's variables of a process: its rank, the number of ranks, its place on its host."""

    name: str
    rank: str
    world: str
    local_rank: str


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
#: Variables of torchrun and Ray, whose ranks have srun's variables of the task that started them too.
_STARTED_BY_TASKS = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
#: Accelerate, Ray Train and Kubeflow's plugin set torchrun's variables, or start torchrun.
LAUNCHERS = (
    _TORCHRUN,
    _Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _SRUN,
)


@dataclass(frozen=True, slots=True)
class Launched:
    """Describe this process among the ranks that a launcher, or a user who set its variables, has started.

    The ranks meet at ``host`` and ``port``, where the first of them listens.
    """

    rank: int
    world: int
    local_rank: int
    host: str
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """Return the same facts as torchrun's variables, for code that reads only those."""
        values = (self.rank, self.world, self.local_rank, self.host, self.port)
        names = (_TORCHRUN.rank, _TORCHRUN.world, _TORCHRUN.local_rank, *_MEETING)
        return {name: str(value) for name, value in zip(names, values, strict=True)}


def launched() -> Launched | None:
    """Read the launcher's variables; return ``None`` if nobody started ranks.

    Raises ``BadInput``, naming the variable, for an incomplete set, an impossible value, or two launchers
    that contradict each other.
    """
    launchers = [launcher for launcher in LAUNCHERS if _starts(launcher)]
    if not launchers:
        return None
    launcher = launchers[0]
    if launcher is _TORCHRUN:
        names = (_TORCHRUN.rank, _TORCHRUN.world, *_MEETING)
        if missing := set(names) - os.environ.keys():
            present = [name for name in names if name in os.environ]
            raise _bad(", ".join(sorted(missing)), f"all of {', '.join(names)}", f"only {', '.join(present)}")
    world = _number(launcher.world, 1, None)
    rank = _number(launcher.rank, 0, world - 1)
    if launcher is _TORCHRUN and not any(name in os.environ for name in _STARTED_BY_TASKS):
        for other in launchers[1:]:  # each of its tasks is a rank, so it must say the same
            _check_same(other, rank, world)
    for name in _MEETING:
        if name not in os.environ and launcher is not _SRUN:
            raise BadInput(
                "environment", name,
                expected=f"where the ranks meet, which {launcher.name} does not say", found="nothing",
                todo="Give both: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, where HOST runs rank 0",
            )  # fmt: skip
    return Launched(rank, world, local_rank(world - 1) or 0, _host(), _port())


def local_rank(most: int | None = None) -> int | None:
    """Return this rank's number on its host, at most ``most``, or ``None`` if no variable states it. No other
    variable is needed: the process group may have been started without a launcher's.
    """
    for launcher in LAUNCHERS:
        name = launcher.local_rank
        if name in os.environ and (launcher is _TORCHRUN or _starts(launcher)):
            return _number(name, 0, most)
    return None


def _starts(launcher: _Launcher) -> bool:
    """Tell whether the launcher has started this process as one of several ranks.

    A batch script and a step of one task have srun's variables too; what runs there starts its own ranks.
    """
    if launcher is _TORCHRUN:
        others = any(_starts(launcher) for launcher in LAUNCHERS[1:])
        names = (launcher.rank, launcher.world, *(() if others else _MEETING))
        return any(name in os.environ for name in names)
    if launcher is _SRUN and "SLURM_STEP_NODELIST" not in os.environ:
        return False
    return os.environ.get(launcher.world, "1") != "1"


def _check_same(other: _Launcher, rank: int, world: int) -> None:
    for name, variable, value in (
        (_TORCHRUN.rank, other.rank, rank), (_TORCHRUN.world, other.world, world)
    ):  # fmt: skip
        if os.environ.get(variable) != str(value):
            raise BadInput(
                "environment", name,
                expected=f"{os.environ.get(variable)}, as {variable} of {other.name} says",
                found=value, todo=f"Unset {name}: each process that {other.name} starts is a rank",
            )  # fmt: skip


def _host() -> str:
    """Return where the ranks meet: the variable, or srun's first node."""
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        return first_host(os.environ["SLURM_STEP_NODELIST"])
    if not host.strip():
        raise _bad("MASTER_ADDR", "the host of rank 0", repr(host))
    return host


def _port() -> int:
    """Return the port: the variable, or one that follows from the job's and the step's numbers."""
    if "MASTER_PORT" in os.environ:
        return _number("MASTER_PORT", 1, _HIGHEST_PORT)
    job, step, restart = (
        _number(name, 0, None) if name in os.environ else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return 20000 + (7 * job + step + restart) % 20000


def first_host(nodes: str) -> str:
    """Return the first host of a list of hosts in Slurm's short form.

    >>> first_host("gpu[007-009,12]-a,login")
    'gpu007-a'
    """
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def _number(name: str, least: int, most: int | None) -> int:
    text = os.environ.get(name, "")
    number = whole_number(text)
    if number is None or number < least or number > (_MOST if most is None else most):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise _bad(name, f"a whole number {bounds}", repr(text)[:80] if text else "nothing")
    return number


def _bad(name: str, expected: str, found: str) -> BadInput:
    todo = "Start through torchrun, srun or mpirun, or unset its variables"
    return BadInput("environment", name, expected=expected, found=found, todo=todo)
