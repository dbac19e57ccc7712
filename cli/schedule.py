"""``trilith schedule zbv --pipeline 4 --micro-batches 8``."""

from pathlib import Path
from typing import Annotated

from ..system import counted
from .shared.options import FORCE, SCHEDULES, VIRTUAL_STAGES, schedule_names
from .shared.parameters import Count, MaybeCount, Range
from .shared.say import say


def schedule(
    name: Annotated[str, f"pipeline schedule: {SCHEDULES}", schedule_names],
    *,
    pipeline: Annotated[int, Range(2), "number of pipeline ranks"] = 4,
    micro_batches: Annotated[Count, "number of micro-batches in a step"] = 8,
    virtual_stages: Annotated[MaybeCount, VIRTUAL_STAGES] = None,
    out: Annotated[Path | None, "picture to write, in .png, .svg or .pdf"] = None,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Show the timetable of a pipeline schedule and how long each rank waits.

    The order of work is the one that torch runs in training. The times assume that all stages take equally
    long, that a backward takes twice as long as a forward, and that sending takes no time. The column "held"
    counts activations; the activations of one stage for one micro-batch count as one.

    Examples:

        trilith schedule 1f1b
        trilith schedule zbv --pipeline 4 --micro-batches 8 --out zbv.png
    """
    from ..pipeline import bubble, layout_of, timetable
    from ..pipeline.timetable import timetable_lines
    from ..runs.terminal import plain_console

    name = name.lower()
    if out is not None:
        from ..pipeline.timetable_picture import check_picture, draw_timetable

        check_picture(out, force=force)
    layout = layout_of(name, pipeline, virtual_stages)
    computed = timetable(name, layout, micro_batches)
    for line in timetable_lines(computed, width=plain_console().width):
        say(line)
    say("")
    say(
        "F forward, B backward, which takes a second slot (--); I and W its halves: for the stage's input, "
        "for its weights; . waits"
    )
    if layout.virtual_stages > 1:
        say("small letters: the rank's later stages")
    say("")
    say(f"{'':<9}{'stages':<12}{'held at once':>13}{'waits':>18}")
    for rank in range(pipeline):
        numbers = " ".join(map(str, layout.stages_of(rank)))
        held_at_once = f"{computed.most_held(rank):>13}"
        say(f"rank {rank:<4}{numbers:<12}{held_at_once}{computed.idle(rank):>18.1%}")
    say(f"{'all':<34}{computed.bubble:>18.1%}; by the formula {bubble(name, layout, micro_batches):.1%}")
    if out is not None:
        shape = f"{counted(pipeline, 'rank')}, {layout.stages} stages, {micro_batches} micro-batches"
        draw_timetable(out, f"{name}: {shape}", computed, force=force)
        say(f"wrote {out}")
