"""Run ``trilith generate`` on its ranks, started here or by torchrun; the first rank writes."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ..parallel_state import Layout
from ..runs.command_ranks import leave_figures, start_ranks
from ..runs.guard import watched
from ..runs.heartbeat import this_start
from ..runs.launch import (
    check_launch,
    check_local,
    device_here,
    device_words,
    own_rank,
    process_group,
    ranks_are_started,
)
from ..storage.disk import writing
from ..storage.output_places import check_output_file
from ..storage.staging import output_file
from .request import Prepared, Request, continue_prompts, prepare
from .text import Continuation


def run_generation(
    request: Request,
    layout: Layout,
    *,
    words: Sequence[str],
    write: Callable[[str], None],
    note: Callable[[str], None],
    device: str = "auto",
    out: Path | None = None,
    force: bool = False,
    status: Path | None = None,
) -> int:
    """Write what the request asks for; the exit code.

    ``words`` are the command's own, with which a layout of several ranks starts them; ``status`` is the
    folder that they were then given. ``write`` gets text or, for several prompts, lines of JSON, unless these
    go into the file ``out``, where ``force`` replaces what another command wrote; ``note`` the figures at the
    end.
    """
    read = (request.source, request.tokenizer, request.adapter)
    inputs = [Path(name) for name in read if name is not None]
    device = device_here(device)
    if out is not None:
        check_output_file(out, ours=_is_ours, force=force, inputs=inputs)
    if not ranks_are_started():
        check_local(layout, device=device)
    if layout.world > 1 and not ranks_are_started():
        prepare(request, layout)  # bad input is said once and at once, before any rank starts
        return start_ranks(words, layout.world, note)
    check_launch(layout, device=device)
    with ExitStack() as stack:
        if status is not None:
            stack.enter_context(watched(status, own_rank(), layout.world, run=this_start()))
        prepared = prepare(request, layout)
        first = own_rank() == 0
        file = stack.enter_context(_open(out, inputs, force)) if out is not None and first else None
        # A run may save meanwhile, and each rank chooses its newest checkpoint.
        alike = {
            "device": device,
            "request": hashlib.sha256(repr(request).encode()).hexdigest(),
            "source": str(prepared.source.path),
        }
        state = stack.enter_context(process_group(layout, device=device, alike=alike))
        stream = _text_of_one(request, prepared, write) if first and file is None else None
        done = continue_prompts(
            request,
            prepared,
            state,
            on_text=stream,
            on_row=_rows(request, file, write) if first and stream is None else None,
        )
        if first:
            if stream is not None:
                write("\n")
            leave_figures(f"{done} on {device_words(device)}", note, status)
    return 0


@contextmanager
def _open(out: Path, inputs: Sequence[Path], force: bool) -> Iterator[TextIO]:
    with (
        output_file(out, ours=_is_ours, force=force, inputs=inputs) as path,
        path.open("w", encoding="utf-8") as file,
    ):
        yield file


def _is_ours(seen: bytes) -> bool:
    """Tell whether a file begins with a line such as ``_rows`` writes."""
    try:
        first = json.loads(seen.split(b"\n", 1)[0])
    except ValueError:
        return False
    return isinstance(first, dict) and [*first] == ["prompt", "text", "tokens", "finish"]


def _text_of_one(
    request: Request, prepared: Prepared, write: Callable[[str], None]
) -> Callable[[str], None] | None:
    """Return the writer of a single prompt's text; the prompt itself is written first, except in a chat."""
    if len(prepared.ids) != 1:
        return None
    (prompt,) = request.prompts
    if isinstance(prompt, str) and not request.chat:
        write(prompt)
    return write


def _rows(
    request: Request, file: TextIO | None, write: Callable[[str], None]
) -> Callable[[Continuation], None]:
    prompts = iter(request.prompts)

    def line(row: Continuation) -> None:
        record = {
            "prompt": next(prompts),
            "text": row.text,
            "tokens": len(row.tokens),
            "finish": row.finish,
        }
        text = json.dumps(record, ensure_ascii=False) + "\n"
        if file is None:
            write(text)
        else:
            with writing(Path(file.name)):
                file.write(text)
                file.flush()

    return line
