"""Check over which steps, seeds and ranks of a layout random numbers agree or differ."""

from trilith.parallel_state import Layout, ParallelState
from trilith.training.trainer import random_seed


def test_a_step_s_random_numbers_agree_on_a_tensor_group_alone():
    layout = Layout.of(tensor=2, data=2, data_replicate=2, zero=1, pipeline=2, context=2)
    seeds = {}
    for rank in range(layout.world):
        state = ParallelState.stand_in(layout, rank)
        place = (state.data_index, state.context_index, state.at.pipeline)
        seeds.setdefault(place, set()).add(random_seed(3, 5, state))
    assert len(seeds) == layout.world // 2
    assert all(len(alike) == 1 for alike in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)


def test_each_step_and_each_seed_has_random_numbers_of_its_own():
    state = ParallelState.stand_in(Layout())
    assert len({random_seed(seed, step, state) for seed in range(5) for step in range(5)}) == 25
    assert random_seed(1, 2, state) == random_seed(1, 2, ParallelState.stand_in(Layout()))
