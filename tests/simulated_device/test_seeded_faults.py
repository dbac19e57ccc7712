"""The mistakes that a real device would punish, put into a step: the simulated device refuses each."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.configs import TINIEST_LLAMA
from support.short_training import Case
from support.simulated_steps import step_counts
from trilith.layers import GatedMLP
from trilith.testing.simulated_device import Mixed
from trilith.testing.simulated_device.device import NewWait

CASE = Case(TINIEST_LLAMA, samples=2, dtype=torch.float32, compute=torch.bfloat16)


def multiply_by_a_tensor_of_the_host(y):
    return y * torch.ones(y.shape[-1])


def read_a_number(y):
    return y * y.mean().item()


def draw_with_a_generator_of_the_host(y):
    return y + torch.rand(y.shape, device=y.device, dtype=y.dtype, generator=torch.Generator())


def copy_to_the_host(y):
    y.detach().cpu()
    return y


def loop_over_the_sizes_of_ranks(y):
    sizes = torch.full((dist.get_world_size(),), y.shape[1], device=y.device)
    dist.all_reduce(sizes)
    return torch.cat([piece * 1 for piece in y.split([int(size) for size in sizes], dim=1)], dim=1)


#: Each mistake, with what the device says of it.
FAULTS = {
    multiply_by_a_tensor_of_the_host: (Mixed, "aten::mul of .* on cpu"),
    read_a_number: (NewWait, "read_a_number: line .* read: the host waits"),
    draw_with_a_generator_of_the_host: (Mixed, "a generator of cpu"),
    copy_to_the_host: (NewWait, "copy_to_the_host: line .* read: the host waits"),
    loop_over_the_sizes_of_ranks: (NewWait, "loop_over_the_sizes_of_ranks.* read: the host waits"),
}


def each_is_refused():
    sound = GatedMLP.forward
    step_counts(CASE)
    for fault, (error, said) in FAULTS.items():

        def broken(mlp, x, fault=fault):
            return fault(sound(mlp, x))

        with mock.patch.object(GatedMLP, "forward", broken), pytest.raises(error, match=said):
            step_counts(CASE)


def test_each_of_five_mistakes_in_a_step_is_refused(alone):
    alone(each_is_refused)
