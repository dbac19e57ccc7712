"""Checkpoints of a module that no family describes: any layout reads them, every command knows them."""

from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.refusals import Refused, refusals
from support.round_trips import assert_same
from support.written_before import Embedder
from torch import nn
from torch.testing import assert_close
from trilith.checkpoints import convert, describe_module, load, read_source, save
from trilith.checkpoints.user_module_family import StoredDeclaration, StoredModule
from trilith.cli.app import run
from trilith.layers import Balancing, Experts, MoE, TopKRouter
from trilith.models import Rule
from trilith.parallel_state import (
    BadInput,
    Cut,
    Declaration,
    Layout,
    ParallelState,
    finalize_gradients,
    initialize,
)
from trilith.testing import RankError, run_parallel
from trilith.testing.layouts import assemble, pieces
from trilith.training import Precision, make_adamw, shard_over_data

NAMES = Embedder.names


class Scaled(nn.Linear):
    """Have a scalar parameter, as a logit scale is, and one without elements."""

    def __init__(self):
        super().__init__(3, 3)
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))


def test_a_scalar_parameter_and_one_without_elements_are_compared_and_converted(tmp_path):
    for name, dtype in {"a": torch.float32, "b": torch.float32, "bf16": torch.bfloat16}.items():
        torch.manual_seed(0)
        save(tmp_path / name, Scaled().to(dtype), step=1)
    assert run(["diff", f"{tmp_path}/a", f"{tmp_path}/b"]) == 0
    assert run(["diff", f"{tmp_path}/a", f"{tmp_path}/bf16"]) == 1
    assert run(["convert", f"{tmp_path}/a", f"{tmp_path}/c", "--to", "sharded", "--verify"]) == 0


@pytest.mark.parametrize("kind", ["AdamW", "ASGD", "NAdam"])
def test_what_is_kept_of_a_scalar_parameter_comes_back(kind, tmp_path):
    models = [Scaled(), Scaled()]
    optimizers = [getattr(torch.optim, kind)(model.parameters(), 0.01) for model in models]
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    save(tmp_path, models[0], optimizers[0], step=1)
    load(tmp_path, models[1], optimizers[1])
    saved, loaded = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert_close(loaded, saved, rtol=0, atol=0)


class Routed(nn.Module):
    def __init__(self, *, state=None):
        super().__init__()
        describe_module(self, config={"architectures": ["Routed"]}, names=ROUTED_NAMES)
        router = TopKRouter(8, 4, 2, score="sigmoid", bias_corrected=True, state=state)
        self.blocks = nn.ModuleList([MoE(router, Experts(4, 8, 16, state=state), state=state)])

    def forward(self, x):
        return self.blocks[0](x)


ROUTED_NAMES = (
    Rule("blocks.{i}.router.weight", "h.{i}.router"),
    Rule("blocks.{i}.router.bias", "h.{i}.bias"),
    *(Rule(f"blocks.{{i}}.experts.{part}", f"h.{{i}}.{{e}}.{part}") for part in ("gate", "up", "down")),
)


def routed(state, seed):
    """Make a module in bf16 with biases that bf16 cannot hold, and train it by one step."""
    model = shard_over_data(Routed(state=state).bfloat16(), state, Precision(*[torch.bfloat16] * 3))
    initialize(model, seed, state=state)
    optimizer, balancing = make_adamw(model, lr=0.1), Balancing(model, rate=1 / 3, state=state)
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    model(x).square().sum().backward()
    finalize_gradients(model, state=state)
    optimizer.step()
    optimizer.zero_grad()
    balancing.after_step()
    return model, optimizer


def in_each(root, layouts):
    """Save in the first layout, load and save again in each of the others; return the weights in each."""
    weights = []
    for number, layout in enumerate(layouts):
        state = ParallelState.start(layout)
        model, optimizer = routed(state, number)
        if number:
            loaded = load(f"{root}/{number - 1}", model, optimizer, state=state)
            assert (loaded.step, loaded.extra, loaded.memory["updates"]) == (1, [1, {}], 1)
        save(f"{root}/{number}", model, optimizer, step=1, extra=[1, {}], state=state)
        weights.append(pieces(model, state))
    return weights


