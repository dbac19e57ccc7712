"""A loop of one's own that saves: it goes on bit for bit, or is refused before anything is lost."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.configs import TINIEST_LLAMA
from support.families import family_and_config, model_of
from support.inputs import saver_of
from support.refusals import Refused, refusals
from torch import nn
from trilith.checkpoints import Progress, load, load_source, read_source, save
from trilith.checkpoints.mirror import LatestOnly
from trilith.parallel_state import BadCheckpoint, BadInput, Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import Precision, make_adamw, shard_over_data


class Two(nn.Module):
    """Use the second layer in some steps only."""

    def __init__(self):
        super().__init__()
        self.often, self.rarely = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        y = self.often(x)
        return self.rarely(y) if both else y


def state_of(layout):
    return ParallelState.alone() if layout.world == 1 else ParallelState.start(layout)


def made(layout, **how):
    state = state_of(layout)
    model = Two() if layout.world == 1 else shard_over_data(Two(), state, Precision())
    initialize(model, 1, state=state)
    return state, model, torch.optim.AdamW(model.parameters(), lr=0.1, **how)


def step(model, optimizer, both):
    optimizer.zero_grad()
    model(torch.ones(2, 4).tril(), both).square().sum().backward()
    optimizer.step()


def with_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def zoo(layout):
    state = state_of(layout)
    model = model_of(TINIEST_LLAMA, state=state, device="cpu")
    initialize(model, 3, state=state)
    return model, make_adamw(model, lr=1e-2)


def interrupted_zoo(root, layouts):
    """Let norms have gradients in one step of two on each stage; return how many updates they remember."""
    model, optimizer = zoo(layouts[0])
    for number in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = None if number and "norm" in name else torch.ones_like(parameter)
        optimizer.step()
    save(root, model, optimizer, step=2)
    model, optimizer = zoo(layouts[1])
    load(root, model, optimizer)
    return {name: float(optimizer.state[one]["step"]) for name, one in model.named_parameters()}


def test_every_rank_remembers_the_updates_of_each_parameter(tmp_path):
    for counts in run_parallel(interrupted_zoo, 2, str(tmp_path), [Layout(pipeline=2), Layout(tensor=2)]):
        assert len(counts) > 4
        assert counts == {name: 1.0 if "norm" in name else 2.0 for name in counts}


def saving(*steps, where="run", model=None, **options):
    """Return what saves a model after these steps; ``Two`` by default."""

    def call(folder):
        for number in steps:
            save(folder / where, model or Two(), step=number, **options)

    return call


def begin(where):
    return lambda folder: saver_of(folder / where, Two())


def save_family(folder):
    save(folder / "run", zoo(Layout())[0], step=3, keep=1)


def below_our_own(folder):
    """Leave an older checkpoint of another module below one of this one, as somebody who copies may."""
    saving(1, model=nn.Linear(4, 4))(folder)
    saving(3, where="other")(folder)
    (folder / "other" / "step-00000003").rename(folder / "run" / "step-00000003")


def link_to_nowhere(folder):
    (folder / "link").symlink_to(folder / "nowhere")


ONE, LINEAR = saving(1), saving(1, 2, model=nn.Linear(4, 4))
ANOTHER = r"step-00000002: 'often.weight': expected \[.*, found no such tensor. It is .* of another model"
REFUSED = [
    # A number that would delete all checkpoints.
    *(Refused(f"keep-{keep}", saving(2, keep=keep), "keep: expected a whole number of 1 or more", given=ONE)
      for keep in (0, -1, 1.5, True, None)),
    *(Refused(f"step-{step}", saving(step), "step: expected a whole number of 0 or more")
      for step in (-1, 1.5, True, "3", None)),
    # Another model's checkpoints, which would be deleted as this one's.
    Refused("checkpoints of another module", saving(3, keep=1), ANOTHER, given=LINEAR),
    Refused("an older checkpoint of another module", saving(4), "step-00000001: .* of another model",
            given=below_our_own),
    Refused("checkpoints of no family", save_family, "choose another folder", given=LINEAR),
    *(Refused(f"a file: {where}", saving(1, where=where), "file: expected a directory, found a file",
              given=lambda folder: (folder / "file").write_text("mine")) for where in ("file", "file/in it")),
    *(Refused(f"a link: {where}", begin(where), "link: expected a directory, found a link to nowhere",
              given=link_to_nowhere) for where in ("link", "link/in it")),
]  # fmt: skip
test_what_cannot_be_saved_is_refused = refusals(REFUSED)


@pytest.mark.parametrize("kind", ["module", "model"])
def test_moments_are_not_read_in_another_dtype_and_weights_alone_are(kind, tmp_path):
    family, config = family_and_config(TINIEST_LLAMA)
    for dtype in (torch.float32, torch.bfloat16):
        if kind == "model":
            model = family.build(config, device="cpu", dtype=dtype)
        else:
            model = Two().to(dtype)
        initialize(model, 1)
        optimizer = make_adamw(model, lr=0.1)
        if dtype is torch.float32:
            with_gradients(model)
            optimizer.step()
            save(tmp_path, model, optimizer, step=1)
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(BadInput, match=r"dtype: expected float32, as the run's .* are, found bfloat16"):
        load(tmp_path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert load(tmp_path, model).step == 1


def test_a_parameter_frozen_before_and_trained_now_has_no_moments_to_go_on_with(tmp_path):
    _, model, optimizer = made(Layout())
    model.rarely.requires_grad_(False)
    step(model, optimizer, True)
    save(tmp_path, model, optimizer, step=1)
    _, model, optimizer = made(Layout())
    with pytest.raises(BadCheckpoint, match=r"exp_avg\.rarely\.weight: .* found none: it was frozen"):
        load(tmp_path, model, optimizer)


def test_ctrl_c_while_a_thread_starts_leaves_nothing_to_wait_for(tmp_path):
    interrupt = mock.patch("threading.Thread.start", side_effect=KeyboardInterrupt)
    saver = saver_of(tmp_path, nn.Linear(1, 1), background=True)
    with pytest.raises(KeyboardInterrupt), saver, interrupt:
        saver.save(Progress(1, Layout()))
    latest = LatestOnly("copies", print)
    with pytest.raises(KeyboardInterrupt), interrupt:
        latest.begin(1)
    latest.wait()


def opened_apart(root):
    """Rank 1 opens the folder after another step was saved into it."""
    state = ParallelState.start(Layout(tensor=2))
    source = read_source(root) if state.rank == 0 else None
    dist.barrier()
    if source is None:
        save_weights(root, 2)
        source = read_source(root)
    try:
        load_source(source, zoo(state.layout)[0])
    except BadCheckpoint as error:
        return str(error)
    return "loaded"


def save_weights(root, number):
    model, _ = zoo(Layout())
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(number)
    save(root, model, step=number, keep=9)


def test_ranks_that_opened_different_checkpoints_are_refused(tmp_path):
    save_weights(str(tmp_path), 1)
    for answer in run_parallel(opened_apart, 2, str(tmp_path)):
        assert "expected the same checkpoint on every rank, found step-00000001 and step-00000002" in answer
