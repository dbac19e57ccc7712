"""A loop of a user's own: layers that are reset, wrappers that are refused."""

import re
import warnings
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from support.configs import TINY_GLM
from support.families import model_of
from support.refusals import refusal_of
from support.round_trips import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trilith.checkpoints import load, save
from trilith.cli.app import run
from trilith.layers import (
    ColumnParallelLinear,
    Experts,
    LayerNorm,
    PositionEmbedding,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    TopKRouter,
    VocabParallelEmbedding,
    VocabParallelHead,
    find_blocks,
)
from trilith.parallel_state import (
    Cut,
    Layout,
    ParallelState,
    clip_gradients,
    declare,
    finalize_gradients,
    initialize,
    local,
)
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, pieces
from trilith.training import Precision, Step, shard_over_data

LAYERS = {
    "column": lambda s: ColumnParallelLinear(6, 12, state=s),
    "columns": lambda s: ColumnParallelLinear(6, {"q": 12, "k": 12}, state=s),
    "row": lambda s: RowParallelLinear(12, 6, state=s),
    "embedding": lambda s: VocabParallelEmbedding(50, 6, state=s),
    "head": lambda s: VocabParallelHead(6, 50, state=s),
    "position": lambda s: PositionEmbedding(8, 6, state=s),
    "rms": lambda s: RMSNorm(6, state=s),
    "norm": lambda s: LayerNorm(6, state=s),
    "experts": lambda s: Experts(4, 6, 12, state=s),
    "router": lambda s: TopKRouter(6, 4, 2, state=s),
}


def reset_all(layout):
    """Build each without memory, give it memory with nothing in it, and reset it, as torch's recipes do."""
    state, made = ParallelState.start(layout), {}
    for name, make in LAYERS.items():
        with torch.device("meta"):
            model = nn.Sequential(make(state))
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            local_data(parameter).fill_(float("nan"))
        torch.manual_seed(5)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        made[name] = pieces(model, state)
    return made


def test_every_layer_is_reset_to_the_same_bits_in_every_layout():
    of_worlds = []
    for world in (1, 2, 3):
        ranks = run_parallel(reset_all, world, Layout(tensor=world))
        of_worlds.append({key: assemble([rank[key] for rank in ranks]) for key in ranks[0]})
    for name, whole in of_worlds[0].items():
        assert whole and not any(bool(tensor.isnan().any()) for tensor in whole.values()), name
        for others in of_worlds[1:]:
            assert_same(others[name], whole)
        torch.manual_seed(5)
        born = nn.Sequential(LAYERS[name](ParallelState.alone()))
        assert_same({key: born.get_parameter(key)[: len(tensor)] for key, tensor in whole.items()}, whole)


def test_every_layer_with_parameters_can_be_reset():
    from trilith import layers

    for name, one in vars(layers).items():
        if isinstance(one, type) and issubclass(one, nn.Module) and "weight" in one.__annotations__:
            assert hasattr(one, "reset_parameters"), name


def refusals_of(model, **state):
    """Return what each part of a loop says of the model."""
    uses = (
        lambda: finalize_gradients(model, **state),
        lambda: clip_gradients(model, 1.0, **state),
        lambda: Step(model, squares, micro_batch=1, **state),
    )
    return [*map(refusal_of, uses)]


def ddp(model, state):
    return DistributedDataParallel(model, device_mesh=state.data_mesh)


def sharded(model, state):
    return fully_shard(model, mesh=state.data_mesh)


def ddp_over_all(model, state):
    """Leave out its reducer, which nothing here comes to use."""
    made = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(made)
    made.module, made.process_group = model, dist.group.WORLD
    return made


def ddp_that_ignores(model, state):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    return ddp(model, state)


