"""Open the token files of a run, for training and for evaluation, and name the places out of its reach."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.batches import GlobalBatches
from ..data.items import ItemBatches
from ..data.text.tokenizer_identity import give_the_same_ids
from ..data.text.tokenizer_loading import fingerprint_of_folder, load_tokenizer
from ..data.token_file import TokenFile
from ..data.token_index import check_vocabulary
from ..parallel_state import BadInput, MachineFailed, require
from ..recipes.recipe import Recipe
from ..recipes.sections import DataSection, EvaluationSection
from ..storage import VOCABULARIES, companions_in
from ..storage.output_places import check_home
from ..storage.remote_folder import RemoteFolder
from ..system import counted
from .own_code import call_own, own_code

#: What to change in a recipe for a model that cannot keep the documents of a row apart.
_ONE_DOCUMENT = 'Set data.documents = "joined", or for chat data data.samples = "single"'


@dataclass(frozen=True)
class HeldOut:
    """Hold the held-out data's batches; only the first ``samples`` rows of the first batch count."""

    batches: GlobalBatches | ItemBatches
    samples: int


def open_data(recipe: Recipe) -> GlobalBatches | ItemBatches:
    """Open the run's batches; ``BadInput`` for what the token files, or the user's data sets, cannot give."""
    return _opened(recipe, recipe.data, "data", recipe.data.weights, recipe.data.global_batch)


