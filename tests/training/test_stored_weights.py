"""Without ZeRO a rank computes with the weights that it stores, and not with a copy of them."""

import pytest
import torch
from support.configs import MODELS, TINIEST_LLAMA
from support.short_runs import built
from torch import Tensor
from trilith.data import Batch
from trilith.parallel_state import Layout, engine
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel
from trilith.training import Precision, TrainStep, make_adamw

FP32 = Precision()
BF16 = Precision(torch.float32, torch.bfloat16, torch.float32)


def made(layout, precision=FP32, *, copies=False, **changes):
    """Return this rank's model; ``copies``: FSDP copies what it computes with, as torch does by itself."""
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            patch.setattr(engine, "compute_with_stored", lambda module: None)
        return built(layout, precision, TINIEST_LLAMA | {"num_hidden_layers": 2} | changes)


def batch(number, state):
    ids = (torch.arange(64).view(4, 16) * (7 + number) + state.data_index) % 131
    return Batch(ids, ids.roll(-1, 1))


def computed_in(model, run):
    """Return where each weight lies that a module has while ``run`` computes with it."""
    places = {}

    def note(name):
        def at_forward(module, given):
            found = module.named_parameters(recurse=False)
            places.update({f"{name}.{leaf}": local_data(one).data_ptr() for leaf, one in found})

        return at_forward

    hooks = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules()]
    run()
    for hook in hooks:
        hook.remove()
    return places


def places(layout, precision, copies):
    """Return how many weights a step computes with, and how many of them are those that are stored, before
    and after the weights have moved to other memory.
    """
    model, found = made(layout, precision, copies=copies), []
    step = TrainStep(model, micro_batch=2, dtype=precision.compute)
    for _ in range(2):
        used = computed_in(model, lambda: step(batch(0, model.state)))
        stored = {name: local_data(one).data_ptr() for name, one in model.named_parameters()}
        assert all(local_data(one).untyped_storage().size() for one in model.parameters())
        found.append((len(used), sum(stored[name] == place for name, place in used.items())))
        model.zero_grad()
        model.double().float()
    return found


@pytest.mark.parametrize(
    "layout", [Layout.of(data=2), Layout.of(context=2), Layout.of(data=2, pipeline=2)], ids=str
)
def test_the_weights_of_a_step_are_the_stored_ones(layout):
    for here in run_parallel(places, layout.world, layout, FP32, False):
        assert here[0][0] > 4 and all(used == stored for used, stored in here)


def test_a_cast_needs_other_memory_and_so_does_a_part_of_the_weights():
    """So the test above could fail: FSDP by itself copies, too."""
    for given in (
        (Layout.of(data=2), BF16, False),
        (Layout.of(data=2, zero=1), FP32, False),
        (Layout.of(data=2), FP32, True),
    ):
        for here in run_parallel(places, 2, *given):
            assert all(used > 5 and not stored for used, stored in here)


def trained(layout, copies, changes):
    """Return losses, gradients and weights of three steps; the weights lie elsewhere in the last."""
    model = made(layout, copies=copies, **changes)
    for one in list(model.layers.values())[:1]:
        one.requires_grad_(False)
    optimizer, step, found = make_adamw(model, lr=1e-2), TrainStep(model, micro_batch=2), list[Tensor]()
    for number in range(3):
        found.append(step(batch(number, model.state)))
        found += [local_data(one.grad).clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if layout.pipeline == 1:
            with torch.no_grad():  # after an evaluation the weights are there, and change with the next step
                model(batch(number, model.state).of_context(model.state).input_ids)
        if number == 1:
            model.double().float()
            optimizer = make_adamw(model, lr=1e-2)
    return found + [local_data(one).clone() for one in model.parameters()]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout.of(data=2), {"tie_word_embeddings": True}),
        (Layout.of(data=2, tensor=2, sequence=True), {}),
        (Layout.of(data=2, pipeline=2), {}),
        (Layout.of(data=2, expert=2), MODELS["mixtral"]),
    ],
    ids=lambda one: str(one)[:40],
)
def test_stored_weights_train_bitwise_like_cast_copies(layout, changes):
    ours, theirs = (run_parallel(trained, layout.world, layout, copies, changes) for copies in (False, True))
    for one, other in zip(ours, theirs, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))


def in_one_storage():
    """Return losses of a model whose weights are pieces of one tensor, and those of another one."""
    found = []
    for together in (True, False):
        model = made(Layout.of(data=2))
        size = sum(local_data(one).numel() for one in model.parameters())
        whole, at = torch.zeros(size), 0

        def moved(one, whole=whole):
            nonlocal at
            here = local_data(one)
            at += here.numel()
            return engine.like(one, whole[at - here.numel() : at].view_as(here).copy_(here))

        if together:
            model._apply(moved)
        step = TrainStep(model, micro_batch=2)
        for number in range(2):
            found.append(step(batch(number, model.state)))
            model.zero_grad()
    return found


def test_weights_that_are_pieces_of_one_tensor_stay_whole():
    """FSDP would cut the tensor after the piece."""
    for first, second, *expected in run_parallel(in_one_storage, 2):
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
