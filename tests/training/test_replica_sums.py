"""FSDP without ZeRO: a gradient is copied once, and summed over the data ranks while backward goes on."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from support.configs import TINIEST_LLAMA
from support.families import model_of
from torch import Tensor
from trilith.checkpoints import load, save
from trilith.layers import GatedMLP
from trilith.parallel_state import Layout, ParallelState, engine, initialize
from trilith.parallel_state.engine.fully_sharded import ReplicaSums
from trilith.testing import LiveBytes, Operators, run_parallel
from trilith.training import Precision, shard_over_data

FP32, BF16 = torch.float32, torch.bfloat16
#: What copies gradients into the buffer that is summed; since torch 2.15 it also casts them.
COPY = ("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")


@dataclass
class Seen:
    """Hold each sum's buffer, whether backward went on meanwhile, and what sums the gradients."""

    buffers: list[Tensor] = field(default_factory=list)
    later: list[bool] = field(default_factory=list)
    sums: list[ReplicaSums] = field(default_factory=list)

    def watch(self, patch):
        all_reduce, take = dist.all_reduce, ReplicaSums.take

        def noted(tensor, *given, async_op=False, **named):
            self.buffers.append(tensor)
            self.later.append(async_op)
            return all_reduce(tensor, *given, async_op=async_op, **named)

        patch.setattr(dist, "all_reduce", noted)
        patch.setattr(ReplicaSums, "take", lambda sums, one: (self.sums.append(sums), take(sums, one))[1])


def made(state, precision, *, frozen):
    config = TINIEST_LLAMA | {"num_hidden_layers": 2}
    model = model_of(config, state=state, dtype=precision.master)
    for block in model.layers.values() if frozen else ():
        block.requires_grad_(False)
    shard_over_data(model, state, precision)
    model.to_empty(device="cpu")
    initialize(model, 1, state=state)
    return model


def gradients(model):
    return [engine.local_data(one.grad) for one in model.parameters() if one.grad is not None]


def backward(model, number):
    """Run one backward pass over this rank's rows of a step."""
    ids = torch.arange(16).view(2, 8) * (3 + number) % 131 + model.state.data_index
    model(ids).float().square().mean().backward()


def one_backward(precision, frozen):
    seen, state = Seen(), ParallelState.start(Layout.of(data=2))
    with pytest.MonkeyPatch.context() as patch:
        seen.watch(patch)
        model = made(state, precision, frozen=frozen)
        with Operators() as operators:
            backward(model, 0)
    assert not any(sums.running for sums in seen.sums), "backward ends when the sums are there"
    names = operators.names
    first = next(at for at, name in enumerate(names) if name in COPY)
    between = names[first : names.index("c10d::allreduce_", first)]
    assert "aten::div" not in between and "aten::empty" not in between[1:], between
    held = gradients(model)
    if precision.master == precision.reduce:  # no copy after the sum
        storages = {one.untyped_storage().data_ptr() for one in seen.buffers}
        assert {one.untyped_storage().data_ptr() for one in held} == storages
    return seen.later, [one.clone() for one in held], sum(name in COPY for name in names)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_buffer_that_is_summed_becomes_the_gradients_while_backward_goes_on(frozen):
    """With frozen blocks the root alone is summed, after the last of autograd's own work."""
    groups = 1 if frozen else 3
    (later, first, copies), (_, second, _) = run_parallel(one_backward, 2, Precision(), frozen)
    assert later == [True] * groups and copies == groups
    assert first and all(map(torch.equal, first, second))


def test_a_sum_that_is_cast_afterwards_is_waited_for():
    (later, first, _), (_, second, _) = run_parallel(one_backward, 2, Precision(BF16, BF16, FP32), False)
    assert later == [False] * 3
    assert {one.dtype for one in first} == {BF16} and all(map(torch.equal, first, second))


def sum_of_one_rank():
    """Return how much more memory FSDP's sum of gradients on a mesh of one rank needs than there was before
    it, in sizes of the gradients.
    """
    state = ParallelState.start(Layout())
    model = GatedMLP(256, 512, state=state)
    shard_over_data(model, state, Precision(), offload=True, blocks=[])
    model.to_empty(device="cpu")
    initialize(model, 1, state=state)
    size = sum(one.nbytes for one in model.parameters())
    live, sizes = LiveBytes(), []

    @contextmanager
    def watch(kind, parameters):
        live.peak = before = live.now
        yield
        if kind == "reduce_scatter":
            sizes.append((live.peak - before) / size)

    with live:
        loss = model(torch.ones(1, 1, 256)).sum()
        with engine.watched(engine.fsdp_modules(model), watch):
            loss.backward()
    return max(sizes)


def test_a_mesh_of_one_rank_copies_a_gradient_once():
    """It takes the place of the gathered weights. A second buffer and a factor would need two more."""
    (more,) = run_parallel(sum_of_one_rank, 1)
    assert more == 0.0


def several_backwards(together):
    model = made(ParallelState.start(Layout.of(data=2)), Precision(), frozen=False)
    found = []
    for number in range(2):
        backward(model, number)
        if not together:
            found.append([one.clone() for one in gradients(model)])
            model.zero_grad()
    return gradients(model) if together else [one + other for one, other in zip(*found, strict=True)]


def test_the_gradients_of_several_backwards_add_up():
    for one, other in zip(*(run_parallel(several_backwards, 2, how) for how in (True, False)), strict=True):
        assert all(map(torch.equal, one, other)) and len(one) == len(other)


def evaluations_around_an_update(root, zero):
    """Return the sums of logits of this rank's rows before and after an update, and of a model that reads its
    checkpoint: each without a gradient, the first between a backward and its update.
    """
    state = ParallelState.start(Layout.of(data=2, zero=zero))
    model, other = (made(state, Precision(), frozen=False) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluated(model):
        with torch.no_grad():
            return float(model(torch.arange(8).view(1, 8)).square().sum())

    backward(model, 0)
    sums = [evaluated(model)]
    optimizer.step()
    sums.append(evaluated(model))
    save(root, model, optimizer, state=state)
    evaluated(other)
    load(root, other, state=state)
    return [*sums, evaluated(other)]


@pytest.mark.parametrize("zero", [2, 3])
def test_an_update_and_a_load_reach_the_forward_after_an_evaluation(zero, tmp_path):
    """The weights that an evaluation gathers are dropped: no backward comes that would drop them."""
    for before, after, read in run_parallel(evaluations_around_an_update, 2, str(tmp_path / "run"), zero):
        assert before != after == read
