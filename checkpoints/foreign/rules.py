"""Say which foreign tensor is which tensor of Hugging Face: tables of names and cuts, as data.

A table is a TOML file. Those of well-known projects lie beside this file, as ``titan.names.toml``; a user may
write one::

    detect = "tok_embeddings.weight"        # a tensor by which this table is chosen, if none is named

    [[rule]]
    foreign = "layers.{i}.attention.wq.weight"
    hf = "model.layers.{i}.self_attn.q_proj.weight"
    interleaved = "num_attention_heads"     # the two halves of a head's rotated rows take turns
    only = ["llama"]                        # for these model types; default: all

``{i}`` is a block's number and ``{e}`` an expert's. A placeholder on one side only says that the other side
has one tensor for all of them, stacked along its first dim (after ``{i}``'s dim if both are). A list of names
on a side says that those tensors lie one after the other along ``dim``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from pydantic import Field, ValidationError

from ...models import ModelConfig
from ...parallel_state import BadInput, Box, from_validation
from ...storage.records import StrictRecord
from ...storage.small_files import read_toml

_TABLES = Path(__file__).parent
_ENDING = ".names.toml"
_PLACEHOLDER = re.compile(r"\{([ie])\}")
Shape = tuple[int, ...]


class Rule(StrictRecord):
    """Tie foreign tensors to tensors of Hugging Face, element for element.

    ``groups``: the config's attribute that counts equal pieces of each tensor of Hugging Face, which take
    turns in the foreign one (Megatron's ``linear_qkv``: for each key/value head its queries, its key, its
    value). ``parts``: each tensor of Hugging Face holds so many equal ones, one after the other, which take
    turns as if each had a name (GPT-2's ``c_attn``). ``dim``: where the tensors of a list lie one after the
    other. ``transpose``: the foreign matrix is the transpose. ``interleaved``: the config's attribute that
    counts the heads whose rows Hugging Face stores as two halves, and the foreign tensor as pairs (rotary
    embeddings over neighbours). ``padded``: the foreign tensor may have more rows, which are left out (a
    padded vocabulary). ``optional``: Hugging Face's tensor may also be absent; the foreign one is then left
    out (a tied output layer).
    """

    foreign: str | list[str]
    hf: str | list[str]
    groups: str = ""
    dim: int = 0
    transpose: bool = False
    interleaved: str = ""
    parts: int = 1
    padded: bool = False
    optional: bool = False
    only: list[str] = Field(default_factory=list)


class Table(StrictRecord):
    """Hold the rules of one way to name tensors, and ``detect``, a tensor by which it is recognised.

    ``prefix``: what precedes every foreign name in some checkpoints. ``ignored``: patterns (regular
    expressions for the whole name) of foreign tensors that are no weights, such as rotary frequencies.
    """

    rule: list[Rule] = Field(min_length=1)
    detect: str = ""
    prefix: str = ""
    ignored: list[str] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """Say that box ``box`` of a tensor of Hugging Face is taken from the foreign tensor ``foreign``.

    Element (i, j, ...) of the box is the foreign element ``start`` + ``steps`` * (i, j, ...), with dim d of
    the box along dim ``dims[d]`` of the foreign tensor (``None``: a dim of size 1 that it does not have).
    """

    box: Box
    foreign: str
    start: Shape
    dims: tuple[int | None, ...]
    steps: Shape

    @classmethod
    def whole(cls, foreign: str, shape: Shape) -> Piece:
        """Return the piece that is a whole tensor of this shape, as it is."""
        dims = range(len(shape))
        return cls(Box.whole(shape), foreign, (0,) * len(shape), (*dims,), (1,) * len(shape))


def table_named(name: str) -> Table:
    """Return the table that comes with trilith under this name, or the one in a TOML file of this path."""
    known = known_tables()
    path = known.get(name, Path(name))
    if name not in known and path.suffix != ".toml":
        expected = f"{', '.join(known)}, or a TOML file of rules"
        raise BadInput("convert", "--names", expected=expected, found=repr(name))
    try:
        return Table.model_validate(read_toml(path))
    except ValidationError as error:
        raise from_validation(path, error) from None


def known_tables() -> dict[str, Path]:
    """Return the tables that come with trilith, by name."""
    return {path.name.removesuffix(_ENDING): path for path in sorted(_TABLES.glob(f"*{_ENDING}"))}


def pieces(
    table: Table,
    model_type: str,
    foreign: Mapping[str, Shape],
    hf: Mapping[str, Shape],
    config: ModelConfig,
    where: object,
) -> dict[str, list[Piece]]:
    """Return, for each tensor of Hugging Face that the rules find, the pieces that it is made of.

    ``foreign`` and ``hf``: all tensors with their shapes. Rules for tensors that the model does not have give
    nothing. ``BadInput`` names ``where`` (the foreign checkpoint) and a rule whose two sides differ in shape.
    """
    pieces_by_name: dict[str, list[Piece]] = {}
    for rule in table.rule:
        if rule.only and model_type not in rule.only:
            continue
        for ours, sources in _instances(rule, hf, foreign, table.prefix, config):
            if all(table.prefix + name in foreign for name, _ in sources):
                for name, made in _tie(rule, ours, sources, table.prefix, foreign, hf, config, where):
                    pieces_by_name.setdefault(name, []).append(made)
    return pieces_by_name


def foreign_shapes(
    table: Table, model_type: str, hf: Mapping[str, Shape], config: ModelConfig
) -> dict[str, Shape]:
    """Return the foreign tensors, with their shapes, that hold a model with these tensors of Hugging Face.

    ``BadInput`` for a rule that ties several foreign tensors to one: it does not say where to cut.
    """
    shapes: dict[str, Shape] = {}
    for rule in table.rule:
        if rule.only and model_type not in rule.only:
            continue
        for ours, sources in _instances(rule, hf, {}, table.prefix, config):
            ((name, index), *others) = sources
            if others:
                expected, todo = "one foreign name", "A rule with several can be read only"
                raise BadInput(f"{rule.foreign}", expected=expected, found=f"{len(sources)}", todo=todo)
            shape = list(hf[ours[0][0]][len(ours[0][1]) :])
            if shape:
                shape[rule.dim] = sum(hf[hf_name][len(at) + rule.dim] for hf_name, at in ours)
            known = shapes.get(table.prefix + name, (0,) * len(index))[: len(index)]
            stacked = (max(n, at + 1) for n, at in zip(known, index, strict=True))
            shapes[table.prefix + name] = (*stacked, *(shape[::-1] if rule.transpose else shape))
    return shapes


Numbered = tuple[str, tuple[int, ...]]


def _instances(
    rule: Rule, hf: Mapping[str, Shape], foreign: Mapping[str, Shape], prefix: str, config: ModelConfig
) -> Iterator[tuple[list[Numbered], list[Numbered]]]:
    """Yield, for each block and expert, the names on both sides of a rule whose HF tensors exist.

    Beside each name stands the index of the stacked dims that it does not name itself.
    """
    ours, sources = ([side] if isinstance(side, str) else side for side in (rule.hf, rule.foreign))
    used = sorted({key for name in (*ours, *sources) for key in _PLACEHOLDER.findall(name)}, reverse=True)
    experts = 0
    if "e" in used:
        experts = max(_experts(ours, hf), _experts([prefix + template for template in sources], foreign))
    counts = {"i": config.num_hidden_layers, "e": experts}
    for numbers in product(*(range(counts[key]) for key in used)):
        at = dict(zip(used, numbers, strict=True))

        def numbered(name: str, at: dict[str, int] = at) -> Numbered:
            own = set(_PLACEHOLDER.findall(name))
            return name.format(**at), tuple(number for key, number in at.items() if key not in own)

        made = [numbered(name) for name in ours]
        if all(name in hf for name, _ in made):
            yield made, [numbered(name) for name in sources]


def _experts(templates: Sequence[str], names: Mapping[str, Shape]) -> int:
    """Return one more than the highest number of an expert in names that fit the templates."""
    patterns = [
        re.compile(re.escape(template).replace(r"\{e\}", r"(?P<e>\d+)", 1).replace(r"\{i\}", r"\d+"))
        for template in templates
        if "{e}" in template
    ]
    matches = (pattern.fullmatch(name) for pattern in patterns for name in names)
    return max((int(match["e"]) + 1 for match in matches if match is not None), default=0)


def _tie(
    rule: Rule,
    ours: Sequence[Numbered],
    sources: Sequence[Numbered],
    prefix: str,
    foreign: Mapping[str, Shape],
    hf: Mapping[str, Shape],
    config: ModelConfig,
    where: object,
) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces of one instance of a rule: both sides are laid out along ``dim`` and cut together."""
    shapes = [foreign[prefix + name][len(index) :] for name, index in sources]
    if rule.transpose:
        shapes = [shape[::-1] for shape in shapes]
    wanted = [hf[name][len(index) :] for name, index in ours]
    dim = rule.dim
    groups = int(getattr(config, rule.groups)) if rule.groups else 1
    total_ours, total_theirs = (
        sum(shape[dim] if shape else 1 for shape in side) for side in (wanted, shapes)
    )
    rest = {shape[:dim] + shape[dim + 1 :] for shape in (*wanted, *shapes)}
    uneven = any(shape and shape[dim] % (groups * rule.parts) for shape in wanted)
    if (
        len(rest) != 1
        or uneven
        or total_ours > total_theirs
        or (total_ours < total_theirs and not rule.padded)
    ):
        raise BadInput(
            where,
            prefix + sources[0][0],
            expected=" and ".join(f"{name} {[*hf[name]]}" for name, _ in ours),
            found=" and ".join(f"{[*foreign[prefix + name]]}" for name, _ in sources),
            todo="The config and the weights are not of one model, or --names is the wrong table",
        )
    begin_theirs = [sum(shape[dim] if shape else 1 for shape in shapes[:n]) for n in range(len(shapes))]
    at = 0
    turns = product(range(groups), zip(ours, wanted, strict=True), range(rule.parts))
    for group, ((name, index), shape), turn in turns:
        each = shape[dim] // rule.parts if shape else 1
        size = each // groups
        own = turn * each + group * size - at
        for (source, source_index), begin, source_shape in zip(sources, begin_theirs, shapes, strict=True):
            length = source_shape[dim] if source_shape else 1
            first, last = max(at, begin), min(at + size, begin + length)
            if first < last:
                box = Box.whole(shape)
                if shape:
                    box = box.narrow(dim, own + first, own + last)
                start = tuple(first - begin if d == dim else 0 for d in range(len(shape)))
                for part, steps, at_first in _turn_pairs(rule, box, start, config, shape):
                    yield name, _placed(rule, part, index, prefix + source, source_index, at_first, steps)
        at += size


def _turn_pairs(
    rule: Rule, box: Box, start: Shape, config: ModelConfig, shape: Shape
) -> Iterator[tuple[Box, Shape, Shape]]:
    """Yield the box as it is or, for interleaved rows, as the two halves of each head, in steps of two."""
    ones = (1,) * len(shape)
    if not rule.interleaved:
        yield box, ones, start
        return
    heads = int(getattr(config, rule.interleaved))
    half = shape[0] // heads // 2
    for head, odd in product(range(heads), range(2)):
        part = Box.whole(shape).narrow(0, (2 * head + odd) * half, (2 * head + odd + 1) * half)
        yield part, (2, *ones[1:]), (2 * head * half + odd, *start[1:])


def _placed(
    rule: Rule, box: Box, index: Shape, foreign: str, foreign_index: Shape, start: Shape, steps: Shape
) -> Piece:
    """Return the piece in the dims of the two whole tensors: stacked dims first, then those of one tensor."""
    inner = range(len(start))
    dims = tuple(len(foreign_index) + (len(start) - 1 - d if rule.transpose else d) for d in inner)
    return Piece(
        Box((*index, *box.start), (*(n + 1 for n in index), *box.stop)),
        foreign,
        (*foreign_index, *(start[::-1] if rule.transpose else start)),
        (*(None for _ in index), *dims),
        (*(1 for _ in index), *steps),
    )


def rename_all(foreign: Mapping[str, Shape], hf: Mapping[str, Shape]) -> Table | None:
    """Return the table of a checkpoint whose names are Hugging Face's, but for one prefix; else ``None``."""
    first = next(iter(hf))
    prefixes = sorted((name.removesuffix(first) for name in foreign if name.endswith(first)), key=len)
    for prefix in prefixes:
        if sum(prefix + name in foreign for name in hf) * 2 > len(hf):
            return Table(prefix=prefix, rule=[Rule(foreign=name, hf=name) for name in hf])
    return None
