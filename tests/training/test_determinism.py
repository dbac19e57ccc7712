"""``deterministic = true`` holds while the ranks run, and no longer; which ranks share random numbers."""

import os

import pytest
import torch
from support.short_runs import tiny_recipe
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import Layout, ParallelState
from trilith.recipes import parse_recipe
from trilith.training import Step, Trainer, run
from trilith.training.supervised import deterministic
from trilith.training.trainer import random_seed

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def now():
    return torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)


@pytest.mark.parametrize(
    ("choice", "theirs", "during"),
    [
        ([], None, (False, None)),
        (["deterministic=true"], None, (True, ":4096:8")),
        (["deterministic=true"], ":16:8", (True, ":16:8")),
    ],
    ids=["not asked for", "asked for", "with the user's own workspace"],
)
def test_deterministic_mode_covers_build_to_end(choice, theirs, during, tmp_path, monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if theirs is not None:
        monkeypatch.setenv(WORKSPACE, theirs)
    seen, begin, step = [], Trainer.__init__, Step.launch

    def watched_begin(self, *given, **named):
        seen.append(now())
        begin(self, *given, **named)

    def watched_step(self, *given, **named):
        seen.append(now())
        return step(self, *given, **named)

    monkeypatch.setattr(Trainer, "__init__", watched_begin)
    monkeypatch.setattr(Step, "launch", watched_step)
    raw = tiny_recipe(tmp_path / "run", write_tokens(tmp_path / "tokens"), steps=1)
    assert run(parse_recipe(raw), choice, quiet=True) == 0
    assert seen == [during, during]
    assert now() == (False, theirs)


def test_an_error_ends_deterministic_mode_too(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(KeyError), deterministic(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raise KeyError
        assert torch.is_deterministic_algorithms_warn_only_enabled() and WORKSPACE not in os.environ
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_s_random_numbers_agree_on_a_tensor_group_alone():
    layout = Layout.of(tensor=2, data=2, data_replicate=2, zero=1, pipeline=2, context=2)
    seeds = {}
    for rank in range(layout.world):
        state = ParallelState.stand_in(layout, rank)
        place = (state.data_index, state.context.index, state.at.pipeline)
        seeds.setdefault(place, set()).add(random_seed(3, 5, state))
    assert len(seeds) == layout.world // 2
    assert all(len(alike) == 1 for alike in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)
    assert len({random_seed(seed, step, state) for seed in range(5) for step in range(5)}) == 25
