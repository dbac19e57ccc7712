"""Every public layer in parts equals itself on one device, on each of its axes: see ``support.layers``."""

import inspect
from collections import defaultdict
from contextlib import suppress

import pytest
from support.layers import NOT_COMPARED, ROWS, compare_rows
from torch import nn
from trilith import layers
from trilith.testing import RankError, run_parallel

CASES = [
    pytest.param(row, layout, id=f"{row.why}-{layout}", marks=[pytest.mark.slow] * (layout in row.slow))
    for row in ROWS
    for layout in (*row.layouts, *row.slow)
]


@pytest.fixture(scope="module")
def compare(request):
    """Compare all chosen rows of a layout in one call; if that fails, each by itself."""
    chosen = defaultdict(list)
    for item in request.session.items:
        if item.nodeid.partition("[")[0] == request.node.nodeid + "::test_a_layer_in_parts_equals_one_device":
            chosen[item.callspec.params["layout"]].append(item.callspec.params["row"].why)
    passed = {}

    def compare(row, layout):
        if layout not in passed:
            passed[layout] = False
            with suppress(RankError):
                run_parallel(compare_rows, layout.world, layout, chosen[layout], timeout=180)
                passed[layout] = True
        if not passed[layout]:
            run_parallel(compare_rows, layout.world, layout, [row.why])

    return compare


@pytest.mark.parametrize(("row", "layout"), CASES)
def test_a_layer_in_parts_equals_one_device(row, layout, compare):
    compare(row, layout)


def test_every_public_layer_is_compared_on_each_of_its_axes():
    compared = defaultdict(set)
    for row in ROWS:
        for module in row.make(None).modules():
            for kind in type(module).__mro__:  # a base by the layers made of it
                compared[kind] |= {
                    axis
                    for layout in row.layouts
                    for axis in ("tensor", "sequence", "context")
                    if int(getattr(layout, axis)) > (axis != "sequence")
                }
    for name, layer in vars(layers).items():
        if inspect.isclass(layer) and issubclass(layer, nn.Module):
            mixes = "inputs" in inspect.signature(layer.forward).parameters
            wanted = set() if name in NOT_COMPARED else {"tensor", "sequence", *["context"] * mixes}
            assert compared[layer] >= wanted, name
    assert all(not compared[getattr(layers, name)] for name in NOT_COMPARED)
