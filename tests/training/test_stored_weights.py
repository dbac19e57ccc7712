"""Without ZeRO a rank computes with the weights that it stores, and not with a copy of them.

One that shares its weights with no other casts them itself, with the bits of FSDP on one rank.
"""

from types import SimpleNamespace

import pytest
import torch
from support.configs import MODELS, TINIEST_LLAMA
from support.short_runs import built
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trilith.data import Batch
from trilith.layers import cut_sequence
from trilith.parallel_state import Layout, clip_gradients, initialize
from trilith.parallel_state.engine import fully_sharded, local_data
from trilith.parallel_state.engine.local_tensors import like
from trilith.testing import Operators, run_parallel
from trilith.training import Precision, Step, TokenLoss, make_adamw, zero_on_fsdp

FP32 = Precision()
BF16 = Precision(torch.float32, torch.bfloat16, torch.float32)


def made(layout, precision=FP32, *, copies=False, **changes):
    """Return this rank's model; ``copies``: FSDP copies what it computes with, as torch does by itself."""
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            patch.setattr(zero_on_fsdp, "compute_with_stored", lambda module: None)
        return built(layout, precision, TINIEST_LLAMA | {"num_hidden_layers": 2} | changes)


def batch(number, state):
    ids = (torch.arange(64).view(4, 16) * (7 + number) + state.data_index) % 131
    return Batch(ids, ids.roll(-1, 1))


def gradients_of(model):
    return [local_data(one.grad).clone() for one in model.parameters() if one.grad is not None]


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


def places(layout):
    """Return how many weights a step computes with, and how many of them are those that are stored, before
    and after the weights have moved to other memory.
    """
    model, found = made(layout), []
    step = Step(model, TokenLoss(model), micro_batch=2)
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
    for here in run_parallel(places, layout.world, layout):
        assert here[0][0] > 4 and all(used == stored for used, stored in here)


def trained(layout, copies, changes):
    """Return losses, gradients and weights of three steps; the weights lie elsewhere in the last."""
    model = made(layout, copies=copies, **changes)
    for one in list(model.layers.values())[:1]:
        one.requires_grad_(False)
    optimizer, step, results = make_adamw(model, lr=1e-2), Step(model, TokenLoss(model), micro_batch=2), []
    for number in range(3):
        results += [step(batch(number, model.state)), *gradients_of(model)]
        optimizer.step()
        optimizer.zero_grad()
        if layout.pipeline == 1:
            with torch.no_grad():  # after an evaluation the weights are there, and change with the next step
                model(cut_sequence(batch(number, model.state).input_ids, model.state))
        if number == 1:
            model.double().float()
            optimizer = make_adamw(model, lr=1e-2)
    return results + [local_data(one).clone() for one in model.parameters()]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout.of(data=2), {"tie_word_embeddings": True}),
        pytest.param(Layout.of(data=2, tensor=2, sequence=True), {}, marks=pytest.mark.slow),
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
            return like(one, whole[at - here.numel() : at].view_as(here).copy_(here))

        if together:
            model._apply(moved)
        step = Step(model, TokenLoss(model), micro_batch=2)
        for number in range(2):
            found.append(step(batch(number, model.state)))
            model.zero_grad()
    return found


def test_weights_that_are_pieces_of_one_tensor_stay_whole():
    """FSDP would cut the tensor after the piece."""
    for first, second, *expected in run_parallel(in_one_storage, 2):
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


TIED = TINIEST_LLAMA | {"tie_word_embeddings": True}
CASES = {
    "bf16, sums in fp32": BF16,
    "bf16, sums in bf16": Precision(torch.float32, torch.bfloat16, torch.bfloat16),
    "bf16 weights, sums in fp32": Precision(torch.bfloat16, torch.bfloat16, torch.float32),
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
}
SUMS_IN_FP32, OTHER_AXES = "bf16, sums in fp32", (Layout.of(tensor=2, sequence=True), Layout(pipeline=2))


def rows():
    ids = torch.arange(64).view(8, 8) * 7 % 131
    return Batch(ids, ids.roll(-1, 1))


