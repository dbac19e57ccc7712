"""``trilith train RECIPE``."""

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..system import counted, no_garbage_search, require
from .shared.options import Strict, recipe_names
from .shared.parameters import As, Overrides, There
from .shared.say import print_table, say, say_next, table

if TYPE_CHECKING:
    from ..planner.dry_run import DryRun
    from ..recipes.recipe import Recipe
    from ..training.supervised import Fit

#: About as many bytes as a page has.
_ROOM_FOR_PAGE = 2**17
#: Columns of numbers are set right.
_table = partial(table, right=("GB", "MB", "MB on the wire", "share", "ranks", "number", "GB on the wire"))


def train(
    recipe: Annotated[
        Path, There, "TOML file, or name of a recipe that is installed with trilith", recipe_names
    ],
    overrides: Overrides = None,
    *,
    nproc: Annotated[int | None, "number of local processes; default: the layout's ranks"] = None,
    fit: Annotated[bool, "use the ranks that were started, in the fastest legal layout that fits"] = False,
    quiet: Annotated[bool, "print no progress lines"] = False,
    dry: Annotated[
        bool, As("--dry-run"), "start nothing; print a rank's memory and traffic, and whether it fits"
    ] = False,
    rank: Annotated[int | None, "rank to plan with --dry-run; default: that which needs most memory"] = None,
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
        trilith train llama-3.1-8b-8gpus --dry-run memory.device_gb=80
        trilith train recipe.toml --dry-run --exact --html memory.html
        trilith train recipe.toml --fit --nproc 3
        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
            --rdzv-id NAME --no-python trilith train recipe.toml
    """
    if dry:
        _dry_run(recipe, overrides or [], rank, exact=exact, html=html)
        return
    of_dry = {"--rank": rank, "--exact": exact or None, "--html": html}
    for option, value in of_dry.items():
        require(value is None, "train", option, "--dry-run with it", "none")

    from ..training import run

    chosen: Fit | None = None
    if fit:
        from ..planner.search.chosen_recipes import fit as layout_for

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
    say_next(*commands)


@no_garbage_search(hide=True)
def _dry_run(
    recipe: Path,
    overrides: Sequence[str],
    rank: int | None,
    *,
    exact: bool,
    html: Path | None,
) -> None:
    """Print a rank's memory and the step's numbers; ``BadInput`` afterwards if the rank does not fit.

    ``exact``: simulate the rank's step, too, and say who holds the bytes; ``html``: write that as a page.
    """
    from ..planner.memory import LESS_UNUSED
    from ..recipes.recipe import load_recipe
    from ..runs.report.html import is_page_of
    from ..storage.staging import output_file

    is_ours = partial(is_page_of, "trilith train --dry-run")
    # The page's file takes its room first: where it cannot be written, nothing is simulated for it.
    with output_file(html, ours=is_ours) if html is not None else nullcontext() as page:
        if page is not None:
            page.write_bytes(bytes(_ROOM_FOR_PAGE))
        planned = _show(load_recipe(recipe, overrides), rank)
        if exact or page is not None:
            from ..planner.search import Worker, pages
            from ..runs.terminal import plain_console

            on_rank = planned.rank
            simulating = plain_console(stderr=True).status(f"simulating a step of rank {on_rank.rank}")
            with closing(Worker()) as worker, simulating:
                record = worker.simulate(planned.recipe, on_rank.rank)
            say(f"exact          {pages.exact_line(record, on_rank.memory.total)}")
            kinds = pages.kinds_of_bytes(record)
            print_table(_table(f"who holds the memory of rank {on_rank.rank}", *kinds))
            print_table(_table("the largest holders", *pages.largest_holders(record)))
            if page is not None:
                text = pages.make_step_page(recipe.stem, record, on_rank.memory.total)
                page.write_text(text, encoding="utf-8")
    if html is not None:
        say(f"page           {html}")
    for note in planned.notes:
        say(f"not here       {note}")
    planned.check(str(recipe))
    if planned.room is None:
        say("fit unknown    give the device's memory, in 10^9 bytes: memory.device_gb=80")
    else:
        used, room, share = planned.rank.total, planned.room, 1 - planned.recipe.memory.headroom
        space = f"{used / 1e9:,.1f} of {room / 1e9:,.1f} GB, {share:.0%} of the device's"
        wasteful = planned.rank.runtime and planned.device and planned.rank.reserved > planned.device
        say(f"fits           {space}" + (f", only with {LESS_UNUSED}" if wasteful else ""))


def _show(recipe: "Recipe", rank: int | None) -> "DryRun":
    layout = recipe.layout
    ranks = f": {counted(layout.world, 'rank')}" if layout.world > 1 else ""
    say(f"layout         {layout}{ranks}")  # all else takes seconds
    from ..planner.dry_run import dry_run
    from ..planner.memory import reserved_words, unit_of
    from ..recipes.checks import without_effect

    planned = dry_run(recipe, rank=rank)
    plan, memory = planned.rank, planned.rank.memory
    active = f", of which a token meets {planned.active:,}" if planned.active < planned.parameters else ""
    say(f"device         {planned.recipe.device}")
    same = plan.parameters == plan.stored == plan.trained
    on_rank = f"computes with {plan.parameters:,}, stores {plan.stored:,}, trains {plan.trained:,}"
    if same:
        padded = ", padding included" * (layout.world == 1 and plan.stored > planned.parameters)
        on_rank = f"has {plan.stored:,}{padded}"
    say(f"parameters     {planned.parameters:,}{active}; rank {plan.rank} {on_rank}")
    say(
        f"global batch   {counted(planned.recipe.data.global_batch, 'sample')}, {planned.tokens:,} tokens; "
        f"{counted(planned.micro_batches, 'micro-batch')} of {planned.recipe.data.micro_batch} a rank; "
        f"pipeline bubble {planned.bubble:.1%}"
    )
    for line in without_effect(planned.recipe):
        say(f"note           {line}")
    if layout.pipeline > 1:
        say(f"stages         {planned.cut}")
    flops, prefix = (1e9, "G") if planned.flops.causal >= 1e8 else (1e6, "M")
    say(
        f"model FLOPs    {planned.flops.full / flops:,.2f} {prefix} a token counting all of attention, "
        f"{planned.flops.causal / flops:,.2f} {prefix} counting the causal half"
    )
    unit, scale = unit_of(plan.total)
    sizes = memory.parts(0) | {"runtime (assumed)": plan.runtime}
    rows = [(kind, f"{size / scale:,.2f}") for kind, size in sizes.items() if kind != "runtime"]
    memory_table = _table(f"memory of rank {plan.rank}", ("kind", unit), rows)
    memory_table.add_section()
    memory_table.add_row("at the worst moment", f"{plan.total / scale:,.2f}")
    if memory.host:
        memory_table.add_row("beside, on the host", f"{memory.host / scale:,.2f}")
    print_table(memory_table)
    if plan.runtime:
        say(f"reserved       {reserved_words(plan.reserved, planned.device)}")
    if planned.recipe.compiles:
        say("program        eager; compiled blocks keep less: 0.90 to 0.97 of this on an H100")
    if plan.traffic:
        unit, scale = unit_of(max(sent.wire for sent in plan.traffic))
        head = ("over", "ranks", "kind", "of", "number", f"{unit} on the wire")
        sent_rows = [
            (row.axis, f"{row.ranks:,}", row.kind.replace("_", "-"), row.what, f"{row.count:,}",
             f"{row.wire / scale:,.2f}")
            for row in plan.traffic
        ]  # fmt: skip
        print_table(_table(f"collectives of rank {plan.rank}, a step", head, sent_rows))
    return planned
