"""``trilith doctor``."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..system import BadInput, require
from .shared.options import TESTED
from .shared.parameters import As, Range
from .shared.say import say, say_json, table

if TYPE_CHECKING:
    from ..machine import Finding


def doctor(
    folders: Annotated[list[Path] | None, As("FOLDER"), "folders whose file systems to check too"] = None,
    *,
    nodes: Annotated[bool, "compare the nodes on which torchrun or srun started this command"] = False,
    gbits: Annotated[float | None, Range(0), "10^9 bits a second that links should have, for --nodes"] = None,
    exclude: Annotated[
        bool, As("--exclude-faulty"), "add nodes at fault to FOLDER/excluded-nodes, which job scripts read"
    ] = False,
    as_json: Annotated[bool, As("--json"), "print the findings as JSON, to send or to compare"] = False,
) -> None:
    """Check in a minute whether a machine, or the nodes of a job, can train.

    The doctor looks at versions, GPUs and their links, memory, cores, limits, file systems and environment
    variables, compiles a small C++ program, and runs an all-reduce between two processes. Each line is ok, a
    warning (something works, but slowly or not everywhere) or a fault (something will fail), and says what to
    do. It checks this machine only, and leaves nothing behind. The exit code is 3 if there is a fault.
    Tested on CPUs and, in part, on one H100; not yet on several GPUs.

    With --nodes it compares the nodes of a job: versions, GPUs, speed and free space of the folders, clocks,
    and the TCP link between every two nodes. It names the nodes that differ, are slow or do not answer. Only
    the first rank prints; it ends with 3 if there is a fault.

    Examples:

        trilith doctor
        trilith doctor /mnt/checkpoints --json
        srun --ntasks-per-node=1 trilith doctor --nodes /shared/runs --exclude-faulty
        torchrun --nnodes 2 --rdzv-endpoint node1:29400 --rdzv-backend c10d --no-python trilith doctor --nodes
    """
    if nodes:
        _compare(folders or (), gbits=gbits, exclude=exclude, as_json=as_json)
        return
    for folder in (Path.cwd(), *(folders or ())):  # the first one may have been deleted
        require(folder.is_dir(), folder, None, "a folder", "no such folder")
    if exclude or gbits is not None:
        raise BadInput("doctor", "--exclude-faulty and --gbits", expected="--nodes beside them", found="none")
    from ..machine import diagnose
    from ..runs.terminal import plain_console

    with plain_console(stderr=True).status("checking") as status:
        findings = diagnose(folders or (), say=lambda group: status.update(f"checking {group}"))
    if as_json:
        say_json({"findings": findings}, default=asdict)
    else:
        _print_table("Doctor", findings)
    _end(findings)


def _compare(folders: Sequence[Path], *, gbits: float | None, exclude: bool, as_json: bool) -> None:
    from ..cluster import exclude_nodes
    from ..machine import preflight

    comparison = preflight(folders, gbits=gbits)
    if comparison is None:
        return
    if as_json:
        say_json(vars(comparison), default=asdict)
    else:
        _print_table("Nodes", comparison.findings)
        if comparison.exclude:
            say(f"leave out: {', '.join(comparison.exclude)}")
    if exclude and comparison.exclude:
        path = exclude_nodes(folders[0] if folders else Path.cwd(), comparison.exclude)
        if not as_json:
            say(f"wrote {path}")
    _end(comparison.findings)


def _print_table(title: str, findings: "Sequence[Finding]") -> None:
    from rich.text import Text

    from ..runs.terminal import plain_console

    colours = {"ok": "green", "warning": "yellow", "fault": "red"}
    rows = [(Text(row.level, colours[row.level]), row.check, row.found, row.todo) for row in findings]
    console = plain_console()
    console.print(table(title, ("", "check", "found", "what to do"), rows))
    counts = {level: sum(finding.level == level for finding in findings) for level in colours}
    console.print(", ".join(f"{count} {level}" for level, count in counts.items()))
    console.print(f"{TESTED} docs/gpu.md of the repository says what that leaves open.", style="dim")


def _end(findings: "Sequence[Finding]") -> None:
    if any(finding.level == "fault" for finding in findings):
        raise typer.Exit(3)
