"""``trilith convert SRC DST``."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..system import BadInput, counted, no_garbage_search
from ..system.read_ahead import read_ahead
from .shared.options import CONFIG, IMPLEMENTATION, NAMES, SPLIT, WORKERS, Strict
from .shared.parameters import Count, Place, from_options, written
from .shared.say import byte_progress, say

if TYPE_CHECKING:
    from ..checkpoints import Source
    from ..checkpoints.convert.plan import Plan

#: The parameters that mean something with ``--to dcp``.
_OF_DCP = {"src", "dst", "to", "names", "config", "strict"}


@no_garbage_search(hide=True)
def convert(
    context: typer.Context,
    src: Annotated[
        Place, "Hugging Face folder or id, checkpoint, run, address of one, or another project's checkpoint"
    ],
    dst: Annotated[Path, "new folder for the converted weights"],
    *,
    to: Annotated[
        Literal["hf", "peft", "sharded", "dcp"] | None,
        "form to write: hf (Hugging Face), sharded (checkpoint), peft (LoRA adapters) or dcp (torch's own); "
        "default: sharded from a Hugging Face folder, or with --tensor or --pipeline; otherwise hf",
    ] = None,
    tensor: Annotated[Count, "number of tensor-parallel ranks to cut for"] = 1,
    pipeline: Annotated[Count, "number of pipeline stages to cut for"] = 1,
    split: Annotated[str | None, SPLIT] = None,
    config: Annotated[Place | None, CONFIG] = None,
    names: Annotated[str | None, NAMES] = None,
    implementation: Annotated[Literal["auto", "transformers"], IMPLEMENTATION] = "auto",
    dtype: Annotated[str | None, "data type to cast weights to: bfloat16, float16, float32, float64"] = None,
    allow_nonfinite: Annotated[bool, "accept weights that are NaN or infinite"] = False,
    allow_symlinks: Annotated[
        bool, "follow symbolic links out of a Hugging Face folder (those into its cache are always followed)"
    ] = False,
    workers: Annotated[Count, WORKERS] = 2,
    verify: Annotated[bool, "read the output again and compare every number with the source"] = False,
    dry_run: Annotated[bool, "print the plan and write nothing"] = False,
    strict: Strict = False,
) -> None:
    """Convert weights between Hugging Face, checkpoints and layouts.

    A sharded checkpoint has TENSOR x PIPELINE files of weights, one for each rank, and a run's optimizer
    moments too. A run loads a checkpoint of any layout: cut one if each host should have only the files of
    its own ranks. Memory does not grow with the model. DST appears only when it is complete; if the command
    is killed, the same command continues.

    Examples:

        trilith convert Llama-3.2-1B sharded --tensor 4 --pipeline 2
        trilith convert sharded other --tensor 2
        trilith convert run cut --tensor 2 --pipeline 2
        trilith convert other Llama-again --to hf
        trilith convert s3://bucket/run Llama-again --to hf
        trilith convert lora-run adapter --to peft
        trilith convert run titan-again --to dcp --names titan
        trilith convert titan/step-1000 Llama-mine --to hf --config Llama-3.2-1B
    """
    options = locals()
    if not dry_run:
        read_ahead(Path(src), workers)
    from ..checkpoints import plan_conversion
    from .shared.options import parse_counts

    if to == "dcp":
        from ..checkpoints import convert_to_dcp

        if idle := [option for name, option in written(context).items() if name not in _OF_DCP]:
            todo = "A checkpoint of torch's is whole, in the dtype of its source: convert the source first"
            raise BadInput("convert", "--to dcp", expected=f"no {idle[0]}", found="one", todo=todo)
        source = convert_to_dcp(src, dst, names=names, config=config)
        kinds = "weights and moments" if source.moments else "weights"
        say(f"{dst}: {kinds}, for torch.distributed.checkpoint.load")
        return
    plan = from_options(plan_conversion, options, split=parse_counts(split, "convert"))
    if plan.source.foreign is not None:
        say(f"{src}: {plan.source.foreign.summary()}")
    if dry_run:
        for name, transfers in plan.files.items():
            say(f"{name}  {sum(transfer.nbytes for transfer in transfers):,} bytes")
            for transfer in transfers:
                shape, pieces = list(transfer.box.shape), len(transfer.pieces)
                say(f"  {transfer.name}  {transfer.dtype} {shape}  from {counted(pieces, 'piece')}")
        return
    card = None
    if plan.layout is None:
        from .shared.model_card import model_card

        card = model_card(plan.source)
    write_weights(plan, dst, f"{src} -> {dst}", card, workers, allow_nonfinite=allow_nonfinite)
    if verify:
        _compare(plan.source, dst, dtype)


def write_weights(
    plan: "Plan", out: Path, title: str, card: str | None, workers: int, *, allow_nonfinite: bool = False
) -> None:
    """Carry out a plan with a progress bar; print its warnings and what was written."""
    from ..checkpoints import ConversionOptions, carry_out

    with byte_progress(title, plan.nbytes) as advance:
        options = ConversionOptions(workers=workers, progress=advance, card=card)
        carry_out(plan, out, allow_nonfinite=allow_nonfinite, options=options)
    for warning in plan.source.warnings:
        say(f"warning: {warning}", err=True)
    kinds = "weights and moments" if plan.keeps_moments else "weights"
    say(f"{out}: {counted(len(plan.files), 'file')} of {kinds}, {plan.nbytes:,} bytes")


def _compare(source: "Source", dst: Path, dtype: str | None) -> None:
    """Read both sides back: every number or, after a cast, names and shapes."""
    from ..checkpoints import differences, read_converted, verifying
    from ..parallel_state import BadCheckpoint

    output = read_converted(dst, source)
    with verifying(output) as checksums:
        for difference in differences(source, output, checksums):
            if dtype is None or math.isnan(difference.absolute):  # a cast never changes names and shapes
                expected = "the source's numbers"
                raise BadCheckpoint(dst, difference.name, expected=expected, found=difference.what)
    say(
        f"{dst}: read back, "
        + ("every number is the source's" if dtype is None else "names and shapes are the source's")
    )
