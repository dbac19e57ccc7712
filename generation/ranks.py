"""Run ``trilith generate`` on its ranks, started here or by torchrun; the first rank writes."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from ..parallel_state import Layout, ParallelState
from ..runs.launch import device_words, own_rank
from ..storage.disk import writing
from ..storage.output_places import check_output_file
from ..storage.staging import output_file
from .command import run_on_ranks
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
    """Write what the request asks for; the exit code. ``words`` and ``status``: those of ``run_on_ranks``.

    ``write`` gets text or, for several prompts, lines of JSON, unless these go into the file ``out``, where
    ``force`` replaces what another command wrote; ``note`` the figures at the end.
    """
    read = (request.source, request.tokenizer, request.adapter)
    inputs = [Path(name) for name in read if name is not None]
    if out is not None:
        check_output_file(out, ours=_is_ours, force=force, inputs=inputs)

    def work(prepared: Prepared, state: ParallelState, device: str) -> str:
        first = own_rank() == 0
        with _open(out, inputs, force) if out is not None and first else nullcontext() as file:
            stream = _text_of_one(request, prepared, write) if first and file is None else None
            on_row = _rows(request, file, write) if first and stream is None else None
            done = continue_prompts(request, prepared, state, on_text=stream, on_row=on_row)
            if stream is not None:
                write("\n")
        return f"{done} on {device_words(device)}"

    prepared, asked = partial(prepare, request, layout), sha256(repr(request).encode()).hexdigest()
    return run_on_ranks(
        layout, prepared, work, asked=asked, words=words, note=note, device=device, status=status
    )


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
