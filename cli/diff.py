"""``trilith diff A B``."""

from typing import Annotated, Literal

import typer

from ..system import BadInput, require
from .shared.options import CONFIG, IMPLEMENTATION, NAMES
from .shared.parameters import Place, Range
from .shared.say import say


def diff(
    a: Annotated[Place, "Hugging Face folder, checkpoint, or a run's folder"],
    b: Annotated[Place, "folder to compare with, in any form and any layout"],
    *,
    most: Annotated[int, Range(1, 10**6), "largest number of differing tensors to print"] = 20,
    config: Annotated[Place | None, CONFIG] = None,
    names: Annotated[str | None, NAMES] = None,
    implementation: Annotated[Literal["auto", "transformers"], IMPLEMENTATION] = "auto",
) -> None:
    """Compare the weights of two folders tensor by tensor.

    Between two runs the optimizer moments are compared too. The exit code is 1 if the folders differ.

    Examples:

        trilith diff run-a run-b
        trilith diff run Llama-3.2-1B --most 5
    """
    from itertools import islice

    from ..checkpoints import Source, differences, foreign_format, read_source, verifying
    from ..models import implementation_of

    reading = {path: (config, names) if foreign_format(path) else (None, None) for path in (a, b)}
    fits = (not config and not names) or any(map(any, reading.values()))
    require(fits, "diff", "--config, --names", "a checkpoint of another project among the two", "none")

    def opened(path: str, like: Source | None = None) -> Source:
        """Open a folder; a Hugging Face folder as the other one says, a checkpoint as it says itself."""
        module, by = (None, implementation) if like is None else (like.module, implementation_of(like.config))
        at, table = reading[path]
        return read_source(path, module=module, config=at, names=table, implementation=by)

    try:
        first = opened(a)
    except BadInput as refused:
        try:
            first = opened(a, like=opened(b))
        except BadInput:
            raise refused from None
    second = opened(b, like=first)
    if implementation_of(second.config) != implementation_of(first.config):
        first = opened(a, like=second)
    with verifying(first) as checksums, verifying(second) as others:
        differing = list(islice(differences(first, second, {**checksums, **others}), most + 1))
    for difference in differing[:most]:
        largest = f"max abs {difference.absolute:.3g}, max rel {difference.relative:.3g}"
        figures = f"  {difference.elements:,} elements, {largest}" if difference.elements else ""
        say(f"{difference.name}: {difference.what}{figures}")
    if len(differing) > most:
        say("... and more (--most)")
    if differing:
        raise typer.Exit(1)
    say("equal, bit for bit")
