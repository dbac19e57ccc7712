"""``trilith recipe from-deepspeed|from-trainer|from-megatron FILE``."""

from pathlib import Path
from typing import Annotated, Literal

from ..system import BadInput
from .shared.options import FORCE
from .shared.parameters import As, MaybeCount, check_there
from .shared.say import say


def recipe(
    origin: Annotated[
        Literal["from-deepspeed", "from-trainer", "from-megatron"],
        "from-deepspeed (ds_config.json), from-trainer (Hugging Face's training_args.json) or "
        "from-megatron (a log of Megatron-LM, or stored arguments as JSON)",
    ],
    file: Annotated[Path, "configuration of the other trainer"],
    words: Annotated[list[str] | None, "from-megatron: words of torchrun, after --, in FILE's place"] = None,
    *,
    ranks: Annotated[MaybeCount, "number of processes that train; the file rarely says it"] = None,
    out: Annotated[Path | None, As("RECIPE.toml"), "file for the recipe; default: print it"] = None,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Translate a DeepSpeed, Hugging Face or Megatron configuration into a recipe.

    Settings that have no counterpart are listed with the reason, on stderr and at the end of the recipe.
    Settings that the file does not have, such as the model and the tokens, are marked FILL IN; give them in
    the recipe or on the command line of trilith train. training_args.json is the output of
    TrainingArguments.to_json_string(); the DeepSpeed configuration that it names is read too. Megatron
    prints its arguments at the start of its log. To read a script instead, put trilith recipe from-megatron
    and -- in the place of its torchrun, and run it: the shell gives the words.

    Examples:

        trilith recipe from-deepspeed ds_config.json --ranks 8 --out recipe.toml
        trilith recipe from-trainer training_args.json --ranks 8 --out recipe.toml
        trilith recipe from-megatron train.log --out recipe.toml
        trilith recipe from-megatron --out recipe.toml -- --nproc_per_node 8 pretrain_gpt.py --num-layers 32
    """
    if not words:
        check_there(file, "a configuration of another trainer")
    from ..recipes.foreign.from_deepspeed import from_deepspeed
    from ..recipes.foreign.from_megatron import from_megatron
    from ..recipes.foreign.from_trainer import from_trainer
    from ..recipes.foreign.megatron_arguments import COMMAND, arguments_of, read_arguments
    from ..storage.output_places import check_output_file
    from ..storage.small_files import read_json
    from ..storage.staging import output_file

    if out is not None:
        check_output_file(out, force=force)
    if words and origin != "from-megatron":
        raise BadInput("recipe", "WORDS", expected=f"none with {origin}", found=repr(" ".join(words))[:60])
    if words:
        translation = from_megatron(arguments_of([str(file), *words]), COMMAND, ranks=ranks)
    elif origin == "from-megatron":
        translation = from_megatron(read_arguments(file), str(file), ranks=ranks)
    else:
        translate = from_deepspeed if origin == "from-deepspeed" else from_trainer
        translation = translate(read_json(file), str(file), ranks=ranks)
    if out is None:
        say(translation.toml(), nl=False)
    else:
        with output_file(out, force=force) as path:  # its user has edited an earlier one: never replaced
            path.write_text(translation.toml(), encoding="utf-8")
    for line in translation.missed:
        say(f"not mapped: {line}", err=True)
    for key, why in translation.blanks.items():
        say(f"fill in: {key}: {why}", err=True)
