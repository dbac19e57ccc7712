"""``trilith verify DIR``."""

from typing import Annotated, Literal

from ..system import counted, require
from .shared.options import CONFIG, IMPLEMENTATION, NAMES, Strict
from .shared.parameters import As, Place
from .shared.say import byte_progress, say


def verify(
    source: Annotated[
        Place, As("DIR_OR_TOKENS"), "checkpoint (any project's), run, Hugging Face folder, token file, URL"
    ],
    *,
    config: Annotated[Place | None, CONFIG] = None,
    names: Annotated[str | None, NAMES] = None,
    implementation: Annotated[Literal["auto", "transformers"], IMPLEMENTATION] = "auto",
    strict: Strict = False,
) -> None:
    """Check every byte of a checkpoint, a Hugging Face folder or a token file.

    A checkpoint is compared with its checksums, and copies of one tensor with each other. A Hugging Face
    folder must hold every tensor that its config asks for, and finite numbers only; so must a checkpoint of
    another project, whose own checksums are compared too. A token file is compared
    with the hashes in its index; name it by its prefix or by any of its files. The files at a URL are copied
    into the cache of this host, unless it has a copy of this version, and the copy is checked. The exit code
    is 4 for a damaged checkpoint and 2 for anything else that is wrong.

    Examples:

        trilith verify run
        trilith verify Llama-3.2-1B
        trilith verify tokens
        trilith verify s3://bucket/run
    """
    from ..data.token_file import names_tokens

    if names_tokens(source):
        chosen = None if implementation == "auto" else implementation
        for option, value in (("--config", config), ("--names", names), ("--implementation", chosen)):
            todo = "Leave it out: it is for weights"
            require(value is None, "verify", option, "none with a token file", value, todo)
        verify_tokens(source)
        return
    from ..checkpoints import check_model, read_source
    from ..checkpoints import verify as check
    from ..checkpoints.verify import verify_weights
    from ..runs.report.record import check_step
    from ..system.addresses import as_url

    weights = read_source(source, config=config, names=names, implementation=implementation, compare=False)
    for warning in weights.warnings:
        say(f"warning: {warning}", err=True)
    manifest = weights.manifest
    if manifest is None:
        total = sum(tensor.nbytes for tensor in weights.catalog.values())
    else:
        total = sum(file.size for file in manifest.files)
    with byte_progress(f"{weights.path}", total) as advance:
        if manifest is not None:
            check_model(weights)
            check_step(weights.path, manifest.step)
            check(weights.path, manifest, progress=advance)
        else:
            verify_weights(weights, progress=advance)
    url = as_url(source)
    where = f"{weights.path}" if url is None else f"{url}, copied to {weights.path}"
    say(f"{where}: complete and unaltered" if manifest else f"{where}: complete and finite")


def verify_tokens(source: str) -> None:
    """Read a whole token file and say what was compared."""
    from ..data.token_file import TokenFile
    from ..data.token_index import TokenPaths
    from ..system.addresses import as_url

    name = TokenPaths.of(source).name
    file = TokenFile.open(name)
    index = file.index
    total = file.tokens.nbytes + (0 if file.targets is None else file.targets.nbytes)
    with byte_progress(f"{name}", total) as advance:
        file.verify(advance)
    say(f"{index.sha256}  {name.name}.bin")
    say(f"{index.documents_sha256}  {name.name}.docs.npy")
    if index.targets is not None:
        say(f"{index.targets.sha256}  {name.name}.targets")
    learnt = "" if index.targets is None else f", {index.targets.tokens:,} of them to learn"
    place = as_url(name) or name
    say(
        f"{place}: complete and unaltered: {index.tokens:,} ids below {index.vocab_size:,}{learnt}, "
        f"{counted(index.documents, 'document')}, SHA-256 of every file, the index's seal"
    )
