"""``trilith convert SRC DST``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    src: Annotated[Path, typer.Argument(help="a Hugging Face folder, a checkpoint, or a run's folder")],
    dst: Annotated[Path, typer.Argument(help="a new folder")],
    to: Annotated[
        Literal["hf", "sharded"] | None,
        typer.Option("--to", help="hf or sharded; default: hf from a checkpoint, else sharded"),
    ] = None,
    tensor: Annotated[int, typer.Option(min=1, help="cut for this many tensor ranks")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="and this many pipeline stages")] = 1,
    split: Annotated[str | None, typer.Option(help="blocks of each stage by hand, such as 3,2")] = None,
    dtype: Annotated[str | None, typer.Option(help="cast the weights: float32, bfloat16, float16")] = None,
    allow_nonfinite: Annotated[bool, typer.Option(help="let NaN and infinities through")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and write nothing")] = False,
) -> None:
    """Convert between Hugging Face folders and sharded checkpoints, or from one layout to another.

    trilith convert Llama-3.2-1B sharded --tensor 4 --pipeline 2
    trilith convert sharded other --tensor 2
    trilith convert other Llama-again --to hf
    """
    from ..checkpoints import convert as run
    from ..checkpoints import plan_conversion
    from .progress import byte_progress

    counts = _counts(split)
    plan = plan_conversion(src, to=to, tensor=tensor, pipeline=pipeline, split=counts, dtype=dtype)
    if dry_run:
        for file in plan.files:
            typer.echo(f"{file.name}  {file.nbytes:,} bytes")
            for one in file.tensors:
                typer.echo(f"  {one.name}  {one.dtype} {list(one.box.shape)}  from {len(one.copies)} pieces")
        return
    with byte_progress(f"{src} -> {dst}", plan.nbytes) as advance:
        done = run(
            src,
            dst,
            to=to,
            tensor=tensor,
            pipeline=pipeline,
            split=counts,
            dtype=dtype,
            allow_nonfinite=allow_nonfinite,
            progress=advance,
        )
    for warning in done.source.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{dst}: {len(plan.files)} files of weights, {plan.nbytes:,} bytes")


def _counts(split: str | None) -> list[int] | None:
    from ..parallel_state import BadInput

    if split is None:
        return None
    try:
        return [int(word) for word in split.split(",")]
    except ValueError:
        raise BadInput("convert", "--split", expected="numbers such as 3,2", found=repr(split)) from None