def open_held_out(recipe: Recipe, vocab_size: int) -> HeldOut | None:
    """Open the held-out data, cut and packed as the recipe's training data; ``None`` without evaluation.

    ``BadInput`` for what the files cannot give, or for ids that the model has no rows for.
    """
    section = recipe.evaluation
    if section is None:
        return None
    unit = recipe.layout.data * (1 if recipe.loss is None else recipe.data.micro_batch)
    rows = _opened(recipe, section, "evaluation", None, 1)
    if isinstance(rows, GlobalBatches):
        check_vocabulary(rows.vocab_size, vocab_size, "recipe: evaluation.tokens")
    samples = min(section.samples, rows.samples)
    if recipe.loss is not None:  # it would count rows that fill up the last one
        size = counted(rows.samples, "row" if isinstance(rows, GlobalBatches) else "item")
        expected = f"a multiple of data x micro_batch = {unit}, of {size}"
        require(samples % unit == 0, "recipe", "evaluation.samples", expected, samples)
    elif isinstance(rows, GlobalBatches):
        check_labels(rows, samples, "recipe", "evaluation.samples")
    return HeldOut(rows.resized(-(-samples // unit) * unit), samples)


def separate_padding(model: Any, *opened: object) -> None:
    """Take padding for a document of its own, for a model whose angles depend on the length of a document."""
    for batches in opened:
        if isinstance(batches, GlobalBatches):
            changes = getattr(model, "rope_changes_at", ())
            if any(length < batches.sequence_length for length in changes):
                batches.separate_padding()


def check_labels(batches: GlobalBatches, rows: int, where: str, key: str) -> None:
    """Refuse first rows without a label that counts: their mean loss, of nothing, would look perfect."""
    expected, todo = "rows with a token to learn", "Take more rows, or longer ones, which cut off less"
    none = f"none in {counted(rows, 'row')} of {batches.sequence_length} tokens"
    require(batches.resized(rows).count_labels(0, range(rows)), where, key, expected, none, todo)


def check_documents(
    batches: GlobalBatches | ItemBatches,
    model: Any,
    where: str,
    key: str,
    todo: str = _ONE_DOCUMENT,
    *,
    first: range | None = None,
) -> None:
    """Refuse rows of several documents for a model that would let each see the others: transformers', with
    attention of its own. ``first``: those of the first step that are computed; default: all rows.
    """
    if isinstance(batches, GlobalBatches) and not model.can_cache and batches.shared(first):
        expected = f"one document a row: {model.shown.no_context}"
        raise BadInput(where, key, expected=expected, found="rows of several", todo=todo)


def within_reach(
    recipe: Recipe, vocab_size: int
) -> tuple[GlobalBatches | ItemBatches | None, HeldOut | None, list[str]]:
    """Return the run's batches and held-out data, ``None`` if they cannot be opened here, and a line for each
    place that a run needs and a dry run does not, if it cannot be read.
    """
    needs: dict[str, Callable[[], Any]] = {
        "data": lambda: open_data(recipe),
        "evaluation.tokens": lambda: open_held_out(recipe, vocab_size),
        "checkpoint.mirror": lambda: _reach(recipe.checkpoint.mirror),
    }
    missing, opened = [], dict[str, Any]()
    for key, look in needs.items():
        try:
            opened[key] = look()
        except (BadInput, MachineFailed) as error:
            missing.append(f"{key}: {error}")
    return opened.get("data"), opened.get("evaluation.tokens"), missing


def tokenizer_of(batches: GlobalBatches | ItemBatches) -> list[Path]:
    """Return the files of the tokenizer that made the tokens: none unless the token file names a folder, as
    `trilith tokenize` lets it, and this is still there with the same ids.
    """
    if isinstance(batches, ItemBatches):
        return []
    folder = _tokenizer_beside(batches.files[0])
    try:
        return [] if folder is None else companions_in(folder)
    except (BadInput, OSError):
        return []


def _tokenizer_beside(file: TokenFile) -> Path | None:
    """Return the folder that a token file names, if it still has the tokenizer that made the tokens."""
    folder = file.path.parent / file.index.tokenizer
    try:
        same = file.index.tokenizer and fingerprint_of_folder(folder) == file.index.tokenizer_fingerprint
    except (BadInput, OSError):  # what lies there now is no tokenizer
        return None
    return folder if same else None


def check_tokenizer(batches: GlobalBatches | ItemBatches, folder: Path, key: str) -> None:
    """Refuse tokens of another tokenizer than the model's, which is in ``folder``: its ids mean other words.

    Where either is unknown nothing is compared. Files of other bytes are read, where those of the tokens
    are still there: a tokenizer that was saved again gives the same ids.
    """
    names = [name for name in VOCABULARIES if (folder / name).exists()]
    if not names or isinstance(batches, ItemBatches):
        return
    for file in batches.files:
        made_by, fingerprint = file.index.tokenizer_fingerprint, fingerprint_of_folder(folder)
        if not made_by or made_by == fingerprint:
            continue
        # By itself a tokenizer.model gives the ids of its folder.
        if "tokenizer.model" in names and made_by == load_tokenizer(folder / "tokenizer.model").fingerprint:
            continue
        folder_named = _tokenizer_beside(file)
        if folder_named is not None and give_the_same_ids(folder, folder_named):
            continue
        expected = f"tokens of the model's tokenizer, {folder} ({fingerprint[:12]})"
        other = f"those of another one, {file.index.tokenizer or 'unnamed'} ({made_by[:12]})"
        todo = f"Tokenize the text with --tokenizer {folder}. If both give the same ids, put the "
        todo += "tokenizer's files of the tokens in place of the model's"
        raise BadInput(key, file.path, expected=expected, found=other, todo=todo)


def _reach(mirror: str | None) -> None:
    """List a mirror's folder; ``BadInput`` or ``MachineFailed`` says why it can be none."""
    if mirror is None:
        return
    folder = RemoteFolder(mirror)
    if folder.local is not None:
        check_home(folder.local / "checkpoint")
    folder.sizes()


def _opened(
    recipe: Recipe,
    section: DataSection | EvaluationSection,
    key: str,
    weights: list[float] | None,
    global_batch: int,
) -> GlobalBatches | ItemBatches:
    """Open a section's batches: of token files, or of the user's data sets, which are made."""
    length, seed, data = recipe.data.sequence_length, recipe.seed, recipe.data
    names_or_name = section.tokens if section.module is None else section.module
    assert names_or_name is not None
    names = [names_or_name] if isinstance(names_or_name, str) else names_or_name
    if section.module is None:
        files = [TokenFile.open(Path(name)) for name in names]
        mixture = list(zip(files, weights or [float(len(file.tokens)) for file in files], strict=True))
        return GlobalBatches(
            mixture if len(files) > 1 else files[0], length, global_batch, seed,
            documents=data.documents, samples=data.samples, overlong=data.overlong,
        )  # fmt: skip
    arguments = section.arguments
    keywords_of = arguments if isinstance(arguments, list) else [arguments] * len(names)
    sources = []
    for name, keywords in zip(names, keywords_of, strict=True):
        code = own_code(name, f"{key}.module")
        expected, kind = "a class, or a function that makes a data set", type(code.entry).__name__
        require(callable(code.entry), "recipe", f"{key}.module", expected, kind)
        source = call_own(code, keywords, f"{key}.arguments", within=f"{key}.module")
        called = json.dumps(keywords, sort_keys=True, default=str)
        sources.append((source, f"{name.rpartition(':')[2]}({called}) of a file with SHA-256 {code.digest}"))
    return ItemBatches(sources, weights, length, global_batch, seed, key=f"{key}.module")
