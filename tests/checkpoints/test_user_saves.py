"""A loop of one's own that saves: it goes on bit for bit, or is refused before anything is lost."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.configs import TINIEST_LLAMA
from support.families import model_of
from support.inputs import saver_of
from support.refusals import Refused, refusals
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from trilith.checkpoints import Progress, convert, convert_to_dcp, load, load_source, read_source, save
from trilith.checkpoints.mirror import LatestOnly
from trilith.parallel_state import BadCheckpoint, BadInput, Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import make_adamw


def two():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def zoo(layout, frozen=""):
    state = ParallelState.alone() if layout.world == 1 else ParallelState.start(layout)
    model = model_of(TINIEST_LLAMA, state=state, device="cpu")
    initialize(model, 3, state=state)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    return model, make_adamw(model, lr=1e-2)


def interrupted_zoo(root, layouts):
    """Let norms have gradients in one step of two on each stage, but the last one, which is frozen and on the
    last stage; return how many updates the others remember.
    """
    model, optimizer = zoo(layouts[0], "norm.weight")
    for number in range(2):
        for name, parameter in model.named_parameters():
            still = name == "norm.weight" or (number and "norm" in name)
            parameter.grad = None if still else torch.ones_like(parameter)
        optimizer.step()
    save(root, model, optimizer, step=2)
    model, optimizer = zoo(layouts[1], "norm.weight")
    load(root, model, optimizer)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return {name: float(optimizer.state[one]["step"]) for name, one in trained.items()}


def test_every_rank_remembers_the_updates_of_each_parameter(tmp_path):
    for counts in run_parallel(interrupted_zoo, 2, str(tmp_path), [Layout(pipeline=2), Layout(tensor=2)]):
        assert len(counts) > 4
        assert counts == {name: 1.0 if "norm" in name else 2.0 for name in counts}
    convert_to_dcp(tmp_path, tmp_path.with_name("dcp"))
    written = FileSystemReader(tmp_path.with_name("dcp")).read_metadata().state_dict_metadata
    frozen = {name for name in written if ".norm." in name}
    assert frozen == {"model.model.norm.weight"} and len(written) > 4 * len(counts)


def saving(*steps, where="run", model=None, **options):
    """Return what saves a model after these steps; ``two()`` by default."""

    def call(folder):
        for number in steps:
            save(folder / where, model or two(), step=number, **options)

    return call


def begin(where):
    return lambda folder: saver_of(folder / where, two())


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
ANOTHER = r"step-00000002: '0.weight': expected \[.*, found no such tensor. It is .* of another model"
test_what_cannot_be_saved_is_refused = refusals(
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
)  # fmt: skip


@pytest.mark.parametrize("make", [
    lambda dtype: two().to(dtype), lambda dtype: model_of(TINIEST_LLAMA, device="cpu", dtype=dtype),
], ids=["module", "model"])  # fmt: skip
def test_moments_are_not_read_in_another_dtype_and_weights_alone_are(make, tmp_path):
    models = [make(dtype) for dtype in (torch.float32, torch.bfloat16)]
    for model in models:
        initialize(model, 1)
    optimizers = [make_adamw(model, lr=0.1) for model in models]
    step(models[0], optimizers[0])
    save(tmp_path, models[0], optimizers[0], step=1)
    before = [one.clone() for one in models[1].parameters()]
    with pytest.raises(BadInput, match=r"dtype: expected float32, as the run's .* are, found bfloat16"):
        load(tmp_path, models[1], optimizers[1])
    assert all(map(torch.equal, before, models[1].parameters()))
    assert load(tmp_path, models[1]).step == 1


def test_a_parameter_frozen_before_and_trained_now_has_no_moments_to_go_on_with(tmp_path):
    model = two()
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    model = two()
    with pytest.raises(BadCheckpoint, match=r"exp_avg\.1\.weight: .* found none: it was frozen"):
        load(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_a_conversion_to_another_dtype_casts_weights_and_no_moments(tmp_path):
    model = two()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save(tmp_path / "run", model, optimizer, step=1)
    convert(tmp_path / "run", tmp_path / "cast", to="sharded", dtype="bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in read_source(tmp_path / "cast").ours.items()}
    assert dtypes["0.weight"] != dtypes["optimizer.exp_avg.0.weight"], dtypes
    assert {dtype for name, dtype in dtypes.items() if name.startswith("optimizer.")} == {"F32"}


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