FOUND = (
    "expected a module that shard_over_data shares.* found {}, which averages gradients( over ranks 0, 1)?. "
)
FOUND += r"Take shard_over_data\(model, state, Precision\(\)\) instead"
LEFT_OUT = r"0\.weight: expected all trained parameters in torch's wrapper"
#: Of ranks that hold other layers, of all data ranks, and of those among tensor ranks.
STAGES, DATA, TENSOR = Layout(pipeline=2), Layout.of(data=4), Layout.of(data=2, tensor=2, sequence=True)
WRAPPED = {
    "ddp": (STAGES, FOUND.format("DistributedDataParallel"), ddp_over_all),
    "fsdp1": (
        STAGES, FOUND.format("FullyShardedDataParallel"),
        lambda model, state: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    ),
    "fully_shard": (
        STAGES, FOUND.format("fully_shard of torch"),
        lambda model, state: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    ),
    "ddp of cut weights": (TENSOR, FOUND.format("DistributedDataParallel"), ddp),
    "ddp of a part": (DATA, LEFT_OUT, lambda model, state: nn.Sequential(model[0], ddp(model[1], state))),
    "ddp that ignores": (DATA, LEFT_OUT, ddp_that_ignores),
    "fully_shard of a part": (
        DATA, LEFT_OUT, lambda model, state: nn.Sequential(model[0], sharded(model[1], state)),
    ),
    "fully_shard that ignores": (
        DATA, LEFT_OUT,
        lambda model, state: fully_shard(model, mesh=state.data_mesh, ignored_params={model[0].weight}),
    ),
}  # fmt: skip


def refused(how):
    layout, _, wrap = WRAPPED[how]
    state = ParallelState.start(layout)
    layers = ColumnParallelLinear(8, 12, state=state), RowParallelLinear(12, 8, state=state)
    model = wrap(nn.Sequential(*layers), state)
    return [*refusals_of(model, state=state), refusal_of(lambda: shard_over_data(model, state, Precision()))]


@pytest.mark.parametrize("how", WRAPPED)
def test_torchs_wrappers_over_our_layers_are_refused_with_the_way_to_go(how):
    layout, says, _ = WRAPPED[how]
    for of_sums, *others in run_parallel(refused, layout.world, how):
        assert re.search(says, of_sums)
        assert (" over ranks 0, 1" in of_sums) == (how in ("ddp", "fully_shard"))
        assert all(re.search(f"{says}|{FOUND.format('.*')}", line) for line in others), others


def averaged():
    """Return a step's refusals of models with a state of one rank, in wrappers over two."""
    cut = fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (2,)))
    models = DistributedDataParallel(nn.Linear(4, 6)), cut
    return [refusal_of(lambda model=model: Step(model, squares, micro_batch=1)) for model in models]


def test_a_wrapper_over_ranks_that_the_step_does_not_know_is_refused():
    for averaging, cut in run_parallel(averaged, 2):
        assert "found DistributedDataParallel, which averages gradients" in averaging
        assert "and weight is cut for 2 ranks. Pass it: step(..., state=state)" in cut


