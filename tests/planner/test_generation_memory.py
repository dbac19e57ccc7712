"""What ranks really hold in generation, against the plan; on the CPU."""

import gc

import pytest
import torch
from support.configs import MODELS
from support.families import family_and_config
from trilith.generation import generate
from trilith.layers import KeyValueCache
from trilith.models import family_of, published_size
from trilith.parallel_state import Layout, ParallelState, initialize, local
from trilith.planner.search.generation_layouts import GenerationMemory, generation_memory, rows_that_fit
from trilith.testing import LiveBytes, run_parallel

#: Keys and values with windows; latents (MLA); recurrent states of both kinds beside keys and values.
NAMES = ("gemma3_text", "deepseek_v3", "qwen3_next", "granitemoehybrid")
LENGTH, NEW = 60, 4


def held(name, layout, dtype=torch.float32):
    """Generate from prompts of three lengths; return what the rank held, and its pipeline rank."""
    state = ParallelState.start(layout) if layout.world > 1 else ParallelState.alone()
    family, config = family_and_config(MODELS[name])
    gc.collect()
    caches = []
    made = KeyValueCache.__init__

    def noted(self, *arguments):
        caches.append(self)
        made(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, LiveBytes() as memory:
        patch.setattr(KeyValueCache, "__init__", noted)
        model = family.build(config, state=state, dtype=dtype)
        model.to_empty(device="cpu")
        initialize(model, 0, state=state)
        weights = sum(local(one).nbytes for one in (*model.parameters(), *model.buffers()))
        prompts = [[5] * length for length in (LENGTH - NEW, 3, 17)]
        generate(model, prompts, max_new_tokens=NEW)
    cached = sum(cache.bytes for cache in caches)
    return GenerationMemory(weights, cached, memory.peak - weights - cached), state.at.pipeline


def planned(name, layout, dtype=torch.float32):
    family, config = family_and_config(MODELS[name])
    return generation_memory(family, config, layout, dtype, rows=3, length=LENGTH - 1, fused=False)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_cache_are_exact_and_the_peak_is_not_above_the_plan(name):
    for dtype in (torch.float32, torch.bfloat16):
        measured, _ = held(name, Layout(), dtype)
        (plan,) = planned(name, Layout(), dtype)
        assert (measured.weights, measured.cache) == (plan.weights, plan.cache)
        assert 0 < measured.reading <= plan.reading


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) for one in NAMES[1:]] + [NAMES[0]]
)
def test_each_of_two_tensor_ranks_holds_what_is_planned(name):
    layout = Layout.of(tensor=2)
    (plan,) = planned(name, layout)
    for measured, _ in run_parallel(held, 2, name, layout, timeout=120):
        assert (measured.weights, measured.cache) == (plan.weights, plan.cache)
        assert 0 < measured.reading <= plan.reading


def test_as_many_rows_fit_as_the_plan_of_one_more_does_not():
    # An odd number of blocks, so that the ranks of one stage have less room than the others.
    size = published_size("llama-3.1-8b").with_fields({"num_hidden_layers": 11})
    family = family_of(size)
    config, layout, room = family.from_hf(size), Layout.of(tensor=2, pipeline=2), int(40e9)
    for length in (2048, 32768):
        most = rows_that_fit(family, config, layout, torch.bfloat16, length=length, room=room)
        assert most > 1
        for rows, fits in ((most, True), (most + 1, False)):
            plan = generation_memory(family, config, layout, torch.bfloat16, rows=rows, length=length)
            assert (max(one.total for one in plan) <= room) == fits
    assert rows_that_fit(family, config, layout, torch.bfloat16, length=2048, room=int(1e9)) == 0


def test_the_cache_of_llama_8b_is_the_textbooks():
    """2 tensors x 32 blocks x 8 heads x 128 numbers x 2 bytes: 128 KiB a token."""
    size = published_size("llama-3.1-8b").with_fields({})
    family = family_of(size)
    (plan,) = generation_memory(family, family.from_hf(size), Layout(), torch.bfloat16, rows=4, length=1000)
    assert plan.cache == 4 * 1000 * 2 * 32 * 8 * 128 * 2
