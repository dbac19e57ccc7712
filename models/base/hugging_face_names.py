"""Define the rules of a table of names, which is used in both directions, and the links that they make.

The tables of families (``names.py``) tie trilith's tensors (``ours``) to Hugging Face's; those of other
projects tie Hugging Face's to theirs. All links of a table cover every element of both sides exactly once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product, takewhile
from typing import Annotated

from pydantic import ConfigDict, Field, StrictBool, StrictInt

from ...parallel_state import BadInput, Box, Piece

#: What may follow the name of a module in those of its tensors; nothing follows that of a tensor.
_KINDS = ("", ".weight", ".bias")
_PLACEHOLDER = re.compile(r"\{([ie])\}")
#: The tensor in which both sides of a rule lie one after the other.
_JOINT = "joint"
Shape = tuple[int, ...]
#: A name, and its index in the dims of a stack that the name does not say.
Numbered = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class Link:
    """Tie a box of the tensor ``ours`` to the elements that hold it, ``piece``, in another tensor.

    A ``copy`` is written to files and, when they are read, compared with the tensor that it repeats.
    """

    ours: str
    piece: Piece[str]
    copy: bool = False

    @property
    def hf(self) -> str:
        """Return the name of the other tensor."""
        return self.piece.stored

    @property
    def ours_box(self) -> Box:
        """Return the box of ``ours``."""
        return self.piece.box

    @property
    def hf_box(self) -> Box:
        """Return the box of the other tensor."""
        return self.piece.hull

    @property
    def transpose(self) -> bool:
        """Return whether the dims of the two are in another order."""
        return not self.piece.ordered


@dataclass(frozen=True, slots=True)
class Rule:
    """Tie tensors of ours to stored tensors, element for element.

    ``{i}`` in a name is a block's number, ``{e}`` an expert's, and ``{config.NAME}`` a word of the config. A
    number on one side only says that the other side has one tensor for all of them, stacked along its first
    dim (after that of ``{i}`` if both are). Several names on a side are tensors that lie one after the other
    along ``dim``.

    ``groups``: the config's attribute that counts equal pieces of each of ours, which take turns in the
    stored tensor (Megatron's ``linear_qkv``: for each key/value head its queries, its key, its value).
    ``parts``: how many equal parts each of ours has, one after the other, which take turns as if each had a
    name (GPT-2's ``c_attn``). ``transpose``: the stored matrix is the transpose of ours. ``interleaved``: the
    config's attribute that counts the heads whose rows we store as two halves, and the stored tensor as pairs
    (rotary embeddings over neighbours). ``padded``: the stored tensor may have more rows, which are left out.
    ``copy``: it repeats, in each block, a tensor that another rule names. ``only``: for these model types.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of the TOML tables, where our side is Hugging Face's

    ours: Annotated[str | tuple[str, ...], Field(alias="hf")]
    stored: Annotated[str | tuple[str, ...], Field(alias="foreign")]
    transpose: StrictBool = False
    groups: str = ""
    dim: StrictInt = 0
    interleaved: str = ""
    parts: StrictInt = 1
    padded: StrictBool = False
    copy: StrictBool = False
    only: tuple[str, ...] = ()

    @property
    def our_names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def stored_names(self) -> tuple[str, ...]:
        return (self.stored,) if isinstance(self.stored, str) else self.stored

    @property
    def numbers(self) -> frozenset[str]:
        """Return which numbers, ``i`` and ``e``, are in its names."""
        return _numbers_in(" ".join((*self.our_names, *self.stored_names)))


def expand(
    rules: Iterable[Rule],
    shapes: Mapping[str, Shape],
    num_layers: int,
    config: object = None,
    *,
    further: Sequence[Rule] = (),
    further_blocks: int = 0,
) -> tuple[list[Link], dict[str, Shape]]:
    """Return all links of a model whose whole tensors have these ``shapes``, and the shapes of HF's tensors.

    A rule of modules is one of their weights and of their biases. A rule for a tensor that this model does
    not have (a bias, an untied head) gives nothing. Every tensor of ours must be covered, and each HF tensor
    by one rule. ``config``: where a rule finds its number of groups. ``further``: rules of the blocks that
    are numbered after the last one.
    """
    rules = list(rules)
    per_block = [rule for rule in rules if "i" in rule.numbers]
    first = rules.index(per_block[0]) if per_block else len(rules)
    others: list[tuple[Rule, int | None]] = [(rule, None) for rule in rules if rule not in per_block]
    # A block's tensors stay together, as a shard wants them.
    of_blocks: list[tuple[Rule, int | None]] = [
        (rule, i)
        for i in range(num_layers + further_blocks)
        for rule in (per_block if i < num_layers else further)
    ]
    links = [
        link
        for rule, block in (*others[:first], *of_blocks, *others[first:])
        for kind in _KINDS
        for link in links_of(rule, block, shapes, config, kind=kind)
    ]
    uncovered = set(shapes) - {link.ours for link in links}
    assert not uncovered, f"the name table lacks {sorted(uncovered)[:3]}"
    return links, shapes_of(links)


def shapes_of(links: Iterable[Link]) -> dict[str, Shape]:
    """Return the shapes of the tensors that the links lead to and cover."""
    shapes: dict[str, Shape] = {}
    for link in links:
        stop = link.piece.hull.stop
        shape = shapes.get(link.hf)
        shapes[link.hf] = stop if shape is None else tuple(map(max, shape, stop))
    return shapes


def links_of(
    rule: Rule,
    block: int | None,
    ours: Mapping[str, Shape],
    config: object,
    *,
    kind: str = "",
    stored: Mapping[str, Shape] | None = None,
    prefix: str = "",
    where: object = "names",
) -> Iterator[Link]:
    """Yield the links of a rule in one block; none where a tensor of it does not exist.

    ``kind``: what follows each name. ``stored``: the stored tensors with their shapes, each name after
    ``prefix``, if they are known; the links then fit these shapes, or ``BadInput`` names ``where``.
    """
    for numbers in _numbers(rule, block, kind, ours):
        numbered: list[Numbered] = [_numbered(name + kind, numbers, config) for name in rule.our_names]
        if any(name not in ours for name, _ in numbered):
            continue
        others: list[Numbered] = [
            _numbered(prefix + name + kind, numbers, config) for name in rule.stored_names
        ]
        if rule.copy:  # the whole tensor, again in each block
            numbered, others = [(name, ()) for name, _ in numbered], [(name, ()) for name, _ in others]
        if stored is not None and any(name not in stored for name, _ in others):
            continue
        if not (numbered[1:] or others[1:] or rule.groups or rule.interleaved or rule.parts > 1):
            ((own, own_index),), ((name, index),) = numbered, others
            box = Box.whole(ours[own][len(own_index) :])
            stored_shape = box.stop[::-1] if rule.transpose else box.stop
            if stored is None or stored[name][len(index) :] == stored_shape:
                piece = _source(rule, box, name, index)  # the whole of one is the whole of the other
                yield Link(own, _stacked(piece, own_index) if own_index else piece, rule.copy)
                continue
        groups = int(getattr(config, rule.groups)) if rule.groups else 1
        laid_out, joint = _laid_out(rule, numbered, ours, groups, config)
        if stored is None:
            if others[1:]:
                expected, todo = "one foreign name", "A rule with several can be read only"
                raise BadInput(f"{[*rule.stored_names]}", expected=expected, found=len(others), todo=todo)
            shapes = [joint]
        else:
            shapes = [stored[name][len(index) :] for name, index in others]
            shapes = [shape[::-1] for shape in shapes] if rule.transpose else shapes
            if not _fit(rule, [ours[name][len(index) :] for name, index in numbered], shapes, groups):
                raise BadInput(
                    where, others[0][0],
                    expected=" and ".join(f"{name} {[*ours[name]]}" for name, _ in numbered),
                    found=" and ".join(f"{[*stored[name]]}" for name, _ in others),
                    todo="The config and the weights are not of one model, or --names is the wrong table",
                )  # fmt: skip
        at = 0
        for (name, index), shape in zip(others, shapes, strict=True):
            offset = tuple(at if dim == rule.dim else 0 for dim in range(len(shape)))
            source = _source(rule, Box.whole(shape).shift(offset), name, index)
            at += _rows(shape, rule.dim)
            for own, piece in laid_out:
                if (composed := piece.through(source)) is not None:
                    yield Link(own, composed, rule.copy)


def _source(rule: Rule, box: Box, name: str, index: Shape) -> Piece[str]:
    """Return the piece that a stored tensor, or the one of a stack at ``index``, is of the joint tensor."""
    size = len(box.start)
    dims = range(len(index), len(index) + size)
    start = (*index, *(0,) * size)
    return Piece(box, name, start, tuple(reversed(dims) if rule.transpose else dims), (1,) * size)


def _laid_out(
    rule: Rule, numbered: Sequence[Numbered], ours: Mapping[str, Shape], groups: int, config: object
) -> tuple[list[tuple[str, Piece[str]]], Shape]:
    """Return where our tensors lie in the joint one, in the order in which they take turns; and its shape."""
    laid_out: list[tuple[str, Piece[str]]] = []
    at, shape = 0, Shape()
    for group, (name, index), part in product(range(groups), numbered, range(rule.parts)):
        shape = ours[name][len(index) :]
        box = Box.whole(shape)
        rows = _rows(shape, rule.dim) // rule.parts // groups
        if shape and groups * rule.parts > 1:
            first = part * (shape[rule.dim] // rule.parts) + group * rows
            box = box.narrow(rule.dim, first, first + rows)
        start = tuple(at if dim == rule.dim else 0 for dim in range(len(shape)))
        pairs = [Piece.plain(box, _JOINT, start)]
        if rule.interleaved:
            heads = int(getattr(config, rule.interleaved))
            half, steps = shape[0] // heads // 2, (2, *(1 for _ in shape[1:]))
            pairs = [
                Piece(
                    box.narrow(0, (2 * head + odd) * half, (2 * head + odd + 1) * half), _JOINT,
                    (start[0] + 2 * head * half + odd, *start[1:]), tuple(range(len(shape))), steps,
                )
                for head, odd in product(range(heads), range(2))
            ]  # fmt: skip
        laid_out += [(name, _stacked(piece, index) if index else piece) for piece in pairs]
        at += rows
    joint = (*shape[: rule.dim], at, *shape[rule.dim + 1 :]) if shape else shape
    return laid_out, joint


def _stacked(piece: Piece[str], index: Shape) -> Piece[str]:
    """Return the piece of a tensor that is one of a stack, whose first dims have this index."""
    box = Box((*index, *piece.box.start), (*(n + 1 for n in index), *piece.box.stop))
    none, ones = (None for _ in index), (1 for _ in index)
    return Piece(box, piece.stored, piece.start, (*none, *piece.dims), (*ones, *piece.steps))


def _fit(rule: Rule, ours: Sequence[Shape], stored: Sequence[Shape], groups: int) -> bool:
    """Tell whether the tensors of both sides differ in ``dim`` alone, and have as many rows in all."""
    other_sizes = {shape[: rule.dim] + shape[rule.dim + 1 :] for shape in (*ours, *stored)}
    uneven = any(shape and shape[rule.dim] % (groups * rule.parts) for shape in ours)
    rows, others = (sum(_rows(shape, rule.dim) for shape in side) for side in (ours, stored))
    return len(other_sizes) == 1 and not uneven and (rows == others or (rows < others and rule.padded))


def _rows(shape: Shape, dim: int) -> int:
    return shape[dim] if shape else 1


def _numbers(rule: Rule, block: int | None, kind: str, ours: Mapping[str, Shape]) -> Iterator[dict[str, int]]:
    """Yield the numbers of the block and of each expert that a rule's names are filled in with."""
    numbers = {} if block is None else {"i": block}
    first = rule.our_names[0] + kind
    if "e" not in rule.numbers:
        yield numbers
        return
    if "e" in _numbers_in(first):
        experts: Iterable[int] = takewhile(lambda e: first.format(**numbers, e=e) in ours, count())
    else:
        stack = ours.get(first.format(**numbers), (0, 0))
        experts = range(stack[0 if block is None or "i" in _numbers_in(first) else 1])
    yield from (numbers | {"e": e} for e in experts)


def _numbered(name: str, numbers: Mapping[str, int], config: object) -> Numbered:
    index = tuple(number for key, number in numbers.items() if key not in _numbers_in(name))
    return name.format(**numbers, config=config) if "{" in name else name, index


@lru_cache(maxsize=4096)
def _numbers_in(name: str) -> frozenset[str]:
    return frozenset(_PLACEHOLDER.findall(name))
