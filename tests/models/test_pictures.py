"""The picture in the docstring of a family's block is its forward: these modules, in this order."""

import ast
import inspect
import re

import pytest
import torch
from support.configs import CASES
from support.families import family_and_config
from support.nightly import some
from trilith.models import FAMILIES
from trilith.simulation.kinds_of_blocks import block_kinds

IDS = torch.arange(8).unsqueeze(0)


def picture(block):
    """Return the formulas of a block's docstring, without their remarks."""
    lines = [line.strip() for line in inspect.getdoc(block).splitlines()]
    drawn = [re.split(r"\s{2,}", line)[0] for line in lines if re.match(r"\w = |\+ ", line)]
    return "\n".join(drawn).replace("\n+", " +")


def calls(node):
    """Yield the names of the functions of a formula in the order in which they are called."""
    for child in ast.iter_child_nodes(node):
        yield from calls(child)
    if isinstance(node, ast.Call):
        yield node.func.id


def called(block, run):
    """Return the names of the block's own modules in the order in which ``run`` calls them."""
    order = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: order.append(name))
        for name, module in block.named_children()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return order


def blocks_of(family):
    """Yield a block of each kind of each tiny model of the family, and what runs it."""
    for raw in (raw for raw in CASES.values() if raw["model_type"] == family):
        family_, config = family_and_config(raw)
        model = family_.build(config, device="cpu").eval()
        kinds = dict(zip(block_kinds(family_, config), model.layers.values(), strict=True))
        yield from ((block, lambda model=model: model(IDS)) for block in kinds.values())


@pytest.mark.parametrize("family", some(FAMILIES, 12))
@torch.no_grad()
def test_the_picture_of_a_block_is_its_forward(family):
    drawn, had = {}, {}
    for block, run in blocks_of(family):
        modules, kind = {name for name, _ in block.named_children()}, type(block)
        drawn[kind] = [*calls(ast.parse(picture(kind)))]
        # A line that is true of some blocks alone names modules that others do not have.
        assert called(block, run) == [name for name in drawn[kind] if name in modules], picture(kind)
        had.setdefault(kind, set()).update(modules)
    assert {kind: {*names} for kind, names in drawn.items()} == had
