"""Float8 products in training: the same in every layout, whatever is recomputed, compiled or frozen."""

from dataclasses import replace

import pytest
import torch
from support.configs import config
from support.layout_cases import axes
from support.short_training import Case, first_difference, outcomes, relative_differences
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

CONFIG = config("held/llama", layers=2, vocab_size=96, intermediate_size=96, num_attention_heads=4)
LAYOUTS = [Layout.of(**axes(cut)) for cut in ("tp2", "tp2-sp", "dp2-zero3", "cp2", "pp2")]
ONE = Case(CONFIG, micro_batch=2)
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_layout_changes_what_rounding_to_float8_leaves_by_a_hundred_thousandth(scaling):
    """In fp64 all but float8's products is exact; without a common scale they would differ by percents."""
    one = replace(ONE, float8=scaling)
    alone, smaller, plain, frozen = outcomes([one, replace(one, micro_batch=1), ONE, replace(one, lora=LORA)])
    far = dict(relative_differences(alone, plain))
    assert max(far.values()) > 1e-2 and alone.losses == pytest.approx(plain.losses, rel=1e-2)
    assert first_difference(alone, smaller, tolerance=1e-5) is None
    cases = [replace(one, layout=layout) for layout in LAYOUTS]
    *layouts, adapted = outcomes([*cases, replace(cases[1], lora=LORA)])
    for found in layouts:
        assert first_difference(alone, found, tolerance=1e-5) is None
    assert first_difference(frozen, adapted, tolerance=1e-5) is None


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_recomputed_activations_change_no_bit(scaling):
    one = replace(ONE, float8=scaling, layout=Layout.of(tensor=2, sequence=True))
    memories = [MemorySection(checkpointing="selective"), MemorySection(checkpointing="full")]
    plain, *forgetful = outcomes([one, *(replace(one, memory=memory) for memory in memories)])
    for found in forgetful:
        assert first_difference(plain, found, tolerance=0.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_in_one_graph_a_layout_is_the_same(scaling):
    one = replace(ONE, float8=scaling, layout=Layout.of(tensor=2, sequence=True))
    plain, compiled = outcomes([one, replace(one, compiled="aot_eager")])
    assert first_difference(plain, compiled, tolerance=1e-6) is None


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_between_the_products_all_is_in_bf16(scaling):
    case = replace(ONE, float8=scaling, dtype=torch.float32, compute=torch.bfloat16)
    exact, found = outcomes([replace(ONE, dtype=torch.float32), case])
    assert found.losses == pytest.approx(exact.losses, rel=1e-2) and found.losses != exact.losses
    assert found.norms == pytest.approx(exact.norms, rel=0.1)
    assert {one.dtype for one in found.parameters.values()} == {torch.float32}
