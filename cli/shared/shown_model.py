"""Show a model on a page: what its blocks compute and send; shapes, cuts and names in files of parameters.

What each family can do is asked of its tiny model, which is built, or refused, for every axis and feature.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import getdoc
from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn

from ...generation import generate
from ...models import Family, ModelConfig, tiny_config
from ...models.lora.targets import expert_sites, linear_sites
from ...parallel_state import BadInput, Declaration, Layout, ParallelState, initialize
from ...planner import sampled
from ...simulation.kinds_of_blocks import block_kinds
from ...simulation.micro_batch import MicroBatch

if TYPE_CHECKING:
    from ...models import CausalLM

#: The layout whose collectives are told.
_CUT = Layout(tensor=2, sequence=True)
#: A formula of a picture, or the rest of one.
_DRAWN = re.compile(r"\w = |\+ ")


def shown_model(family: Family, config: ModelConfig) -> Iterator[str]:
    """Yield the lines: parameters before the blocks, each kind of block, and parameters after them."""
    model, kinds = family.on_meta(config), block_kinds(family, config)
    (declared,) = family.declarations(config)
    numbers: dict[int, list[int]] = {}
    for number, kind in enumerate(kinds):
        numbers.setdefault(kind, []).append(number)
    # Of a stack of experts, the name of the first.
    names = {link.ours: link.hf for link in reversed(family.links(config)[0])}
    rows = [(*_row(name, declaration), names[name]) for name, declaration in declared.items()]
    lines = dict(zip(declared, aligned(rows), strict=True))
    paths = {module: path for path, module in model.named_modules()}
    places = {number: f"{paths[block]}." for number, block in model.numbered_blocks().items()}
    first = min(index for index, name in enumerate(lines) if name.startswith(places[0]))
    ends = {name for name in [*lines][first:] if not name.startswith(tuple(places.values()))}
    yield from (line for name, line in [*lines.items()][:first] if name not in ends)
    for own in numbers.values():
        yield ""
        yield f"{_places(own)}: {type(model.layers[str(own[0])]).__name__}"
        yield from (f"    {line}" for line in picture(model.layers[str(own[0])]))
        yield from (line for name, line in lines.items() if name.startswith(places[own[0]]))
        yield from _sent(family, config, own[0])
    yield ""
    yield from (line for name, line in lines.items() if name in ends)
    yield from _around(model)


def picture(block: nn.Module) -> list[str]:
    """Return the formulas in the docstring of a block's class that are this block's, with their remarks."""
    own = {name for name, _ in block.named_children()}
    lines = map(str.strip, (getdoc(type(block)) or "").splitlines())
    drawn = [
        line.replace("+", "      +", 1) if line[0] == "+" else line for line in lines if _DRAWN.match(line)
    ]
    return [line for line in drawn if own.intersection(re.findall(r"(\w+)\(", line))]


def _row(name: str, declaration: Declaration) -> tuple[str, str, str]:
    cut = declaration.cut
    over = ["experts over expert"] if declaration.experts else []
    if cut is not None:
        over.append(f"dim {cut.dim} over {cut.axis}" + (f" by {cut.unit}" if cut.unit > 1 else ""))
    return name, " x ".join(map(str, declaration.shape)) or "1", ", ".join(over) or "whole"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of words, whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _places(numbers: Sequence[int]) -> str:
    """Say which blocks these are.

    >>> _places([0, 1, 2, 5])
    'blocks 0-2, 5'
    """
    runs = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        runs.append(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}")
    return f"block{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


def _sent(family: Family, config: ModelConfig, number: int) -> Iterator[str]:
    """Tell the collectives of a block's step under tensor and sequence parallelism, off its trace."""
    if family.adopted:  # a block of transformers' is not called alone
        return
    try:
        sample = sampled(family, config, _CUT)
    except BadInput as error:
        yield f"tensor = {_CUT.tensor} cannot cut it: {error}"
        return
    batch = MicroBatch(rows=1, length=64, compute=2)
    traced = sample.pieces.block(sample.block(number), batch, reached=True).plain
    counts = Counter((sent.phase, sent.kind, sent.axis) for sent in traced.collectives)
    words = [f"{count} {kind} over {axis} ({phase})" for (phase, kind, axis), count in counts.items()]
    yield f"sends, tensor = {_CUT.tensor} with sequence: {', '.join(words)}"


def _around(model: "CausalLM") -> Iterator[str]:
    if model.config.tie_word_embeddings:
        yield "the output layer is the embedding"
    if model.logit_scale != 1:
        yield f"logits times {model.logit_scale:g}"
    if model.logit_cap is not None:
        yield f"logits bounded by {model.logit_cap:g}"


#: A layout that has ranks along one axis.
AXES: dict[str, Layout] = {
    "tensor": Layout.of(tensor=2),
    "sequence": Layout.of(tensor=2, sequence=True),
    "pipeline": Layout.of(pipeline=2),
    "context": Layout.of(context=2),
    "expert": Layout.of(data=2, expert=2),
}


@dataclass(frozen=True)
class Features:
    """Hold what a family can do. ``lora``: what gets adapters, ``linears`` and ``experts``."""

    axes: tuple[str, ...]
    lora: tuple[str, ...]
    generation: bool


def features_of(family: Family) -> Features:
    """Find the features of a family by trying them on its tiny model, in a fraction of a second."""
    config = family.from_hf(tiny_config(family.model_type))

    def builds(layout: Layout) -> bool:
        state = ParallelState.stand_in(layout, 0)
        return _accepts(lambda: family.build(config, state=state))

    def writes() -> object:
        model = family.build(config, device="cpu")
        initialize(model, 0)
        return generate(model, [[1, 2, 3]], max_new_tokens=2)

    sites = {"linears": linear_sites(family, config), "experts": expert_sites(family, config)}
    return Features(
        axes=tuple(axis for axis, layout in AXES.items() if builds(layout)),
        lora=tuple(kind for kind, targets in sites.items() if targets),
        generation=_accepts(writes),
    )


def _accepts(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except BadInput:
        return False
    return True
