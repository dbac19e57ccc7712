"""``trilith plan MODEL --gpus N``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..system import BadInput, counted, no_garbage_search, require, usable_cores
from .shared.options import FORCE, GPU_TYPE, USUAL_GPU, model_names, parse_amount, parse_counts
from .shared.parameters import As, MaybeCount, Range, There
from .shared.say import progress_bar, say

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ..planner.search.find import Found
    from ..planner.search.request import Request

#: The most numbers that an option with several takes.
MOST_COUNTS = 64


@no_garbage_search(hide=True)
def plan(
    model: Annotated[str, There, "published size, config.json, Hugging Face folder, or recipe", model_names],
    *,
    gpus: Annotated[str | None, "number of GPUs, or several such as 8,16,32 for a scaling curve"] = None,
    gpu_type: Annotated[str | None, f"{GPU_TYPE}; default: {USUAL_GPU}"] = None,
    machine: Annotated[
        Path | None, As("BENCH.json"), "instead of --gpu-type: the bench.json of your machine"
    ] = None,
    gpus_per_node: Annotated[MaybeCount, "GPUs of a node; default: as in the maker's own servers"] = None,
    sequence_length: Annotated[
        str | None, "tokens of a row, or several such as 8192,32768; default: recipe's, or model's up to 8192"
    ] = None,
    global_batch: Annotated[
        MaybeCount, "rows of a step; default: the recipe's, or 4 Mi tokens (--lora: 64 rows, --generate: 16)"
    ] = None,
    lora: Annotated[MaybeCount, "train LoRA adapters of this rank"] = None,
    tokens: Annotated[str | None, "tokens of the training, such as 15T, for its days and GPU-hours"] = None,
    price: Annotated[str | None, As("NUMBER"), "price of a GPU-hour, for the cost of --tokens"] = None,
    watts: Annotated[str | None, As("NUMBER"), "watts of a GPU, for energy; default: the maker's"] = None,
    generate: Annotated[bool, "plan `trilith generate` in the place of training"] = False,
    dtype: Annotated[str | None, As("DTYPE"), "data type, for --generate; default: bfloat16"] = None,
    headroom: Annotated[
        float | None, Range(0, 0.9), "share of a GPU's memory to leave free; default: the recipe's, or 0.08"
    ] = None,
    write: Annotated[Path | None, As("RECIPE.toml"), "recipe of the fastest layout to write"] = None,
    html: Annotated[Path | None, As("PAGE.html"), "report to write, one page"] = None,
    json: Annotated[bool, "print one JSON object, for programs"] = False,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Find the fastest layout of a model that fits, and why the others do not.

    The search lists every legal layout, with each pipeline schedule, ZeRO stage, size of a micro-batch and
    mode of activation checkpointing, and times each layout that fits and could be the fastest. It prints the
    fastest layout of each cut of the model, up to ten: the same that timing every legal layout would give.
    Times are predictions: docs/planning.md of the repository says what they rest on, and explains
    what is printed. `trilith train RECIPE --dry-run` accepts the recipe that --write makes.

    With --generate the command lists, for `trilith generate`, what a rank holds in each layout: weights, the
    cache of keys and values of --global-batch rows of --sequence-length tokens, and how many rows fit.

    Examples:

        trilith plan llama-3.1-8b --gpus 8
        trilith plan llama-3.1-405b --gpus 16384 --sequence-length 8192 --global-batch 2048
        trilith plan llama-3.1-70b --gpus 64 --write recipe.toml --html plan.html
        trilith plan llama-3.1-8b --gpus 8,16,32,64 --global-batch 128 --tokens 1T --price 2.50
        trilith plan llama-3.1-70b --gpus 4 --generate --sequence-length 8192,32768
        trilith plan smollm2-135m --gpus 2 --sequence-length 512 --global-batch 8 --machine bench.json
    """
    from dataclasses import replace

    from ..planner.search.report import asked, asked_in_sweep, found_ones, recipe_toml
    from ..planner.search.request import read_request
    from ..planner.time import machine_from_bench, machine_named
    from ..storage.output_places import check_output_file
    from ..storage.staging import output_file
    from .shared.plan_output import is_page, page_of, print_generation, print_plan

    counts: Sequence[int | None] = _counts(gpus, "--gpus") or [None]
    lengths: Sequence[int | None] = _counts(sequence_length, "--sequence-length") or [None]
    several = len(counts) * len(lengths) > 1
    fits = not several or not write
    require(fits, "plan", "--write", "one number of GPUs and one --sequence-length", "several")
    if generate and (write or html or lora or tokens):
        expected = "--generate without --write, --html, --lora and --tokens, which are of training"
        raise BadInput("plan", "--generate", expected=expected, found="one of them")
    todo = "A recipe's compute and dtype are those of training: plan the recipe"
    require(dtype is None or generate, "plan", "--dtype", "--generate with it", "training", todo)
    for option, number in (("--price", price), ("--watts", watts)):
        require(number is None or tokens is not None, "plan", option, "--tokens with it", "no --tokens")
    if write is not None and html is not None and os.path.realpath(write) == os.path.realpath(html):
        raise BadInput("plan", "--html", expected="another file than --write", found=html)
    if write is not None:
        check_output_file(write, force=force)
    if html is not None:
        check_output_file(html, ours=is_page, force=force)
    require(machine is None or gpu_type is None, "plan", "--gpu-type", "one of --gpu-type, --machine", "both")
    if machine is None:
        device = machine_named((gpu_type or USUAL_GPU).lower(), gpus_per_node=gpus_per_node)
    else:
        device = machine_from_bench(machine, gpus_per_node=gpus_per_node)
    if watts is not None:
        device = replace(device, watts=parse_amount(watts, "--watts"))
    rows = 16 if generate and global_batch is None else global_batch
    requests = [
        read_request(
            model, device, count, sequence_length=length, global_batch=rows, lora=lora, headroom=headroom,
            tokens=None if tokens is None else parse_amount(tokens, "--tokens", least=1),
            price=None if price is None else parse_amount(price, "--price"),
        )
        for count in counts
        for length in lengths
    ]  # fmt: skip
    if generate:
        print_generation(requests, dtype or "bfloat16", json)
        return
    if not json:
        say(asked(requests[0]) if len(requests) == 1 else asked_in_sweep(requests))
    results = _search(requests)
    print_plan(results, json)
    with ExitStack() as stack:  # both files can be written, or neither is
        files = []
        if write is not None:
            (search,) = found_ones(results)
            files.append((stack.enter_context(output_file(write, force=force)), recipe_toml(search)))
        if html is not None:
            page = stack.enter_context(output_file(html, ours=is_page, force=force))
            files.append((page, page_of(results)))
        for file, text in files:
            file.write_text(text, encoding="utf-8")
    for path in (write, html):
        if path is not None and not json:
            say(f"wrote {path}")


