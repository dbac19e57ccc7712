"""``trilith new --model M --data TOKENS --gpus N``."""

from pathlib import Path
from typing import Annotated

from .shared.options import FORCE, GPU_TYPE, USUAL_GPU, size_names
from .shared.parameters import As, MaybeCount, Range, There, from_options
from .shared.say import say, say_next


def new(
    *,
    model: Annotated[
        str, There, "Hugging Face folder, or published size or config.json to start from scratch", size_names
    ],
    data: Annotated[Path, As("TOKENS"), "token file of `trilith tokenize`"],
    gpus: Annotated[int, Range(1, 2**20), "number of GPUs"],
    gpu_type: Annotated[str, GPU_TYPE] = USUAL_GPU,
    sequence_length: Annotated[
        MaybeCount, "tokens of a row; default: the most that the model takes, up to 8192; less for few tokens"
    ] = None,
    global_batch: Annotated[MaybeCount, "rows of a step; default: 4 Mi tokens; less for few tokens"] = None,
    steps: Annotated[MaybeCount, "number of steps; default: once over the tokens"] = None,
    lora: Annotated[MaybeCount, "train LoRA adapters of this rank"] = None,
    out: Annotated[Path, As("RECIPE.toml"), "recipe to write"] = Path("recipe.toml"),
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Write a commented recipe for a model, a token file and a number of GPUs.

    The layout is the one that `trilith plan` finds; `trilith train RECIPE --dry-run` accepts the recipe.
    Change what you like in the file: it is yours.

    Examples:

        trilith new --model llama-3.2-1b --data tokens --gpus 8
        trilith new --model Llama-3.2-1B --data sft --gpus 1 --lora 16 --out lora.toml
    """
    options = locals()
    from ..data.token_index import TokenPaths
    from ..planner.search.chosen_recipes import new_recipe
    from ..planner.time import machine_named
    from ..storage.output_places import check_output_file
    from ..storage.staging import output_file

    read = [Path(model), *TokenPaths.of(data).all]
    check_output_file(out, force=force, inputs=read)
    machine = machine_named(gpu_type.lower())
    text, search = from_options(new_recipe, options, tokens=data, machine=machine)
    with output_file(out, force=force, inputs=read) as path:
        path.write_text(text, encoding="utf-8")
    best = search.best[0]
    say(f"wrote {out}: {best.choice}, {best.bytes / 1e9:.1f} GB of a GPU")
    say_next(["train", out, "--dry-run"], ["train", out])