def test_a_routers_bias_is_saved_with_the_module_in_fp32(tmp_path):
    layouts = [
        Layout(tensor=2),
        *(Layout.of(data=2, **how) for how in ({"zero": 3, "expert": 2}, {"expert": 2}, {})),
    ]
    ranks = run_parallel(in_each, 2, str(tmp_path), layouts)
    whole = [assemble([rank[number] for rank in ranks]) for number in range(len(layouts))]
    for one in whole:
        bias = one["blocks.0.router.bias"]
        assert bias.dtype == torch.float32 and {round(float(x) * 3, 6) for x in bias} >= {-1.0, 1.0}
        assert_same(one, whole[0])
    source = read_source(tmp_path / "3")
    dtypes = {name: tensor.dtype for name, tensor in source.catalog.items()}
    assert [name for name, dtype in dtypes.items() if dtype != "BF16"] == ["blocks.0.router.bias"]
    assert not [name for name in dtypes if name.startswith("optimizer.") and name.endswith("router.bias")]
    # Dealt out or not, experts are exported one by one and taken back.
    assert run(["convert", str(tmp_path / "2"), str(tmp_path / "hf"), "--to", "hf", "--verify"]) == 0
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(theirs["h.0.3.down"], whole[0]["blocks.0.experts.down"][3])
    model = Routed().bfloat16()
    load(tmp_path / "hf", model)
    assert torch.equal(model.blocks[0].experts.up, whole[0]["blocks.0.experts.up"])


def test_everything_that_is_declared_but_the_start_is_stored():
    declared = {one.name for one in fields(Declaration)} - {"initial"}
    assert declared | {"stages", "blocks"} == set(StoredDeclaration.model_fields)
    every = Declaration((3, 8), Cut(1, unit=2), 4, ("tensor",), True, True, True)
    (stored,) = StoredModule.of([{"x": every}], ()).declarations.values()
    assert stored.restored() == every


