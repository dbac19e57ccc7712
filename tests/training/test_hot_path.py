"""Hold what a step costs beside forward and backward: operators, and waits of the host for the device."""

from collections import Counter

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.families import model_of
from torch import Tensor
from trilith.data import Batch
from trilith.data.batch import BatchParts
from trilith.parallel_state import NotTrained, clip_gradients, initialize
from trilith.testing.operators import Operators
from trilith.training import Step, TokenLoss, make_adamw
from trilith.training.update import Update

BATCH = Batch(torch.arange(32).view(4, 8), torch.arange(1, 33).view(4, 8))


def parts(blocks=1, *, fused=True):
    config = TINIEST_LLAMA | {"num_hidden_layers": blocks}
    model = model_of(config, device="cpu")
    initialize(model, 0)
    step = Step(model, TokenLoss(model), micro_batch=2)
    return model, step, Update(model, make_adamw(model, lr=1e-2, fused=fused), clip=0.5)


def test_the_end_of_a_step_takes_as_many_operators_whatever_the_number_of_parameters():
    found = []
    for blocks in (1, 5):
        _, step, update = parts(blocks)
        for _ in range(2):  # the first makes the moments
            result = step.launch(BATCH)
            with Operators() as end:
                update(result)
        found.append(Counter(end.names))
    assert found[0] == found[1]
    assert found[0]["aten::_fused_adamw_"] == 2  # with decay and without


def test_the_host_reads_once_and_after_the_update(monkeypatch):
    """Between the last backward and the optimizer's launch nothing is read from the device."""
    seen = []
    model, step, update = parts()
    step(BATCH)
    model.zero_grad()

    def noted(name):
        inner = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self: (seen.append(name), inner(self))[1])

    for name in ("backward", "tolist", "item", "__bool__", "__float__", "__int__"):
        noted(name)
    update.optimizer.register_step_post_hook(lambda *_: seen.append("update"))
    result = step.launch(BATCH)
    done = update(result)
    assert done.skipped is None
    after = seen[len(seen) - seen[::-1].index("backward") :]
    assert after == ["update", "tolist"]


def test_a_part_of_a_batch_is_asked_for_after_the_backward_of_the_one_before():
    seen, losses, grads = [], [], []

    def coming():
        for part in BATCH.split(2):
            seen.append("part")
            yield part

    for batch in (BATCH, BatchParts(4, 8, 32, coming())):
        model, step, _ = parts()
        model.register_forward_hook(lambda *_: seen.append("forward"))
        model.norm.weight.register_hook(lambda grad: seen.append("backward"))
        losses.append(step(batch))
        grads.append([parameter.grad for parameter in model.parameters()])
    assert seen[4:] == ["part", "forward", "backward"] * 2
    assert torch.equal(*losses) and all(torch.equal(whole, lazy) for whole, lazy in zip(*grads, strict=True))


def stored(model, update):
    moments = [one for state in update.optimizer.state.values() for one in state.values()]
    return [one.detach().clone() for one in (*model.parameters(), *moments)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("fault", ["nan", "infinite loss", "untrained", "zeros"])
def test_an_unfit_step_moves_no_bit_of_weights_or_moments_and_keeps_the_gradients(fault, fused):
    model, step, update = parts(fused=fused)
    update(step.launch(BATCH))
    before = stored(model, update)
    result = step.launch(BATCH)
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    if fault == "nan":
        grads[0].view(-1)[0] = float("nan")
    if fault == "infinite loss":
        result = result._replace(loss=result.loss + float("inf"))
    if fault == "zeros":
        model.zero_grad(set_to_none=False)
    if fault == "untrained":
        model.norm.weight.grad = None
        result = result._replace(checks=result.checks + torch.tensor([0.0, 1.0]))
    if fault in ("nan", "infinite loss"):
        assert update(result).fatal
    else:
        with pytest.raises(NotTrained, match="norm.weight" if fault == "untrained" else "exactly zero"):
            update(result)
    assert all(torch.equal(one, two) for one, two in zip(before, stored(model, update), strict=True))
    assert sum(one.grad is not None for one in model.parameters()) == len(grads) - (fault == "untrained")
    assert update.made == 1


def test_gradients_too_small_to_be_squared_still_train():
    model, step, update = parts()
    update.clip = 0.0
    result = step.launch(BATCH)
    for one in model.parameters():
        assert one.grad is not None
        one.grad.fill_(1e-30)
    before = stored(model, update)
    done = update(result)
    assert done.grad_norm == 0 and done.skipped is None and update.made == 1
    assert not all(torch.equal(one, two) for one, two in zip(before, stored(model, update), strict=False))


def test_the_update_has_the_bits_of_a_loop_of_ones_own():
    made = []
    for own in (False, True):
        model, step, update = parts()
        for _ in range(3):
            if own:
                step(BATCH)
                clip_gradients(model, 0.5)
                update.optimizer.step()
                model.zero_grad()
            else:
                update(step.launch(BATCH))
        made.append(stored(model, update))
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))