def trained_alone(layout, precision, fsdp, own_loop=False):
    """Return losses, gradients and weights of two steps of four micro-batches."""
    with pytest.MonkeyPatch.context() as patch:
        if fsdp:
            patch.setattr(Layout, "holds_alone", property(lambda self: False))
        model = built(layout, precision, TIED)
    assert isinstance(model, FSDPModule) == fsdp
    optimizer = make_adamw(model, lr=1e-2)
    step = Step(model, TokenLoss(model), micro_batch=2)
    found = []
    for _ in range(2):
        if own_loop:
            scales = {"next_token": torch.tensor(1 / 64)}  # the mean's divisor, which a step counts
            for part in rows().split(2):
                sums = step.loss(model(part.input_ids), part.samples(), scales)
                sums.terms["next_token"].backward()
                assert {one.dtype for one in model.parameters()} == {precision.master}
        else:
            found.append(step(rows()))
        found += gradients_of(model)
        clip_gradients(model, 0.5, state=model.state)
        optimizer.step()
        optimizer.zero_grad()
    return found + [local_data(one).clone() for one in model.parameters()]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, Layout()) for name in CASES), *((SUMS_IN_FP32, layout) for layout in OTHER_AXES)],
    ids=str,
)
def test_ranks_that_share_no_weights_have_the_bits_of_fsdp(name, layout):
    ranks = (run_parallel(trained_alone, layout.world, layout, CASES[name], fsdp) for fsdp in (False, True))
    for ours, theirs in zip(*ranks, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_a_loop_of_ones_own_casts_at_each_forward_and_finds_its_parameters_after_backward():
    precision = CASES["bf16, sums in fp32"]
    (own,), (ours,) = (
        run_parallel(trained_alone, 1, Layout(), precision, False, own) for own in (True, False)
    )
    # The step's losses are not in a loop of one's own.
    ours = [one for one in ours if one.ndim]
    assert len(own) == len(ours) and all(map(torch.equal, own, ours))


def test_each_weight_is_copied_once_a_step_and_no_gradient_is_sent():
    model = built(None, CASES["bf16, sums in fp32"], TIED)
    step = Step(model, TokenLoss(model), micro_batch=2)
    for _ in range(2):
        model.zero_grad()
        with Operators() as seen:
            step.launch(rows())
    assert seen.names.count("aten::_foreach_copy_") == 1
    assert not [name for name in seen.names if "c10d" in name or "fsdp" in name]
    plain = built(None, CASES["fp32"], TIED)
    with Operators() as seen:
        Step(plain, TokenLoss(plain), micro_batch=2).launch(rows())
    assert not [name for name in seen.names if "_foreach_copy" in name or "c10d" in name or "fsdp" in name]


def test_an_error_in_a_forward_leaves_the_model_with_its_parameters():
    model = built(None, CASES["bf16, sums in fp32"], TIED)
    mine = [*model.parameters()]
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    for run in (
        lambda: model(rows().input_ids),
        lambda: Step(model, TokenLoss(model), micro_batch=2).launch(rows()),
    ):
        with pytest.raises(ZeroDivisionError):
            run()
        assert all(one is other for one, other in zip(model.parameters(), mine, strict=True))


def through_dtensors(layout, parameters):
    """Take two steps in fp32; return how often a DTensor was asked for its local tensor, and the gradients.

    ``parameters``: compute with the parameters themselves. The weights lie elsewhere in the second step.
    """
    asked, found = [0], []
    model, inner = built(layout, CASES["fp32"], TIED), DTensor.to_local
    if parameters:
        del model.__dict__["compute_weights"]
    step = Step(model, TokenLoss(model), micro_batch=2)

    def counted(self):
        asked[0] += 1
        return inner(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "to_local", counted)
        for _ in range(2):
            found += [step(rows()), *gradients_of(model)]
            assert all(isinstance(one.grad, DTensor) for one in model.parameters())
            model.zero_grad()
            model.double().float()
            initialize(model, 2, state=model.state)
    return asked[0], found


@pytest.mark.parametrize("layout", [Layout.of(tensor=2), Layout.of(tensor=2, sequence=True)], ids=str)
def test_a_tensor_rank_computes_with_plain_tensors_and_the_same_bits(layout):
    plain, themselves = (run_parallel(through_dtensors, 2, layout, one) for one in (False, True))
    for (asked, ours), (asked_too, theirs) in zip(plain, themselves, strict=True):
        assert asked == 0 and asked_too > 0
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_memory_that_fsdp_makes_by_itself_may_be_asked_for_in_torch_2_11_s_way():
    """It also says by name whether to make it anew."""
    asked = []
    sharded = SimpleNamespace(
        init_all_gather_outputs=lambda *place, **named: asked.append((place, named)),
        free_unsharded_param=None,
        all_gather_outputs=[],
        _sharded_param_data=torch.zeros(3),
        offload_to_cpu=True,
    )
    fully_sharded._share_memory(sharded)
    place = [3], [torch.float32], 1, torch.device("cpu")
    sharded.init_all_gather_outputs(*place, force_recreate=False)
    assert asked == [(place, {"force_recreate": False})]
