"""Define the rules of a table of names, trilith's and Hugging Face's; one table is used in both directions.

A family lists rules with ``{i}`` for a block's number, and ``{config.NAME}`` where Hugging Face's name
depends on the config. ``expand`` turns them into links: element-for-element ties between a box of one of our
tensors and a box of one of theirs, which together cover every element of both sides exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...parallel_state import Box

#: The tensors of a layer with a bias.
BOTH = ("weight", "bias")


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
    """Tie one tensor to the same tensor under another name."""

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


def in_blocks(*pairs: tuple[str, str], kinds: Sequence[str] = ("weight",)) -> tuple[Rename, ...]:
    """Make rules that rename tensors in every block: pairs of our name and HF's, without prefix and kind.

    >>> in_blocks(("mlp.down", "mlp.down_proj"))[0].hf
    'model.layers.{i}.mlp.down_proj.weight'
    """
    return tuple(
        Rename(f"layers.{{i}}.{ours}.{kind}", f"model.layers.{{i}}.{hf}.{kind}")
        for ours, hf in pairs
        for kind in kinds
    )


def fused_qkv(hf: str, groups: str) -> tuple[Split, ...]:
    """Rules for queries, keys and values that are stored as one, and for their biases; see ``Split``.

    >>> fused_qkv("h.{i}.qkv", "num_attention_heads")[1].hf
    'h.{i}.qkv.bias'
    """
    return tuple(
        Split(
            tuple(f"layers.{{i}}.attention.qkv.{one}.{kind}" for one in "qkv"), f"{hf}.{kind}", groups=groups
        )
        for kind in ("weight", "bias")
    )


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
    transpose = isinstance(rule, Transpose) or (isinstance(rule, Split) and rule.transpose)
    present = [name(one) for one in ours if name(one) in shapes]
    assert len(present) in (0, len(ours)), f"{rule.hf} needs all of {ours}"
    links, offset = [], 0
    if isinstance(rule, Stack):
        for one in present:
            whole = Box.whole(shapes[one])
            for expert in range(whole.stop[0]):
                hf = rule.hf.format(i=i, e=expert)
                links.append(Link(one, whole.narrow(0, expert, expert + 1), hf, Box.whole(whole.stop[1:])))
        return links
    groups: int = getattr(config, rule.groups) if isinstance(rule, Split) and rule.groups else 1
    for group in range(groups):
        for one in present:
            whole = Box.whole(shapes[one])
            size = whole.shape[0] // groups if whole.shape else 0
            piece = whole.narrow(0, group * size, (group + 1) * size) if groups > 1 else whole
            turned = transpose and len(whole.shape) == 2
            inner = Box.whole(piece.transposed().shape if turned else piece.shape)
            along = len(inner.shape) - 1 if turned else (rule.dim if isinstance(rule, Split) else 0)
            shift = tuple(offset if dim == along else 0 for dim in range(len(inner.shape)))
            copy = isinstance(rule, Copy)
            links.append(Link(one, piece, name(rule.hf), inner.shift(shift), turned, copy))
            offset += inner.shape[along] if inner.shape else 0
    return links
