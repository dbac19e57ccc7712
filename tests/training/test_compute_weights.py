"""A rank that shares its weights with no other casts them itself, with the bits of FSDP on one rank."""

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.short_runs import built
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trilith.data import Batch
from trilith.parallel_state import Layout, clip_gradients, initialize
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel
from trilith.testing.operators import Operators
from trilith.training import Precision, TrainStep, make_adamw

TIED = TINIEST_LLAMA | {"tie_word_embeddings": True}
FP32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "bf16, sums in fp32": Precision(FP32, BF16, FP32),
    "bf16, sums in bf16": Precision(FP32, BF16, BF16),
    "bf16 weights, sums in fp32": Precision(BF16, BF16, FP32),
    "fp32": Precision(FP32, FP32, FP32),
}
SUMS_IN_FP32, OTHER_AXES = "bf16, sums in fp32", (Layout.of(tensor=2, sequence=True), Layout(pipeline=2))


def batch():
    ids = torch.arange(64).view(8, 8) * 7 % 131
    return Batch(ids, ids.roll(-1, 1))


def trained(layout, precision, fsdp, own_loop=False):
    """Return losses, gradients and weights of two steps of four micro-batches."""
    with pytest.MonkeyPatch.context() as patch:
        if fsdp:
            patch.setattr(Layout, "holds_alone", property(lambda self: False))
        model = built(layout, precision, TIED)
    assert isinstance(model, FSDPModule) == fsdp
    optimizer = make_adamw(model, lr=1e-2)
    step = TrainStep(model, micro_batch=2, dtype=precision.compute, reduce=precision.reduce)
    found = []
    for _ in range(2):
        if own_loop:
            step._tokens = torch.tensor(64)  # the mean's divisor, which a step counts
            for part in batch().split(2):
                loss = step.loss(model(part.input_ids), part.labels)
                loss.backward()
                assert {one.dtype for one in model.parameters()} == {precision.master}
        else:
            found.append(step(batch()))
        found += [local_data(one.grad).clone() for one in model.parameters() if one.grad is not None]
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
    ranks = (run_parallel(trained, layout.world, layout, CASES[name], fsdp) for fsdp in (False, True))
    for ours, theirs in zip(*ranks, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_a_loop_of_ones_own_casts_at_each_forward_and_finds_its_parameters_after_backward():
    precision = CASES["bf16, sums in fp32"]
    (own,), (ours,) = (run_parallel(trained, 1, Layout(), precision, False, own) for own in (True, False))
    # The step's losses are not in a loop of one's own.
    ours = [one for one in ours if one.ndim]
    assert len(own) == len(ours) and all(map(torch.equal, own, ours))


def test_each_weight_is_copied_once_a_step_and_no_gradient_is_sent():
    model = built(None, CASES["bf16, sums in fp32"], TIED)
    step = TrainStep(model, micro_batch=2, dtype=BF16, reduce=FP32)
    for _ in range(2):
        model.zero_grad()
        with Operators() as seen:
            step.launch(batch())
    assert seen.names.count("aten::_foreach_copy_") == 1
    assert not [name for name in seen.names if "c10d" in name or "fsdp" in name]
    plain = built(None, CASES["fp32"], TIED)
    with Operators() as seen:
        TrainStep(plain, micro_batch=2).launch(batch())
    assert not [name for name in seen.names if "_foreach_copy" in name or "c10d" in name or "fsdp" in name]


def test_an_error_in_a_forward_leaves_the_model_with_its_parameters():
    model = built(None, CASES["bf16, sums in fp32"], TIED)
    mine = [*model.parameters()]
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    for run in (
        lambda: model(batch().input_ids),
        lambda: TrainStep(model, micro_batch=2, dtype=BF16).launch(batch()),
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
    step = TrainStep(model, micro_batch=2)

    def counted(self):
        asked[0] += 1
        return inner(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "to_local", counted)
        for _ in range(2):
            loss = step(batch())
            grads = [one.grad for one in model.parameters()]
            assert all(isinstance(one, DTensor) for one in grads)
            found += [loss, *(local_data(one).clone() for one in grads if one is not None)]
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
