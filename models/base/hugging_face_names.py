"""Define the rules of a table of names, trilith's and Hugging Face's; one table is used in both directions.

A table (``names.py`` for families) has ``{i}`` for a block's number, and ``{config.NAME}`` where Hugging
Face's name depends on the config. A rule of modules is one of their weights and of their biases. ``expand``
turns rules into links: element-for-element ties between a box of one of our tensors and a box of one of
theirs, which together cover every element of both sides exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...parallel_state import Box

#: What may follow the name of a module in those of its tensors; nothing follows that of a tensor.
_KINDS = ("", ".weight", ".bias")


@dataclass(frozen=True, slots=True)
class Link:
    """Tie the elements of ``ours`` in ``ours_box`` to those of ``hf`` in ``hf_box``, transposed if it says
    so. A ``copy`` is written to files and, when they are read, compared with the tensor that it repeats.

    For a stacked tensor ``ours_box`` has an extra dimension of size 1: the first (the expert), or the last
    one if transposed. To transpose is to reverse the order of all dimensions.
    """

    ours: str
    ours_box: Box
    hf: str
    hf_box: Box
    transpose: bool = False
    copy: bool = False

    def to_hf(self, box: Box) -> Box:
        """Return the box of Hugging Face's tensor for a box inside ``ours_box``."""
        inner = box.within(self.ours_box).turned(len(self.hf_box.start), self.transpose)
        return inner.shift(self.hf_box.start)

    def to_ours(self, box: Box) -> Box:
        """Return the box of trilith's tensor for a box inside ``hf_box``."""
        inner = box.within(self.hf_box).turned(len(self.ours_box.start), self.transpose)
        return inner.shift(self.ours_box.start)


@dataclass(frozen=True, slots=True)
class Rename:
    """Tie one tensor to the same tensor under another name, or the weight and the bias of a module."""

    ours: str
    hf: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Tie one tensor, which another rule names, to a second tensor of Hugging Face that repeats it."""

    ours: str
    hf: str


@dataclass(frozen=True, slots=True)
class Transpose:
    """Tie a matrix to its transpose (GPT-2's Conv1D is (in, out))."""

    ours: str
    hf: str


@dataclass(frozen=True, slots=True)
class Split:
    """Tie several trilith tensors to one Hugging Face tensor that holds them one after the other.

    They lie along its first dim, or along its last dim if it is transposed. ``groups``: name of the config's
    attribute that counts the equal pieces of each tensor, which take turns: of three tensors in two groups
    the first pieces of all three come first, then the second ones (GPT-NeoX: a piece is a head). ``dim``:
    where they lie instead of along the first one (stacks of experts).
    """

    ours: tuple[str, ...]
    hf: str
    transpose: bool = False
    groups: str = ""
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """Tie a stack of experts (dim 0) to one Hugging Face tensor for each expert, with ``{e}`` in its name."""

    ours: str
    hf: str


Rule = Rename | Copy | Transpose | Split | Stack


def expand(
    rules: Iterable[Rule],
    shapes: Mapping[str, tuple[int, ...]],
    num_layers: int,
    config: object = None,
    *,
    further: Sequence[Rule] = (),
    further_blocks: int = 0,
) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
    """Return all links of a model whose whole tensors have these ``shapes``, and the shapes of HF's tensors.

    A rule for a tensor that this model does not have (a bias, an untied head) gives nothing. Every tensor of
    ours must be covered, and each HF tensor by one rule. ``config``: where a rule finds its number of groups.
    ``further``: rules of the blocks that are numbered after the last one.
    """
    rules = list(rules)
    per_block = [rule for rule in rules if "{i}" in rule.hf]
    first = rules.index(per_block[0]) if per_block else len(rules)
    links: list[Link] = []
    for rule in rules[:first]:
        links += _links(rule, shapes, None, config)
    for i in range(num_layers + further_blocks):  # a block's tensors stay together, as a shard wants them
        for rule in per_block if i < num_layers else further:
            links += _links(rule, shapes, i, config)
    for rule in rules[first:]:
        links += [] if rule in per_block else _links(rule, shapes, None, config)
    hf_shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        known = hf_shapes.get(link.hf, (0,) * len(link.hf_box.stop))
        hf_shapes[link.hf] = tuple(map(max, known, link.hf_box.stop))
    uncovered = set(shapes) - {link.ours for link in links}
    assert not uncovered, f"the name table lacks {sorted(uncovered)[:3]}"
    return links, hf_shapes


def _links(rule: Rule, shapes: Mapping[str, tuple[int, ...]], i: int | None, config: object) -> list[Link]:
    def name(template: str) -> str:
        return template if i is None else template.format(i=i, config=config)

    ours = rule.ours if isinstance(rule, Split) else (rule.ours,)
    links: list[Link] = []
    for kind in _KINDS:
        present = [tensor for module in ours if (tensor := f"{name(module)}{kind}") in shapes]
        assert len(present) in (0, len(ours)), f"{rule.hf} needs all of {ours}"
        if isinstance(rule, Stack):
            for tensor in present:
                whole = Box.whole(shapes[tensor])
                for expert in range(whole.stop[0]):
                    hf, box = rule.hf.format(i=i, e=expert), whole.narrow(0, expert, expert + 1)
                    links.append(Link(tensor, box, hf, Box.whole(whole.stop[1:])))
        else:
            links += _whole_links(rule, present, f"{name(rule.hf)}{kind}", shapes, config)
    return links


def _whole_links(
    rule: Rename | Copy | Transpose | Split,
    tensors: Sequence[str],
    hf: str,
    shapes: Mapping[str, tuple[int, ...]],
    config: object,
) -> list[Link]:
    """Return the links of tensors to one of Hugging Face's, in which they take turns."""
    transpose = isinstance(rule, Transpose) or (isinstance(rule, Split) and rule.transpose)
    groups: int = getattr(config, rule.groups) if isinstance(rule, Split) and rule.groups else 1
    links, offset = [], 0
    for group in range(groups):
        for tensor in tensors:
            whole = Box.whole(shapes[tensor])
            size = whole.shape[0] // groups if whole.shape else 0
            piece = whole.narrow(0, group * size, (group + 1) * size) if groups > 1 else whole
            turned = transpose and len(whole.shape) == 2
            inner = Box.whole(piece.transposed().shape if turned else piece.shape)
            along = len(inner.shape) - 1 if turned else (rule.dim if isinstance(rule, Split) else 0)
            shift = tuple(offset if dim == along else 0 for dim in range(len(inner.shape)))
            copy = isinstance(rule, Copy)
            links.append(Link(tensor, piece, hf, inner.shift(shift), turned, copy))
            offset += inner.shape[along] if inner.shape else 0
    return links
