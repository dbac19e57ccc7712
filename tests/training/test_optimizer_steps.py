"""Steps of torch's optimizers: in every layout the numbers of one process, or a refusal."""

import inspect
import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from support.refusals import refusal_of
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate
from trilith.layers import ColumnParallelLinear, RowParallelLinear, Stage, VocabParallelEmbedding
from trilith.parallel_state import BadInput, Cut, Layout, ParallelState, declare, initialize
from trilith.parallel_state.engine import is_dtensor, local_data, tensors_in
from trilith.parallel_state.engine.autograd_and_compiler import TorchDispatchMode
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, pieces
from trilith.training import Precision, shard_over_data

#: Options with which each of torch's optimizers steps.
OPTIONS = {
    "Adadelta": ({},),
    "Adafactor": ({"foreach": True},),
    "Adagrad": ({"fused": True},),
    "Adam": ({"amsgrad": True, "foreach": True},),
    "AdamW": ({}, {"fused": True}),
    "Adamax": ({"foreach": True},),
    "ASGD": ({"t0": 1.0, "foreach": True},),
    "LBFGS": ({"max_iter": 3},),
    "Muon": ({},),
    "NAdam": ({"foreach": True},),
    "RAdam": ({"foreach": True},),
    "RMSprop": ({"momentum": 0.9, "centered": True, "foreach": True},),
    "Rprop": ({}, {"foreach": True}),
    "SGD": ({"momentum": 0.9, "dampening": 0.3}, {"foreach": True, "momentum": 0.9}, {"fused": True}),
}
ROWS = [(kind, options) for kind, several in OPTIONS.items() for options in several]
PIECE, MESHES = "expected all of 128x6, found a piece", "expected all parameters on one mesh, found 2 meshes"
STAGE = "expected all parameters of the model, found those of one of 2 stages"
#: Layouts, whether a parameter is cut that torch knows nothing of, and which optimizers are refused there.
REFUSED = {
    "data": (Layout.of(data=2), False, {}),
    "pipeline": (Layout(pipeline=2), False, {"LBFGS": STAGE}),
    "tensor": (Layout(tensor=2), False, {"Adafactor": PIECE, "LBFGS": MESHES}),
    "own": (
        Layout.of(tensor=2, data=2, zero=3), True,
        {"Adafactor": PIECE, "LBFGS": MESHES, "Muon": "blocks.0.own.weight: expected all of 12x6"},
    ),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, own, state):
        super().__init__()
        self.embed = VocabParallelEmbedding(50, 6, state=state)
        self.up, self.down = ColumnParallelLinear(6, 12, state=state), RowParallelLinear(12, 6, state=state)
        self.norm = nn.LayerNorm(6)
        if own:
            self.own = nn.Linear(6, 12 // state.tensor.size, bias=False)
            declare(self.own, "weight", cut=Cut(0), state=state)


class Updates(TorchDispatchMode):
    """Record the types of the tensors that the optimizer's kernels are given."""

    def __init__(self):
        super().__init__()
        self.given = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.given |= {type(tensor) for tensor in tensors_in(args)}
        return func(*args, **(kwargs or {}))


def made(own, state):
    """Return this rank's part of a model with its weights."""
    blocks = Stage.of(2, state=state).blocks
    model = nn.Module()
    model.blocks = nn.ModuleDict({str(block): Block(own, state) for block in blocks})
    shard_over_data(model.double(), state, Precision(*[torch.float64] * 3))
    initialize(model, 1, state=state)
    return model


def stepped(kind, options, own, state):
    """Take three steps whose gradients follow from the weights; the second has its moments already."""
    model = made(own, state)
    trained = [parameter for parameter in model.parameters() if kind != "Muon" or parameter.ndim == 2]
    optimizer = getattr(torch.optim, kind)(trained, lr=0.05, **options)

    def closure():
        for parameter in trained:
            grad = torch.sin(3 * parameter.detach())  # padding stays zero
            if kind != "LBFGS" and is_dtensor(grad) and grad.device_mesh.ndim == 1:
                grad = grad.redistribute(placements=[Replicate()])  # as operators of a loop may leave it
            parameter.grad = grad
        return 0.0

    updates = Updates()
    for step in range(3):
        closure()
        with updates if step == 1 and kind not in ("LBFGS", "Muon") else nullcontext():
            optimizer.step(closure if kind == "LBFGS" else None)
    assert not any(issubclass(one, DTensor) for one in updates.given), kind
    for parameter, kept in optimizer.state.items():
        moments = [one for one in kept.values() if isinstance(one, torch.Tensor) and one.dim()]
        assert kind == "LBFGS" or all(is_dtensor(moment) == is_dtensor(parameter) for moment in moments)
    return pieces(model, state)


def all_stepped(layout, own):
    """Step with each optimizer; Muon without rounding to bfloat16, which hides what layouts change."""
    state, made = ParallelState.start(layout), []
    for kind, options in ROWS:
        try:
            with (
                mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double),
                mock.patch.object(torch, "bfloat16", torch.float64),
            ):
                made.append(stepped(kind, options, own, state))
        except BadInput as error:
            made.append(str(error))
    return made