def trained_and_saved(root):
    state = ParallelState.start(Layout(tensor=2))
    model = Embedder(state=state)
    initialize(model, 1, state=state)
    optimizer = make_adamw(model, lr=0.1)
    for _ in range(2):
        model(torch.arange(8).view(1, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(root, model, optimizer, step=2, extra={"at": 5}, state=state)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("module") / "run"
    run_parallel(trained_and_saved, 2, str(root))
    return root


def test_the_commands_know_a_user_module(written, tmp_path, capsys):
    assert run(["inspect", str(written)]) == 0
    assert "checkpoint (training) of embedder, 1,080 parameters" in capsys.readouterr().out
    assert run(["verify", str(written)]) == 0
    out = tmp_path / "four"
    assert run(["reshard", str(written), str(out), "--tensor", "4"]) == 0
    assert run(["diff", str(written), str(out)]) == 0
    files = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert [file["blocks.1.down.weight"].shape for file in files] == [(8, 4)] * 4
    assert [len(file["embed.weight"]) for file in files] == [32, 5, 0, 0]  # 37 rows of 128, padding left out
    eight = tmp_path / "eight"
    assert run(["reshard", str(out), str(eight), "--tensor", "8"]) == 0  # from 4 files to 8
    assert run(["diff", str(written), str(eight)]) == 0
    assert [file["gain.weight"].shape for file in files] == [(8,)] * 4
    source = read_source(out)
    assert source.manifest is not None
    assert source.updates == 2 and source.manifest.extra == {"at": 5}
    capsys.readouterr()
    assert run(["reshard", str(written), str(tmp_path / "no"), "--tensor", "3"]) == 2
    refusal = "16 units of 1 on dim 0: expected a number that tensor=3 divides, found 16"
    assert refusal in capsys.readouterr().err
    assert run(["reshard", str(written), str(tmp_path / "no"), "--pipeline", "2"]) == 2
    assert "pipeline: expected 1, found 2" in capsys.readouterr().err


def test_a_user_module_is_exported_under_other_names_and_read_back(written, tmp_path):
    assert run(["convert", str(written), str(tmp_path / "hf"), "--to", "hf", "--verify"]) == 0
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(theirs) == {"wte", "gain.weight", "gain.bias"} | {
        f"h.{i}.{n}" for i in (0, 1) for n in ("fused", "down")
    }
    model = Embedder()
    load(tmp_path / "hf", model)
    assert torch.equal(theirs["h.1.down"].T, model.blocks[1].down.weight)
    assert torch.equal(theirs["h.0.fused"][16:], model.blocks[0].gate_up.up.weight)
    assert theirs["wte"].shape == (37, 8)
    save(tmp_path / "again", model)
    assert run(["diff", str(written), str(tmp_path / "again")]) == 0
    assert run(["diff", str(written), str(tmp_path / "hf")]) == 0
    save_file({name: theirs[name] for name in theirs if name != "wte"}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(BadInput, match=r"wte: expected a tensor for it, found 1 of 7 missing"):
        load(tmp_path / "hf", Embedder())


def test_a_module_that_is_built_without_stages_has_no_pipeline(tmp_path):
    model = nn.Linear(2, 2)
    describe_module(model, build=lambda state: nn.Linear(2, 2))
    save(tmp_path / "m", model)
    with pytest.raises(BadInput, match="pipeline: expected 1, found 2"):
        convert(tmp_path / "m", tmp_path / "out", pipeline=2)


def save_on_both_stages(root):
    save(root, nn.Linear(2, 2), state=ParallelState.start(Layout(pipeline=2)))


def test_a_parameter_of_two_stages_is_refused(tmp_path):
    with pytest.raises(RankError, match="weight: expected one stage, found stages 0 and 1"):
        run_parallel(save_on_both_stages, 2, str(tmp_path / "m"))


def saving(make, optimizer=None, names=()):
    def call(folder):
        model = make()
        if names:
            describe_module(model, names=names)
        save(folder / "m", model, optimizer and optimizer(model.parameters()))

    return call


def loading(make, optimizer=None):
    def call(folder):
        model = make()
        load(folder / "m", model, optimizer and optimizer(model))

    return call


def two_dtypes():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


WEIGHTS = saving(Embedder)
OF_GROUPS = (Rule("gain.weight", "g", groups="heads"), *NAMES)
TWICE = (*NAMES, Rule("blocks.{i}.down.weight", "h.{i}.other"))
test_modules_that_do_not_fit_are_refused_by_name = refusals(
    Refused("width", loading(lambda: Embedder(12)), r"embed\.weight': expected \[37, 12\], found .*8\]",
            code=4, given=WEIGHTS),
    Refused("another module", loading(lambda: nn.Linear(2, 2)), r"'weight': expected \[2, 2\], found no such",
            code=4, given=WEIGHTS),
    Refused("no moments", loading(Embedder, lambda model: make_adamw(model, lr=1.0)),
            "expected a checkpoint of a training run, found weights alone", code=4, given=WEIGHTS),
    Refused("no names", lambda folder: convert(folder / "m", folder / "hf", to="hf"),
            "expected a table of Hugging Face's names, found none", given=saving(lambda: nn.Linear(2, 2))),
    Refused("buffers", saving(lambda: nn.BatchNorm1d(3)),
            "running_mean: expected parameters alone, found a persistent buffer"),
    Refused("two dtypes", saving(two_dtypes), "dtype: expected one for all parameters, found torch.*and"),
    # A table of names covers each parameter once.
    Refused("a parameter left out", saving(Embedder, names=NAMES[1:]),
            r"embed\.weight: expected a rule for every parameter"),
    Refused("a parameter named twice", saving(Embedder, names=TWICE), r"blocks\.0\.down.*expected one rule"),
    Refused("a rule that asks a config", saving(Embedder, names=OF_GROUPS),
            "names: g: expected a name, or tensors that lie one after the other"),
    Refused("no such parameter", saving(Embedder, names=(*NAMES, Rule("haed", "head"))),
            "head: expected a rule for a parameter, found none named"),
)  # fmt: skip
