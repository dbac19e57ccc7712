"""``trilith launch SYSTEM RECIPE``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..shared.options import FORCE
from ..shared.say import say

#: What submits a file of each system.
_SUBMIT = {
    "slurm": ["sbatch"],
    "kubernetes": ["kubectl", "apply", "-f"],
    "jobset": ["kubectl", "apply", "-f"],
    "skypilot": ["sky", "jobs", "launch", "--yes"],
}


def launch(
    system: Annotated[
        Literal["slurm", "kubernetes", "jobset", "skypilot"],
        typer.Argument(
            help="slurm, kubernetes (Kubeflow Trainer), jobset (plain Kubernetes) or skypilot",
            metavar="SYSTEM",
        ),
    ],
    recipe: Annotated[
        str,
        typer.Argument(
            help="TOML file, or the name of a recipe that is installed with trilith", metavar="RECIPE"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="recipe keys to change, such as layout.tensor=2", metavar="KEY=VALUE"),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="number of hosts; default: as many as the ranks fill")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="ranks on each host; default: 8, or what --nodes leaves")
    ] = None,
    minutes: Annotated[int, typer.Option(min=2, help="time limit of the job in minutes")] = 24 * 60,
    warning: Annotated[
        int, typer.Option(min=1, help="minutes before the limit at which the run saves and ends")
    ] = 5,
    restarts: Annotated[int, typer.Option(min=0, help="how often a failed job is started again")] = 3,
    name: Annotated[str | None, typer.Option(help="name of the job; default: the recipe's")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="host that the job must not use; may be given several times")
    ] = None,
    spares: Annotated[
        int,
        typer.Option(
            min=0, help="number of extra nodes to ask for, which replace excluded ones (Slurm only)"
        ),
    ] = 0,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="go on with fewer nodes if some are lost, in a layout that fits them"),
    ] = False,
    least_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="fewest free nodes on which Slurm starts a job with --fit; default: 1"),
    ] = None,
    image: Annotated[
        str, typer.Option(help="container image that has trilith, for Kubernetes")
    ] = "trilith:latest",
    out: Annotated[
        Path | None, typer.Option(help="file to write; default: the job's name with a suffix")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="hand the written file to the scheduler")] = False,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
) -> None:
    """Write one short file that starts a recipe on many hosts, to be read and adapted.

    The recipe's layout gives the number of ranks. The Slurm script asks the run to save before the time
    limit, and puts the job back into the queue after that or after a node was lost. If the input is bad, the
    job ends, because a person must look. Nothing is submitted without --submit.

    Examples:

        trilith launch slurm llama-3.1-70b-64gpus --partition gpu --minutes 1440
        trilith launch slurm recipe.toml --nodes 2 --ranks-per-node 8 --exclude node17 --submit
        trilith launch slurm llama-3.1-70b-64gpus --fit --least-nodes 4
        trilith launch kubernetes recipe.toml --image registry/trilith:1
    """
    from ...cluster import WRITERS, job_of
    from ...parallel_state import BadInput
    from ...recipes.recipe import load_recipe
    from ...storage.output_file import output_file

    if system != "slurm" and (spares or least_nodes is not None):
        option = "--spares" if spares else "--least-nodes"
        raise BadInput("launch", option, expected="slurm: other systems have no such number", found=system)
    job = job_of(
        load_recipe(recipe, overrides or []),
        recipe,
        overrides or [],
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        minutes=minutes,
        warning=warning,
        restarts=restarts,
        name=name,
        partition=partition,
        account=account,
        exclude=exclude or [],
        image=image,
        spares=spares,
        fit=fit,
        least=least_nodes,
    )
    write, suffix = WRITERS[system]
    path = out or Path(job.name + suffix)
    text = write(job, str(path))
    command = [*_SUBMIT[system], str(path)]
    if submit and shutil.which(command[0]) is None:
        raise BadInput(
            "launch", "--submit", expected=f"the program {command[0]} on this machine", found="none",
            todo=f"Run `{' '.join(command)}` where it is",
        )  # fmt: skip
    with output_file(path, force=force) as file:
        file.write_text(text)
    say(f"wrote {path}: {job.nodes} nodes x {job.ranks} ranks")
    say(f"next: {' '.join(command)}" if not submit else " ".join(command))
    if submit and (code := subprocess.run(command, check=False).returncode):
        raise BadInput(
            "launch", "--submit", expected=f"{command[0]} to take the file", found=f"exit code {code}"
        )
