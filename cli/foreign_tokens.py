"""Carry out ``trilith tokenize --from``: token files around the token ids of other programs."""

from enum import StrEnum
from pathlib import Path

import typer

from .shared.say import counted, say

#: The parameters of ``trilith tokenize`` that mean something where nothing is tokenized.
_MEANT = {"inputs", "tokenizer", "out", "origin", "quiet"}


class Origin(StrEnum):
    """Say which program wrote the token ids."""

    megatron = "megatron"
    datatrove = "datatrove"


def index_files(
    context: typer.Context, inputs: list[Path], tokenizer: Path, out: Path, origin: Origin, *, quiet: bool
) -> None:
    """Write an index for each file of ``inputs``, and print the recipe's lines for more than one."""
    from ..data.datatrove import datatrove_files, read_datatrove
    from ..data.foreign_tokens import index_tokens
    from ..data.megatron import parse_blend, read_megatron
    from ..data.text.tokenizer_loading import load_tokenizer
    from ..parallel_state import BadInput
    from ..recipes.toml_text import to_toml
    from .shared.progress import byte_progress

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _MEANT and source is not None and source.name == "COMMANDLINE":
            expected = "no option that says how to tokenize: the tokens are there"
            raise BadInput("tokenize", "--from", expected=expected, found=parameter.opts[0])
    weights: list[float] | None = None
    if origin is Origin.megatron:
        prefixes, weights = parse_blend([str(path) for path in inputs], "tokenize")
        files = [read_megatron(Path(prefix)) for prefix in prefixes]
    else:
        files = [read_datatrove(file) for path in inputs for file in datatrove_files(path)]
    loaded = load_tokenizer(tokenizer)
    names = [out] if len(files) == 1 else [out / foreign.path.stem for foreign in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(
            "tokenize", "INPUT", expected="files with different names", found=f"two called {twice.name}",
            todo="Give each its own --out",
        )  # fmt: skip
    for name, foreign in zip(names, files, strict=True):
        with byte_progress(str(name), 0 if quiet else foreign.size) as advance:
            file = index_tokens(
                foreign,
                name,
                vocab_size=loaded.vocab_size,
                eos_id=loaded.eos_id,
                bos_id=loaded.bos_id,
                tokenizer_fingerprint=loaded.fingerprint,
                on_progress=advance,
            )
        index = file.index
        start = "no start token" if index.bos_id is None else f"the start token, id {index.bos_id}"
        documents = counted(index.documents, "document")
        say(
            f"{name}: {index.tokens:,} tokens in {documents}, {index.dtype}, which stay in "
            f"{foreign.path}; the documents have {start}"
        )
    if len(names) > 1:
        say(f"[data]\ntokens = {to_toml([str(name) for name in names])}")
        if weights is not None:
            say(f"weights = {to_toml(weights)}")
