"""Open the token files of a run, for training and for evaluation, and name the places out of its reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.batches import GlobalBatches, Mixture
from ..data.text.tokenizer_loading import fingerprint_of_folder
from ..data.token_file import TokenFile
from ..data.token_index import check_vocabulary
from ..parallel_state import BadInput, MachineFailed
from ..recipes.recipe import Recipe
from ..storage import companions_in
from ..storage.output_places import check_home
from ..storage.remote_folder import RemoteFolder


@dataclass(frozen=True)
class HeldOut:
    """Hold the held-out data's batches; only the first ``samples`` rows of the first batch count."""

    batches: GlobalBatches
    samples: int


def open_data(recipe: Recipe) -> GlobalBatches:
    """Open the run's batches; ``BadInput`` for what the token files cannot give."""
    data = recipe.data
    return _open(recipe, data.tokens, data.weights, data.global_batch)


def open_held_out(recipe: Recipe, vocab_size: int) -> HeldOut | None:
    """Open the held-out data, cut and packed as the recipe's training data; ``None`` without evaluation.

    ``BadInput`` for what the files cannot give, or for ids that the model has no rows for.
    """
    section = recipe.evaluation
    if section is None:
        return None
    rows = _open(recipe, section.tokens, None, 1)
    check_vocabulary(rows.vocab_size, vocab_size, "recipe: evaluation.tokens")
    samples, ranks = min(section.samples, rows.samples), recipe.layout.data
    return HeldOut(rows.resized(-(-samples // ranks) * ranks), samples)


def out_of_reach(recipe: Recipe, vocab_size: int) -> list[str]:
    """Return a line for each place that a run needs and a dry run does not, if it cannot be read."""
    needs = {
        "data": lambda: open_data(recipe),
        "evaluation.tokens": lambda: open_held_out(recipe, vocab_size),
        "checkpoint.mirror": lambda: _reach(recipe.checkpoint.mirror),
    }
    missing = []
    for key, look in needs.items():
        try:
            look()
        except (BadInput, MachineFailed) as error:
            missing.append(f"{key}: {error}")
    return missing


def tokenizer_of(batches: GlobalBatches) -> list[Path]:
    """Return the files of the tokenizer that made the tokens: none unless the token file names a folder, as
    `trilith tokenize` lets it, and this is still there with the same ids.
    """
    file = batches.files[0]
    folder = file.path.parent / file.index.tokenizer
    try:
        same = file.index.tokenizer and fingerprint_of_folder(folder) == file.index.tokenizer_fingerprint
        return companions_in(folder) if same else []
    except (BadInput, OSError):  # what lies there now is no tokenizer
        return []


def _reach(mirror: str | None) -> None:
    """List a mirror's folder; ``BadInput`` or ``MachineFailed`` says why it can be none."""
    if mirror is None:
        return
    folder = RemoteFolder(mirror)
    if folder.local is not None:
        check_home(folder.local / "checkpoint")
    folder.sizes()


def _open(
    recipe: Recipe, tokens: str | Sequence[str], weights: list[float] | None, global_batch: int
) -> GlobalBatches:
    names = [tokens] if isinstance(tokens, str) else tokens
    files = [TokenFile.open(Path(name)) for name in names]
    if weights is not None and len(weights) != len(files):
        raise BadInput("recipe", "data.weights", expected=f"{len(files)} numbers, one a file", found=weights)
    source: TokenFile | Mixture = files[0]
    if len(files) > 1:
        source = Mixture(list(zip(files, weights or [float(len(f.tokens)) for f in files], strict=True)))
    return GlobalBatches(
        source,
        recipe.data.sequence_length,
        global_batch,
        recipe.seed,
        documents=recipe.data.documents,
        samples=recipe.data.samples,
        overlong=recipe.data.overlong,
    )
