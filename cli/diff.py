"""``trilith diff A B``."""

from typing import Annotated

import typer

from ..system import BadInput
from .shared.options import CONFIG, NAMES
from .shared.parameters import Place, Range, check_weights_there
from .shared.say import say


def diff(
    a: Annotated[Place, "Hugging Face folder, checkpoint, or a run's folder"],
    b: Annotated[Place, "folder to compare with, in any form and any layout"],
    *,
    most: Annotated[int, Range(1, 10**6), "largest number of differing tensors to print"] = 20,
    config: Annotated[Place | None, CONFIG] = None,
    names: Annotated[str | None, NAMES] = None,
) -> None:
    """Compare the weights of two folders tensor by tensor.

    Between two runs the optimizer moments are compared too. The exit code is 1 if the folders differ.

    Examples:

        trilith diff run-a run-b
        trilith diff run Llama-3.2-1B --most 5
    """
    for folder in (a, b):
        check_weights_there(folder, "a Hugging Face folder or a checkpoint")
    from itertools import islice

    from ..checkpoints import differences, foreign_format, read_source, verify
    from ..checkpoints.verify import checksum_of, verify_sums
    from ..models import implementation_of

    reading = {path: (config, names) if foreign_format(path) else (None, None) for path in (a, b)}
    if (config or names) and not any(map(any, reading.values())):
        expected = "a checkpoint of another project among the two"
        raise BadInput("diff", "--config, --names", expected=expected, found="none")
    first = read_source(a, config=reading[a][0], names=reading[a][1])
    way = implementation_of(first.config)
    second = read_source(
        b, module=first.module, config=reading[b][0], names=reading[b][1], implementation=way
    )
    if (other := implementation_of(second.config)) != way:  # a Hugging Face folder has the names of either
        first = read_source(a, config=reading[a][0], names=reading[a][1], implementation=other)
    for source in (first, second):
        if source.manifest is not None:
            verify(source.path, source.manifest, files=source.files)
            continue
        for file in source.files:
            verify_sums(file, checksum_of(file))
    differing = list(islice(differences(first, second), most + 1))
    for difference in differing[:most]:
        largest = f"max abs {difference.absolute:.3g}, max rel {difference.relative:.3g}"
        figures = f"  {difference.elements:,} elements, {largest}" if difference.elements else ""
        say(f"{difference.name}: {difference.what}{figures}")
    if len(differing) > most:
        say("... and more (--most)")
    if differing:
        raise typer.Exit(1)
    say("equal, bit for bit")
