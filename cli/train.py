"""``trilith train RECIPE``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..system.errors import BadInput
from .shared.options import Strict, recipe_names
from .shared.parameters import As, Overrides, check_recipe_there

if TYPE_CHECKING:
    from ..training.supervised import Fit


def train(
    recipe: Annotated[Path, "TOML file, or name of a recipe that is installed with trilith", recipe_names],
    overrides: Overrides = None,
    *,
    nproc: Annotated[int | None, "number of local processes; default: the layout's ranks"] = None,
    fit: Annotated[bool, "use the ranks that were started, in the fastest legal layout that fits"] = False,
    quiet: Annotated[bool, "print no progress lines"] = False,
    dry: Annotated[
        bool, As("--dry-run"), "start nothing; print a rank's memory and traffic, and whether it fits"
    ] = False,
    rank: Annotated[int | None, "rank to plan with --dry-run; default: that which needs most memory"] = None,
    device_memory: Annotated[str | None, "memory of each device for --dry-run, such as 80GB"] = None,
    exact: Annotated[
        bool,
        "run a step of the rank on a simulated device, with --dry-run, and say who holds its memory "
        "at the worst moment (seconds for a few blocks and micro-batches, minutes for many)",
    ] = False,
    html: Annotated[Path | None, As("PAGE.html"), "page to write, with a picture of --exact's step"] = None,
    strict: Strict = False,
    next_commands: Annotated[bool, typer.Option("--next/--no-next", hidden=True)] = True,
) -> None:
    """Train a model as a recipe says, or resume its training.

    The command starts one local process for each rank of the layout. A run with a complete checkpoint in its
    folder resumes from it, also in another layout. After SIGTERM or Ctrl-C the run finishes its step, saves
    and exits with code 75. A dry run plans any number of ranks on this machine, without data and without GPU.
    docs/recipe.md of the repository lists all keys of a recipe.

    After a lost host, --fit goes on with the ranks that are left: all that were started, or --nproc. The
    planner chooses the layout, one line says which and why, and the curve stays the same. If the number
    of ranks is the recipe's, its layout is used unchanged.

    On several hosts, start the command with torchrun on each host. HOST is one of the hosts, and NAME is a
    new name for each run.

    Examples:

        trilith train recipe.toml
        trilith train recipe.toml layout.tensor=2 layout.data=4 steps=500
        trilith train llama-3.1-8b-8gpus --dry-run --device-memory 80GB
        trilith train recipe.toml --dry-run --exact --html memory.html
        trilith train recipe.toml --fit --nproc 3
        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
            --rdzv-id NAME --no-python trilith train recipe.toml
    """
    check_recipe_there(recipe)
    if dry:
        from .dry_run import show_dry_run

        show_dry_run(recipe, overrides or [], rank=rank, device_memory=device_memory, exact=exact, html=html)
        return
    of_dry = {"--rank": rank, "--device-memory": device_memory, "--exact": exact or None, "--html": html}
    for option, value in of_dry.items():
        if value is not None:
            raise BadInput("train", option, expected="--dry-run with it", found=value)

    from ..training import run

    chosen: Fit | None = None
    if fit:
        from ..planner.search.ranks_left import fit as layout_for

        chosen = layout_for
    code = run(recipe, overrides or [], ranks=nproc, quiet=quiet, fit=chosen)
    if code == 0 and next_commands and not quiet and "RANK" not in os.environ:
        _print_next_commands(recipe, overrides or [])
    raise typer.Exit(code)


def _print_next_commands(recipe: Path, overrides: list[str]) -> None:
    """Print what is usually done with a run that has ended, where it has saved a checkpoint."""
    from ..recipes import load_recipe

    trained = load_recipe(recipe, overrides)
    out, base = Path(trained.out), trained.model.init_from
    checkpoints = sorted(out.glob("checkpoints/step-*"))
    if not checkpoints:
        return
    commands = [["report", out]]
    own = trained.model.module is not None
    if trained.lora is not None:
        commands.append(["merge-lora", base or "BASE", out, out / "merged"])
    elif not own:
        if any(checkpoints[-1].rglob("tokenizer*")):
            commands.append(["generate", out, "--prompt", "Once upon a time"])
        commands.append(["convert", out, out / "hf", "--to", "hf"])
    for lead, words in zip(("next:", "     ", "     "), commands, strict=False):
        typer.echo(f"{lead} trilith {shlex.join(map(str, words))}")
