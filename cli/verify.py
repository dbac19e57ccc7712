"""``trilith verify DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(
    source: Annotated[
        Path, typer.Argument(help="a checkpoint, a run's folder, or a Hugging Face folder", metavar="DIR")
    ],
) -> None:
    """Read every byte: checksums and replicas of a checkpoint, or all tensors of a Hugging Face folder.

    Prints the SHA-256 of each file of weights. Exit code 4 for a checkpoint that is not what was written, 2
    for a folder that does not hold what its config says, or numbers that are not finite.
    """
    import hashlib

    from ..checkpoints import read_source
    from ..checkpoints import verify as check
    from ..parallel_state import Box
    from .progress import byte_progress

    found = read_source(source)
    total = sum(file.size for file in found.files)
    with byte_progress(f"{found.path}", total) as advance:
        if found.manifest is not None:
            check(found.path, found.manifest, progress=advance)
        else:
            for name, whole in found.catalog.items():
                box = Box.whole(whole.shape)
                advance(found.read(name, box, found.tie(to_hf=True)).nbytes)
    for file in found.files:
        with file.path.open("rb") as opened:
            typer.echo(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.path.name}")
    typer.echo(
        f"{found.path}: complete and unaltered" if found.manifest else f"{found.path}: complete and finite"
    )