def _counts(text: str | None, option: str) -> list[int] | None:
    """Parse one or more numbers of at least 1, each of which counts once."""
    numbers = parse_counts(text, "plan", option)
    if numbers is not None and not all(1 <= number <= 2**24 for number in numbers):
        raise BadInput("plan", option, expected="numbers from 1 to 16,777,216", found=text)
    counts = numbers and list(dict.fromkeys(numbers))
    if counts and len(counts) > MOST_COUNTS:  # each is a search of seconds
        raise BadInput("plan", option, expected=f"at most {MOST_COUNTS} numbers", found=f"{len(counts):,}")
    return counts


def _search(requests: Sequence[Request]) -> list[Found]:
    """Search for each request with a progress bar on a terminal; raise ``BadInput`` if all find nothing."""
    from rich.progress import TimeElapsedColumn

    from ..planner.search.find import SHOWN, Found, find_layouts
    from ..planner.search.report import found_ones

    results: list[Found] = []
    most, cores = SHOWN if len(requests) == 1 else 1, usable_cores()
    with progress_bar(TimeElapsedColumn(), transient=True) as progress:
        for request in requests:
            task = progress.add_task(f"{counted(request.gpus, 'GPU')}: listing layouts", total=None)

            def show_progress(search: Found, task: TaskID = task) -> None:
                words = f"{search.settled:,} of {search.legal:,} layouts settled, {len(search.best)} found"
                progress.update(task, total=search.legal, completed=search.settled, description=words)

            try:
                results.append(find_layouts(request, shown=most, processes=cores, progress=show_progress))
            except BadInput as error:
                results.append(Found(request, error=error))
            progress.remove_task(task)
    found_ones(results)
    return results
