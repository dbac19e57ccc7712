"""``trilith merge-lora BASE ADAPTER OUT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .say import say


def merge_lora(
    base: Annotated[Path, typer.Argument(help="a Hugging Face folder or model id, or a checkpoint")],
    adapter: Annotated[Path, typer.Argument(help="PEFT's folder, a LoRA run's, or a checkpoint of one")],
    out: Annotated[Path, typer.Argument(help="a new folder")],
    workers: Annotated[int, typer.Option(min=1, help="threads that read and write")] = 2,
    max_ram: Annotated[
        str | None,
        typer.Option(help="memory to stay below, such as 800MB or 2GiB; default: some 20 MB for each worker"),
    ] = None,
) -> None:
    """Add LoRA adapters to the weights of their base: a whole Hugging Face folder that needs no peft.

    W + scale * B A, in float32, then in W's own format; all else byte for byte. It loads no model and needs
    no GPU; memory does not grow with the model. Killed, the same command goes on where it was.

    trilith merge-lora Llama-3.2-1B lora-run merged
    """
    from ..checkpoints import How, carry_out, plan_merge
    from ..parallel_state import check_workers
    from .progress import byte_progress
    from .sizes import parse_size

    most = parse_size(max_ram, "--max-ram") if max_ram is not None else None
    check_workers(workers, "merge-lora")
    plan = plan_merge(base, adapter)
    with byte_progress(f"{base} + {adapter} -> {out}", plan.nbytes) as advance:
        carry_out(plan, out, how=How(workers=workers, max_ram=most, progress=advance))
    for warning in plan.source.warnings:
        say(f"warning: {warning}", err=True)
    say(f"{out}: {len(plan.files)} files of weights, {plan.nbytes:,} bytes")
