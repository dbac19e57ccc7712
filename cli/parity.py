"""``trilith parity HF_DIR --tensor 2 --pipeline 2``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import SCHEDULES, VIRTUAL_STAGES


def parity(
    folder: Annotated[Path, typer.Argument(help="a Hugging Face folder", metavar="HF_DIR")],
    tensor: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="pipeline stages")] = 1,
    data: Annotated[int, typer.Option(min=1, help="data-parallel ranks")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="of the data ranks: over which experts lie")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage")] = 0,
    sequence: Annotated[bool, typer.Option("--sequence", help="sequence parallelism")] = False,
    context: Annotated[int, typer.Option(min=1, help="context-parallel ranks, which share each row")] = 1,
    ring: Annotated[bool, typer.Option("--ring", help="keys and values go around the context ranks")] = False,
    schedule: Annotated[str, typer.Option(help=f"of the pipeline: {SCHEDULES}")] = "1f1b",
    virtual_stages: Annotated[int | None, typer.Option(min=1, help=VIRTUAL_STAGES)] = None,
    split: Annotated[
        str | None, typer.Option(help="blocks of each stage by hand, such as 3,2; default: evenly")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float64 tells most, then float32; in bfloat16 only gross errors show")
    ] = "float32",
    samples: Annotated[int, typer.Option(min=0, help="rows of the batch; 0: two a rank or more")] = 0,
    length: Annotated[int, typer.Option(min=1, help="tokens of a row")] = 32,
    seed: Annotated[int, typer.Option(help="of the random tokens")] = 0,
    tolerance: Annotated[
        float | None, typer.Option(help="largest relative difference; default: by dtype")
    ] = None,
    every: Annotated[bool, typer.Option("--modules", help="show every module and gradient")] = False,
) -> None:
    """Compare a model with transformers, and its layout with one process, module by module.

    Runs one forward and backward on random tokens in transformers, here in one process, and here on as many
    local processes as the layout has ranks. Compares every module's output, the loss and every gradient, each
    relative to its largest number, and names the first that differs: where an error begins. Loads the model
    once for each. Exit code 1 if anything differs by more than the tolerance.
    """
    from pydantic import ValidationError

    from ..parallel_state import BadInput, dtype_named, from_validation
    from ..pipeline import schedule_kind
    from ..recipes.sections import LayoutSection
    from ..runs.console import plain_console
    from ..testing.parity.case import Question
    from ..testing.parity.check import TOLERANCES
    from ..testing.parity.check import parity as compare
    from .sizes import parse_counts

    kind = schedule_kind(schedule, "parity")
    try:
        section = LayoutSection(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert,
            zero=zero,
            sequence=sequence,
            context=context,
            context_attention="ring" if ring else "all-gather",
            schedule=kind.name,
            virtual_stages=virtual_stages,
            split=parse_counts(split, "parity"),
        )
    except ValidationError as error:
        raise from_validation("parity", error, spelled=lambda key: f"--{key.replace('_', '-')}") from None
    layout = section.layout
    question = Question(
        str(folder),
        layout,
        split=None if section.split is None else tuple(section.split),
        schedule=kind.name,
        dtype=dtype_named(dtype, "parity", "--dtype"),
        samples=samples or layout.data * max(2, kind.least_micro_batches(pipeline)),
        length=length,
        seed=seed,
    )
    if question.dtype not in TOLERANCES:
        known = ", ".join(str(one).removeprefix("torch.") for one in TOLERANCES)
        raise BadInput("parity", "--dtype", expected=f"one of {known}", found=dtype)
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise BadInput("parity", "--tolerance", expected="a number from 0", found=tolerance)
    console = plain_console(soft_wrap=True)
    with console.status("checking") as status:
        found = compare(question, tolerance=tolerance, say=lambda text: status.update(f"running: {text}"))
    for one in found:
        where = "" if one.first is None else f"{one.first.kind} of {one.first.name}"
        verdict = f"differs first in the {where}" if where else "the same"
        console.print(f"{one.what}: {verdict} (allowed {one.tolerance:.0e}, {dtype})")
        for worst in (one.worst(kind) for kind in ("output", "loss", "gradient")):
            console.print(f"  largest difference of {worst.kind:<8} {worst.relative:.1e}  {worst.name}")
        for part in one.found if every else ():
            console.print(f"  {part.relative:.1e}  {part.kind:<8} {part.name}")
    if any(one.first for one in found):
        raise typer.Exit(1)