def mean_gradients(wrap, layout):
    """Compare the gradients of a mean loss that torch averages over ``data_mesh`` to those of one process."""
    state, gradients = ParallelState.start(layout), []
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for at in (ParallelState.alone(), state):
        model = nn.Sequential(
            RMSNorm(8, state=at), ColumnParallelLinear(8, 12, state=at), nn.GELU(),
            RowParallelLinear(12, 8, bias=True, state=at),
        ).double()  # fmt: skip
        initialize(model, 5, state=at)
        mine = x
        if at is state:
            model, mine = wrap(model, state), x.chunk(layout.data)[state.data_index]
        piece = mine.chunk(at.tensor.size, dim=1)[at.tensor.index] if at.sequence else mine
        (model(piece).pow(2).sum() / mine.numel()).backward()
        finalize_gradients(model, state=at)
        grads = [parameter.grad for parameter in model.parameters()]
        gradients.append([grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads])
    for averaged, alone in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(averaged, alone, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("wrap", "layout"), [
    (ddp, DATA), (ddp, Layout.of(data=4, zero=1)), (sharded, DATA),
    (sharded, Layout.of(data=4, zero=2, data_replicate=2)),
    (sharded, Layout.of(data=2, zero=3, tensor=2, sequence=True)),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_torchs_wrappers_over_the_data_mesh_are_right_with_a_mean_loss(wrap, layout):
    run_parallel(mean_gradients, 4, wrap, layout)


class Unfit(nn.Linear):
    """A layer beside a parameter that is computed with, and gets its gradient, in another's place."""

    def __init__(self, what, state):
        super().__init__(4, 4)
        self.cut = ColumnParallelLinear(4, 4, state=state)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        if what in ("complex128", "float64", "bfloat16"):
            self.scale = nn.Parameter(torch.ones(4, dtype=getattr(torch, what)))
        elif what == "hook":
            self.weight.register_hook(lambda grad: 3 * grad)


REPLACED = "^model: weight: expected the parameter that shard_over_data has sharded, found another tensor"
UNFIT = {
    "parametrized": "finalize_gradients: cut.weight: expected the parameter that is declared, found none",
    "normalized": "shard_over_data: cut.weight: expected the parameter that is declared, found none",
    "normalized piece": "parametrizations.weight.original1: expected .* is declared, found that of a param",
    "replaced": REPLACED,
    "replaced, then called": REPLACED,
    "called alone": "shard_over_data: cut: expected a call within the model's forward, .* found a call",
    "called first": "shard_over_data: blocks.0: expected a call within the model's forward",
    "copied": "copy: model: expected one that is not sharded, found a sharded one. Copy it before",
    "hook": "shard_over_data: weight: expected a parameter without hooks, found one whose hook no backward",
    "hook afterwards": "finalize_gradients: weight: expected a parameter without hooks",
    "hook, then a step": "SGD.step: weight: expected a parameter without hooks",
    "passed by": "backward: weight: expected a gradient of the model's forward, which data ranks add up",
    "added afterwards": "finalize_gradients: later: expected a parameter that shard_over_data has seen",
    "complex128": "shard_over_data: scale: expected real numbers, found complex ones",
    "float64": "shard_over_data: .*: expected the dtype of .*, which is gathered with it, torch.float",
    "bfloat16": "shard_over_data: scale: expected torch.float32, the master .*, found torch.bfloat16",
}
ZERO_3 = Layout.of(data=2, zero=3)
#: What a sharded model refuses by itself.
USES = {
    "replaced": lambda model, x: functional_call(model, {"weight": x}, (model(x),)),
    "replaced, then called": lambda model, x: functional_call(model, {"weight": x}, (x,)),
    "called alone": lambda model, x: model.cut(x),
    "called first": lambda model, x: model.blocks[0](x),
    "copied": lambda model, x: deepcopy(model),
}


def unfit(what, layout):
    state = ParallelState.start(layout)
    model = Unfit(what, state)
    if what == "normalized":
        weight_norm(model.cut)
    elif what == "normalized piece":
        declare(weight_norm(model).parametrizations.weight, "original1", cut=Cut(1), state=state)
    later = {"hook afterwards", "hook, then a step", "passed by", "added afterwards", "parametrized", *USES}
    if what not in later:
        return refusal_of(lambda: shard_over_data(model, state, Precision()))
    if what == "parametrized":
        register_parametrization(model.cut, "weight", nn.Identity())
        return refusal_of(lambda: finalize_gradients(model, state=state))
    weight = shard_over_data(model, state, Precision()).weight
    if what in USES:
        return refusal_of(lambda: USES[what](model, torch.ones(4, 4)))
    if what == "passed by":
        return refusal_of(local(weight).sum().backward)
    if what == "added afterwards":
        model.later = nn.Parameter(torch.ones(2))
    else:
        weight.register_hook(lambda grad: 3 * grad)
    if what == "hook, then a step":
        return refusal_of(torch.optim.SGD(model.parameters()).step)
    return refusal_of(lambda: finalize_gradients(model, state=state))


@pytest.mark.parametrize(("what", "layout"), [
    *((what, layout) for what in [*UNFIT][3:] for layout in (Layout.of(data=2), ZERO_3)),
    ("parametrized", Layout(tensor=2)), ("normalized", Layout(tensor=2)), ("hook", Layout(tensor=2)),
    ("hook afterwards", Layout(tensor=2)), ("complex128", Layout(tensor=2)), ("bfloat16", Layout(tensor=2)),
    ("normalized piece", Layout(tensor=2)),
], ids=str)  # fmt: skip
def test_parameters_whose_place_others_take_are_plain(what, layout):
    """Hooks and sums would be left out silently; FSDP raises at the first forward for two dtypes."""
    for line in run_parallel(unfit, 2, what, layout):
        assert re.search(UNFIT[what], line), line


def average_of_weights(layout):
    """Return the outputs of an average of weights, after each step of a model that was copied for it."""
    state = ParallelState.start(layout)
    model = nn.Sequential(ColumnParallelLinear(4, 6, state=state), RowParallelLinear(6, 4, state=state))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for module in (model, average.module):
        shard_over_data(module, state, Precision())
    initialize(model, 1, state=state)
    optimizer, outputs = torch.optim.SGD(model.parameters(), 0.1 / layout.data), []
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        finalize_gradients(model, state=state)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            outputs.append(average(torch.ones(2, 4)))
    return torch.stack(outputs)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout.of(data=2), ZERO_3], ids=str)
