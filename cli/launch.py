"""``trilith launch SYSTEM RECIPE``."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ..system import BadInput, counted
from .shared.options import FORCE, recipe_names
from .shared.parameters import MaybeCount, Overrides, Range, There
from .shared.say import say

if TYPE_CHECKING:
    from ..recipes import Recipe


def launch(
    system: Annotated[
        Literal["slurm", "kubernetes", "jobset"],
        "slurm, kubernetes (Kubeflow Trainer) or jobset (plain Kubernetes)",
    ],
    recipe: Annotated[
        str, There, "TOML file, or the name of a recipe that is installed with trilith", recipe_names
    ],
    overrides: Overrides = None,
    *,
    nodes: Annotated[MaybeCount, "number of hosts; default: as many as the ranks fill"] = None,
    ranks_per_node: Annotated[MaybeCount, "ranks on each host; default: 8, or what --nodes leaves"] = None,
    minutes: Annotated[int | None, Range(2), "time limit in minutes; default: 1440 (Slurm) or none"] = None,
    warning: Annotated[MaybeCount, "minutes before the limit at which the run saves; default: 5"] = None,
    restarts: Annotated[int | None, Range(0), "restarts after a failure; default: 3 (not kubernetes)"] = None,
    name: Annotated[str | None, "name of the job; default: the recipe's"] = None,
    partition: Annotated[str | None, "partition (Slurm only)"] = None,
    account: Annotated[str | None, "account (Slurm only)"] = None,
    exclude: Annotated[list[str] | None, "host that the job must not use; may be given several times"] = None,
    spares: Annotated[int | None, Range(0), "extra nodes, which replace excluded ones (Slurm only)"] = None,
    fit: Annotated[bool, "go on with fewer nodes if some are lost, in a layout that fits them"] = False,
    least_nodes: Annotated[MaybeCount, "fewest nodes on which Slurm starts a --fit job; default: 1"] = None,
    image: Annotated[str | None, "image that has trilith (not Slurm); default: trilith:latest"] = None,
    claim: Annotated[str | None, "claim of the run folder's volume (not Slurm); default: NAME-run"] = None,
    out: Annotated[Path | None, "file to write; default: the job's name with a suffix"] = None,
    submit: Annotated[bool, "hand the written file to the scheduler"] = False,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Write a job file for Slurm or Kubernetes; review it before you submit it.

    The recipe's layout gives the number of ranks. The Slurm script asks the run to save before the time
    limit, and puts the job back into the queue after that or after a node was lost. On bad input or a damaged
    checkpoint the job is not requeued. Nothing is submitted without --submit.

    Examples:

        trilith launch slurm llama-3.1-70b-64gpus --partition gpu --minutes 1440
        trilith launch slurm recipe.toml --nodes 2 --ranks-per-node 8 --exclude node17 --submit
        trilith launch slurm llama-3.1-70b-64gpus --fit --least-nodes 4
        trilith launch kubernetes recipe.toml --image registry/trilith:1
    """
    options = locals()
    from ..cluster import SYSTEMS, job_of, operand, render
    from ..recipes.recipe import load_recipe
    from ..storage.staging import output_file

    loaded = load_recipe(recipe, overrides or [])
    job = job_of(
        loaded, recipe, overrides or [], system,
        nodes=nodes, ranks_per_node=ranks_per_node, name=name,
        **{option: options[option] for of_system in SYSTEMS.values() for option in of_system.options},
    )  # fmt: skip
    _check_model(loaded)
    path = out or Path(job.name + SYSTEMS[system].suffix)
    text = render(job, operand(str(path)))
    command = [*SYSTEMS[system].submit, operand(str(path))]
    if submit and shutil.which(command[0]) is None:
        raise BadInput(
            "launch", "--submit", expected=f"the program {command[0]} on this machine", found="none",
            todo=f"Run `{shlex.join(command)}` where it is",
        )  # fmt: skip
    with output_file(path, force=force) as file:
        file.write_text(text, encoding="utf-8")
    say(f"wrote {path}: {counted(job.nodes, 'node')} x {counted(job.ranks, 'rank')}")
    say(shlex.join(command) if submit else f"next: {shlex.join(command)}")
    if submit and (code := subprocess.run(command, check=False).returncode):
        raise BadInput(
            "launch", "--submit", expected=f"{command[0]} to take the file", found=f"exit code {code}"
        )


def _check_model(recipe: "Recipe") -> None:
    """Refuse a layout that the model cannot have before the job is queued, if the model is known here."""
    from ..planner.dry_run import plan_without_weights

    model = recipe.model
    absent = model.init_from is not None and model.config is None and not Path(model.init_from).exists()
    if model.module is None and not absent:
        watch = recipe.watch.model_copy(update={"trackers": ()})  # whose packages only the nodes need
        plan_without_weights(recipe.model_copy(update={"watch": watch}))
