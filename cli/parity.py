"""``trilith parity HF_DIR --tensor 2 --pipeline 2``."""

from typing import Annotated, Literal

import typer

from ..system import BadInput
from .shared.options import IMPLEMENTATION, SCHEDULES, SPLIT, VIRTUAL_STAGES, check_seed, schedule_names
from .shared.parameters import As, Count, MaybeCount, Place, Range, from_options
from .shared.say import say


def parity(
    folder: Annotated[Place, As("HF_DIR"), "Hugging Face folder with the model"],
    *,
    tensor: Annotated[Count, "number of tensor-parallel ranks"] = 1,
    pipeline: Annotated[Count, "number of pipeline stages"] = 1,
    data: Annotated[Count, "number of data-parallel ranks"] = 1,
    data_replicate: Annotated[Count, "number of whole copies among the data-parallel ranks"] = 1,
    expert: Annotated[Count, "number of data-parallel ranks that share out the experts"] = 1,
    zero: Annotated[int, Range(0, 3), "ZeRO stage of data parallelism, 0 to 3"] = 0,
    sequence: Annotated[bool, As("--sequence-parallel"), "sequence parallelism over tensor ranks"] = False,
    context: Annotated[Count, "number of context-parallel ranks; they share each row"] = 1,
    ring: Annotated[bool, "use ring attention over the context-parallel ranks"] = False,
    schedule: Annotated[str, f"pipeline schedule: {SCHEDULES}", schedule_names] = "1f1b",
    virtual_stages: Annotated[MaybeCount, VIRTUAL_STAGES] = None,
    split: Annotated[str | None, SPLIT] = None,
    dtype: Annotated[str, "data type to compute in; float64 shows the smallest errors"] = "float32",
    samples: Annotated[int, Range(0), "number of rows in the batch; 0: at least two for each rank"] = 0,
    sequence_length: Annotated[Count, "number of tokens in a row"] = 32,
    implementation: Annotated[Literal["auto", "transformers"], IMPLEMENTATION] = "auto",
    device: Annotated[str, "device to compute on: cpu, or cuda with a GPU for each rank"] = "cpu",
    seed: Annotated[int, typer.Option(help="seed of the random tokens", callback=check_seed)] = 0,
    tolerance: Annotated[float | None, "largest relative difference that passes; default: by --dtype"] = None,
    print_all: Annotated[bool, As("--modules"), "show every module and gradient, not only the worst"] = False,
) -> None:
    """Compare a model with transformers and with one process, module by module.

    The command runs one forward and one backward on random tokens three times: in transformers, in trilith on
    one process, and in trilith on one local process for each rank of the layout. It compares the output of
    every module, the loss and every gradient, and names the first one that differs, which is where an error
    begins. Each run loads the whole model. The exit code is 1 if a difference is larger than the tolerance.

    Examples:

        trilith parity Llama-3.2-1B --tensor 2 --pipeline 2
        trilith parity Llama-3.2-1B --context 2 --ring --dtype float64
        trilith parity Mixtral-8x7B --data 2 --expert 2 --zero 1 --modules
    """
    options = locals()
    from pydantic import ValidationError

    from ..parallel_state import dtype_name, dtype_named, from_validation
    from ..pipeline import schedule_kind
    from ..recipes.sections import LayoutSection
    from ..runs.terminal import plain_console
    from ..testing.parity import Question
    from .shared.options import parse_counts
    from .shared.parity import TOLERANCES, check, compare_with_transformers

    kind = schedule_kind(schedule, "parity")
    keys = {key: options[key] for key in LayoutSection.model_fields}
    try:
        section = LayoutSection.model_validate({**keys, "split": parse_counts(split, "parity")})
    except ValidationError as error:
        raise from_validation("parity", error, spelled=_option) from None
    layout = section.layout
    question = from_options(
        Question,
        options,
        layout=layout,
        split=None if section.split is None else tuple(section.split),
        schedule=kind.name,
        dtype=dtype_named(dtype, "parity", "--dtype"),
        samples=samples or layout.data * max(2, kind.least_micro_batches(pipeline)),
        length=sequence_length,
    )
    if question.dtype not in TOLERANCES:
        dtypes = ", ".join(str(dtype_known).removeprefix("torch.") for dtype_known in TOLERANCES)
        raise BadInput("parity", "--dtype", expected=f"one of {dtypes}", found=dtype)
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise BadInput("parity", "--tolerance", expected="a number from 0", found=tolerance)
    check(question)
    with plain_console().status("checking") as status:
        comparisons = compare_with_transformers(
            question, tolerance=tolerance, say=lambda text: status.update(f"running: {text}")
        )
    for comparison in comparisons:
        where = "" if comparison.first is None else f"{comparison.first.kind} of {comparison.first.name}"
        verdict = f"differs first in the {where}" if where else "the same"
        say(f"{comparison.what}: {verdict} (allowed {comparison.tolerance:.0e}, {dtype_name(dtype)})")
        for worst in (comparison.worst(kind) for kind in ("output", "loss", "gradient")):
            say(f"  largest difference of {worst.kind:<8} {worst.relative:.1e}  {worst.name}")
        for part in comparison.differences if print_all else ():
            say(f"  {part.relative:.1e}  {part.kind:<8} {part.name}")
    if any(comparison.first for comparison in comparisons):
        raise typer.Exit(1)


def _option(key: str) -> str:
    return "--sequence-parallel" if key == "sequence" else f"--{key.replace('_', '-')}"