def test_an_average_of_weights_is_that_of_one_device(layout):
    (expected,) = run_parallel(average_of_weights, 1, Layout())
    for outputs in run_parallel(average_of_weights, 2, layout):
        assert torch.allclose(outputs, expected, rtol=1e-5)


def without_state(root, layout):
    """Return the error of each call that was given a model of several ranks without ``state=``."""
    state = ParallelState.start(layout)
    model = shard_over_data(nn.Sequential(ColumnParallelLinear(4, 6, state=state)), state, Precision())
    initialize(model, 1, state=state)
    uses = (lambda: save(root, model), lambda: load(root, model))
    return [*refusals_of(model), *map(refusal_of, uses)]


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout.of(data=2, zero=3)], ids=str)
def test_a_state_that_was_left_out_is_refused_by_all_that_takes_one(layout, tmp_path):
    for said in run_parallel(without_state, 2, str(tmp_path / "new"), layout):
        for line in said:
            assert "state: expected the ParallelState that the model was cut with" in line
    assert [*tmp_path.iterdir()] == []


def test_inspect_does_not_count_a_routers_bias(tmp_path, capsys):
    model = model_of(TINY_GLM, device="cpu")
    initialize(model, 0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    save(tmp_path / "run", model)
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    for source, padding in (("run", 0), ("hf", (model.embed.rows - 131) * 32 * 2)):
        capsys.readouterr()
        assert run(["inspect", str(tmp_path / source)]) == 0
        assert f" {trained - padding:,} parameters" in capsys.readouterr().out


def test_blocks_are_found_in_lists_but_not_in_lists_within_lists():
    layers = [nn.Linear(2, 2) for _ in range(2)]
    model = nn.Module()
    model.enter, model.blocks = nn.Linear(2, 2), nn.ModuleList(layers)
    nested = nn.Sequential(nn.Sequential(*layers), nn.ReLU())
    grouped = nn.ModuleList([nn.ModuleDict({"a": nested[0], "b": nested[0]})])  # a dict computes nothing
    assert find_blocks(model) == layers and find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nested) == find_blocks(grouped) == [nested[0]]


class AddedInPlace(nn.Module):
    """Add to what blocks give, which torch's product with a bias makes as a view."""

    def __init__(self, *, state=None):
        super().__init__()
        self.blocks = nn.ModuleList(ReplicatedLinear(8, 8, state=state) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


def squares(output, samples):
    return output.square().sum(), output.numel()


def step_without_a_warning():
    state = ParallelState.start(Layout.of(data=2, zero=3))
    model = shard_over_data(AddedInPlace(state=state), state, Precision(*[torch.float32] * 3))
    initialize(model, 0, state=state)
    with warnings.catch_warnings(action="error"):
        Step(model, squares, micro_batch=1, state=state)({"x": torch.randn(2, 3, 8)})


def test_what_blocks_give_may_be_changed_in_place():
    """FSDP warns of views, of which such a change takes its hook."""
    run_parallel(step_without_a_warning, 2)


def gradients_of_unfrozen(layout, precision):
    """Unfreeze a layer between two steps; return the gradients of the second."""
    state = ParallelState.start(layout)
    model = AddedInPlace(state=state).double()
    model.requires_grad_(False).blocks[1].requires_grad_(True)
    initialize(shard_over_data(model, state, precision), 0, state=state)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(x.chunk(layout.data)[state.data_index]).square().sum().backward()
        model.blocks[0].requires_grad_(True)
    grads = [parameter.grad for block in model.blocks[:2] for parameter in block.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


@pytest.mark.parametrize("layout", [Layout.of(data=2), ZERO_3], ids=str)
def test_what_is_unfrozen_later_has_gradients_in_the_dtype_of_its_weights(layout):
    """FSDP would give the first ones that of the products."""
    casts = Precision(torch.float64, torch.float32, torch.float64)
    (alone,) = run_parallel(gradients_of_unfrozen, 1, Layout(), casts)
    for grads in run_parallel(gradients_of_unfrozen, 2, layout, casts):
        for grad, expected in zip(grads, alone, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)