@pytest.mark.parametrize("where", REFUSED)
def test_every_optimizer_of_torch_steps_as_on_one_process_or_is_refused(where):
    layout, own, refused = REFUSED[where]
    kinds = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert kinds - {"Optimizer", "SparseAdam"} == {*OPTIONS}, "one that nobody has looked at"
    alone = run_parallel(all_stepped, 1, Layout(), own)[0]
    ranks = run_parallel(all_stepped, layout.world, layout, own)
    for (kind, options), expected, *parts in zip(ROWS, alone, *ranks, strict=True):
        if kind in refused:
            assert all(f"{kind}.step: " in part and refused[kind] in part for part in parts), parts
            continue
        assert not any(isinstance(part, str) for part in parts), parts
        whole = assemble(parts)
        for name, weight in assemble([expected]).items():
            torch.testing.assert_close(
                whole[name], weight, rtol=0, atol=1e-10, msg=f"{kind} {options} {name}"
            )


def scaled(layout, scaler, fused, refused):
    """Return the refusal of a step, or whether one moved a weight here after an overflow of rank 0 alone."""
    state = ParallelState.start(layout)
    model = made(True, state)
    parameters = [one for one in model.parameters() if is_dtensor(one) == (layout.zero > 0)]
    optimizer, scaler = torch.optim.SGD(parameters, 1.0, fused=fused), scaler("cpu", init_scale=8.0)
    if hasattr(scaler, "process_group"):
        scaler.process_group = None  # torch's default is the group of all at its import, which may be gone
    scaler.scale(torch.ones(()))
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.ones_like(parameter)
        local_data(parameter.grad).fill_(1.0 if refused or state.rank or number else math.inf)
    before = [local_data(parameter).clone() for parameter in parameters]
    if refused:
        return refusal_of(lambda: scaler.step(optimizer))
    scaler.step(optimizer)
    return not all(map(torch.equal, before, map(local_data, parameters)))


ALONE = "SGD.step: GradScaler: expected a decision to skip of 2 ranks, found one of 1 rank. Take torch's S"


@pytest.mark.parametrize(("layout", "scaler", "fused", "refused"), [
    (Layout(pipeline=2), GradScaler, False, ALONE),
    (Layout(pipeline=2), ShardedGradScaler, True, ALONE.replace("step: ", "step: Sharded")),
    (Layout(pipeline=2), ShardedGradScaler, False, None),
    (Layout(tensor=2), GradScaler, False, ALONE),
    (Layout.of(data=2, zero=3), GradScaler, True, None),
], ids=str)  # fmt: skip
def test_ranks_skip_the_same_steps_under_a_scaler_of_torch_or_it_is_refused(layout, scaler, fused, refused):
    for outcome in run_parallel(scaled, 2, layout, scaler, fused, refused):
        assert outcome.startswith(refused) if refused else not outcome, outcome
