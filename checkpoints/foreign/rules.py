"""Say which foreign tensor is which tensor of Hugging Face: tables of names and cuts, as data.

A table is a TOML file. Those of well-known projects lie beside this file, as ``titan.names.toml``; a user may
write one::

    detect = "tok_embeddings.weight"        # a tensor by which this table is chosen, if none is named

    [[rule]]
    foreign = "layers.{i}.attention.wq.weight"
    hf = "model.layers.{i}.self_attn.q_proj.weight"
    interleaved = "num_attention_heads"     # the two halves of a head's rotated rows take turns
    only = ["llama"]                        # for these model types; default: all

The rules are those of the families' tables (see ``Rule``), with Hugging Face's tensors in the place of ours.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from ...models import Link, ModelConfig, Rule, links_of
from ...models.patterns import checked, compiled
from ...parallel_state import BadInput, from_validation, require
from ...storage.small_files import read_toml
from ...storage.strict_json import StrictRecord
from .checkpoint import ForeignCheckpoint

_TABLES = Path(__file__).parent
_ENDING = ".names.toml"
Shape = tuple[int, ...]


class Table(StrictRecord):
    """Hold the rules of one way to name tensors, and ``detect``, a tensor by which it is recognised.

    ``prefix``: what precedes every foreign name in some checkpoints. ``ignored``: patterns (regular
    expressions for the whole name) of foreign tensors that are no weights, such as rotary frequencies.
    Without a ``rule`` the names are Hugging Face's.
    """

    rule: list[Rule] = Field(default_factory=list)
    detect: str = ""
    prefix: str = ""
    ignored: list[str] = Field(default_factory=list)

    def ignores(self, name: str) -> bool:
        """Tell whether a pattern of ``ignored`` fits the whole name of a foreign tensor."""
        return any(compiled(pattern).find("fullmatch", name) for pattern in self.ignored)

    def links(
        self,
        model_type: str,
        hf: Mapping[str, Shape],
        config: ModelConfig,
        foreign: Mapping[str, Shape] | None = None,
        where: object = "names",
    ) -> list[Link]:
        """Return the links from Hugging Face's tensors to the foreign ones.

        ``hf`` and ``foreign``: all tensors with their shapes; without ``foreign`` the links are those of a
        checkpoint that is to be written. Rules for tensors that the model does not have give nothing.
        ``BadInput`` names ``where`` (the foreign checkpoint) and a rule whose two sides differ in shape, or
        that ties several foreign tensors to one that is to be written: it does not say where to cut.
        """
        return [
            link
            for rule in self.rule
            if not rule.only or model_type in rule.only
            for block in (range(config.num_hidden_layers) if "i" in rule.numbers else (None,))
            for link in links_of(rule, block, hf, config, stored=foreign, prefix=self.prefix, where=where)
        ]


def table_named(name: str) -> Table:
    """Return the table that comes with trilith under this name, or the one in a TOML file of this path."""
    tables = known_tables()
    path = tables.get(name, Path(name))
    expected = f"{', '.join(tables)}, or a TOML file of rules"
    require(name in tables or path.suffix == ".toml", "convert", "--names", expected, repr(name))
    try:
        table = Table.model_validate(read_toml(path))
    except ValidationError as error:
        raise from_validation(path, error) from None
    for pattern in table.ignored:
        checked(pattern, path, "ignored")
    return table


def known_tables() -> dict[str, Path]:
    """Return the tables that come with trilith, by name."""
    return {path.name.removesuffix(_ENDING): path for path in sorted(_TABLES.glob(f"*{_ENDING}"))}


def choose_table(checkpoint: ForeignCheckpoint, names: str | None, own: Iterable[Collection[str]]) -> Table:
    """Return the table of names: the one asked for, the format's own, one without rules if names of ``own``
    are there (those of Hugging Face's files, those of transformers' modules), or a known one whose ``detect``
    is there. ``BadInput`` if none of these fits.
    """
    name = names or checkpoint.names
    named = Table() if name is None else table_named(name)
    if named.rule:
        return named
    weights = {name for name in checkpoint.tensors if not named.ignores(name)}
    for names_of_model in own:
        if (prefix := prefix_of(names_of_model, weights, checkpoint.path)) is not None:
            return named.model_copy(update={"prefix": prefix})
    for table_name in known_tables():
        table = table_named(table_name)
        if table.detect and table.prefix + table.detect in checkpoint.tensors:
            return table.model_copy(update={"ignored": table.ignored + named.ignored})
    first_names = ", ".join(sorted(checkpoint.tensors)[:3])
    todo = f"Say --names with one of {', '.join(known_tables())}, or with a TOML file of rules"
    expected = "Hugging Face's names or those of a known table"
    raise BadInput(checkpoint.path, "names", expected=expected, found=f"{first_names}, ...", todo=todo)


def prefix_of(names: Collection[str], stored: Collection[str], where: object) -> str | None:
    """Return the prefix of these names, of which the embedding's is the first, among the stored ones, or
    ``None``. With the right prefix most of one side are on the other.

    ``BadInput`` for two models under two prefixes, such as one and its moving average.
    """
    if not names:
        return None
    first, fitting = next(iter(names)), list[str]()
    for prefix in sorted((name.removesuffix(first) for name in stored if name.endswith(first)), key=len):
        below = sum(name.startswith(prefix) for name in stored)
        if sum(prefix + name in stored for name in names) * 2 > min(len(names), below):
            fitting.append(prefix)
    if fitting[1:]:
        models = f"{len(fitting)}: {' and '.join(prefix + first for prefix in fitting)}"
        todo = f"Leave one out, --names with a .toml file: ignored = ['{re.escape(fitting[-1])}.*'], say"
        raise BadInput(where, "names", expected="one model", found=models, todo=todo)
    return fitting[0] if fitting else None
