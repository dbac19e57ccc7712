"""A model that trilith has never seen, half of it torch's own layers, trained in any layout."""

import torch
from torch import nn
from trilith.layers import MLP, LayerNorm
from trilith.parallel_state import Layout, ParallelState, clip_gradients, initialize
from trilith.testing import run_parallel
from trilith.training import Precision, Step, make_adamw, shard_batch, shard_over_data
from trilith.training.zero_on_fsdp import find_blocks

LAYOUTS = (
    Layout(tensor=2),
    Layout(data_replicate=2),
    Layout.of(data=2, zero=1),
    Layout.of(tensor=2, data=2, zero=3),
    Layout.of(data=4, zero=2, data_replicate=2),
)


class Net(nn.Module):
    def __init__(self, state=None):
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([MLP(16, 32, state=state) for _ in range(2)])
        self.norm = LayerNorm(16, state=state)
        self.leave = nn.Linear(16, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        y = self.leave(self.norm(x))
        return y


def loss(y, samples):
    """Leave out some of the targets, unevenly over the samples."""
    counts = samples["counts"]
    return ((y - samples["wanted"]).square().sum(-1) * counts).sum(), counts.sum()


def batch():
    g = torch.Generator().manual_seed(0)
    counts = (torch.rand(4, 5, generator=g) < 0.6).double()
    x, wanted = (torch.randn(4, 5, size, generator=g, dtype=torch.float64) for size in (6, 3))
    return {"x": x, "wanted": wanted, "counts": counts}


def train(layouts):
    torch.set_default_dtype(torch.float64)
    curves = []
    for layout in layouts:
        state = ParallelState.start(layout)
        model = shard_over_data(Net(state), state, Precision(*[torch.float64] * 3))
        initialize(model, 3, state=state)
        step, optimizer = Step(model, loss, micro_batch=1, state=state), make_adamw(model, lr=1e-2)
        curve = []
        for _ in range(3):
            mean = step(shard_batch(batch(), state))
            norm = clip_gradients(model, 0.1, state=state)
            optimizer.step()
            optimizer.zero_grad()
            curve.append((float(mean), float(norm)))
        curves.append(curve)
    return curves


def test_three_steps_are_torchs_own_in_every_layout():
    with_two, with_four = ([one for one in LAYOUTS if one.world == world] for world in (2, 4))
    found = [*run_parallel(train, 2, tuple(with_two))[1], *run_parallel(train, 4, tuple(with_four))[3]]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Net()
        initialize(model, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.param_groups.clear()
        for decay, dims in ((0.1, (2,)), (0.0, (1,))):
            params = [p for p in model.parameters() if p.ndim in dims]
            optimizer.add_param_group({"params": params, "weight_decay": decay})
        expected = []
        for _ in range(3):
            total, count = loss(model(batch()["x"]), batch())
            (total / count).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            expected.append((float(total.detach() / count), float(norm)))
    finally:
        torch.set_default_dtype(before)
    for layout, curve in zip([*with_two, *with_four], found, strict=True):
        assert torch.allclose(torch.tensor(curve), torch.tensor(expected), rtol=1e-10, atol=0), layout


def test_blocks_are_found_in_lists_but_not_in_lists_within_lists():
    model = Net()
    assert find_blocks(model) == [*model.blocks]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU())
    assert find_blocks(nested) == [nested[0]]
    assert find_blocks(nn.Linear(2, 2)) == []
    grouped = nn.ModuleList([nn.ModuleDict({"a": nested[0], "b": nested[0]})])  # a dict computes nothing
    assert find_blocks(grouped) == [nested[0]]


def test_the_model_is_given_what_its_forward_names():
    model = Net()
    initialize(model, 0)
    float(Step(model, loss, micro_batch=2)({k: v.float() for k, v in batch().items()}))
    assert all(p.grad is not None for p in model.parameters())
