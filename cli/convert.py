"""``trilith convert SRC DST``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .say import say

if TYPE_CHECKING:
    from ..checkpoints import Source


def convert(
    src: Annotated[
        Path, typer.Argument(help="a Hugging Face folder or model id, a checkpoint, or a run's folder")
    ],
    dst: Annotated[Path, typer.Argument(help="a new folder")],
    to: Annotated[
        Literal["hf", "peft", "sharded"] | None,
        typer.Option(
            "--to",
            help="hf, sharded, or peft for LoRA adapters; default: the other form",
        ),
    ] = None,
    tensor: Annotated[int, typer.Option(min=1, help="cut for this many tensor ranks")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="and this many pipeline stages")] = 1,
    split: Annotated[str | None, typer.Option(help="blocks of each stage by hand, such as 3,2")] = None,
    dtype: Annotated[str | None, typer.Option(help="cast the weights: float32, bfloat16, float16")] = None,
    allow_nonfinite: Annotated[bool, typer.Option(help="let NaN and infinities through")] = False,
    allow_symlinks: Annotated[
        bool,
        typer.Option(help="follow links out of a Hugging Face folder (the hub's cache is always followed)"),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="threads that read and write")] = 2,
    max_ram: Annotated[
        str | None,
        typer.Option(help="memory to stay below, such as 800MB or 2GiB; default: some 20 MB for each worker"),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="afterwards read the output and compare every number with the source"),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and write nothing")] = False,
) -> None:
    """Convert between Hugging Face folders and sharded checkpoints, or from one layout to another.

    Killed, the same command goes on where it was. Memory does not grow with the model.

    trilith convert Llama-3.2-1B sharded --tensor 4 --pipeline 2
    trilith convert sharded other --tensor 2
    trilith convert other Llama-again --to hf
    trilith convert lora-run adapter --to peft
    """
    from ..checkpoints import How, carry_out, plan_conversion
    from .progress import byte_progress
    from .sizes import parse_counts, parse_size

    counts = parse_counts(split, "convert")
    most = parse_size(max_ram, "--max-ram") if max_ram is not None else None
    plan = plan_conversion(
        src, to=to, tensor=tensor, pipeline=pipeline, split=counts, dtype=dtype, allow_symlinks=allow_symlinks
    )
    if dry_run:
        for file in plan.files:
            say(f"{file.name}  {file.nbytes:,} bytes")
            for one in file.tensors:
                say(f"  {one.name}  {one.dtype} {list(one.box.shape)}  from {len(one.copies)} pieces")
        return
    with byte_progress(f"{src} -> {dst}", plan.nbytes) as advance:
        how = How(workers=workers, max_ram=most, progress=advance)
        carry_out(plan, dst, allow_nonfinite=allow_nonfinite, how=how)
    for warning in plan.source.warnings:
        say(f"warning: {warning}", err=True)
    say(f"{dst}: {len(plan.files)} files of weights, {plan.nbytes:,} bytes")
    if verify:
        _compare(plan.source, dst, dtype)


def _compare(source: Source, dst: Path, dtype: str | None) -> None:
    """Read both sides back: every number or, after a cast, names and shapes."""
    from ..checkpoints import differences, read_converted, verify
    from ..parallel_state import BadCheckpoint

    written = read_converted(dst, source)
    if written.manifest is not None:
        verify(written.path, written.manifest)
    for one in differences(source, written):
        if dtype is None or math.isnan(one.absolute):  # a cast changes numbers, never names and shapes
            raise BadCheckpoint(dst, one.name, expected="the source's numbers", found=one.what)
    say(
        f"{dst}: read back, "
        + ("every number is the source's" if dtype is None else "names and shapes are the source's")
    )
