"""What is lent to FSDP's modules for a while is taken back."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trilith.parallel_state import engine
from trilith.parallel_state.engine.fully_sharded import in_one_backward, left_alone
from trilith.testing import run_parallel


def sharded():
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def gradients(model):
    model(torch.ones(2, 4)).square().sum().backward()
    return [parameter.grad.to_local().tolist() for parameter in model.parameters()]


def after_a_failure():
    """Return the gradients of a backward after one that failed, and those of another model."""
    model = sharded()
    with pytest.raises(ZeroDivisionError), in_one_backward(model):
        raise ZeroDivisionError
    return gradients(model), gradients(sharded())


def test_a_backward_ends_as_ever_after_one_that_failed():
    for after, expected in run_parallel(after_a_failure, 2):
        assert after == expected


def calls_watched():
    """Return what is seen of a forward while weights are left alone, and after that."""
    model, seen = sharded(), []

    def watch(kind, parameters):
        seen.append(kind)
        return contextlib.nullcontext()

    with engine.watched([model], watch):
        with left_alone([model]), contextlib.suppress(RuntimeError):  # shards are no whole weights
            model(torch.ones(2, 4))
        alone = [*seen]
        model(torch.ones(2, 4))
    watched = seen[len(alone) :]
    model(torch.ones(2, 4))
    return alone.count("all_gather"), watched.count("all_gather"), len(seen) - len(alone) - len(watched)


def test_weights_left_alone_are_gathered_and_watched_again_afterwards():
    for alone, watched, later in run_parallel(calls_watched, 2):
        assert (alone, later) == (0, 0)
        assert watched == 2
