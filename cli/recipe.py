"""``trilith recipe from-deepspeed|from-trainer FILE.json``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import FORCE
from .say import say


class Origin(StrEnum):
    """Whose configuration is read."""

    deepspeed = "from-deepspeed"
    trainer = "from-trainer"


def recipe(
    origin: Annotated[
        Origin, typer.Argument(help="DeepSpeed's ds_config.json, or Hugging Face's training_args.json")
    ],
    file: Annotated[Path, typer.Argument(help="the configuration", metavar="FILE.json")],
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="processes that train; the files rarely say")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="write the recipe there; default: print it", metavar="RECIPE.toml"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
) -> None:
    """Make a recipe of another trainer's configuration.

    What could not be mapped is listed, a line each with the reason, on stderr and at the end of the recipe.
    What the file does not say (model, tokens) is left to fill in, there or on the command line: trilith train
    RECIPE.toml model.init_from=Llama-3.2-1B data.tokens=tokens data.sequence_length=2048. training_args.json
    is what TrainingArguments.to_json_string() gives; a DeepSpeed configuration that it names is read with it.
    """
    from ..recipes.foreign.from_deepspeed import from_deepspeed
    from ..recipes.foreign.from_trainer import from_trainer
    from ..storage.output_file import check_output_file, output_file
    from ..storage.small_files import read_json

    if out is not None:
        check_output_file(out, force=force)
    translate = from_deepspeed if origin is Origin.deepspeed else from_trainer
    found = translate(read_json(file), str(file), ranks=ranks)
    if out is None:
        say(found.toml(), nl=False)
    else:
        with output_file(out, force=force) as path:  # its user has edited an earlier one: never replaced
            path.write_text(found.toml(), encoding="utf-8")
    for line in found.missed:
        say(f"not mapped: {line}", err=True)
    for key, why in found.blanks.items():
        say(f"fill in: {key}: {why}", err=True)
