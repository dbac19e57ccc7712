"""One pair for every model and optimizer: ``load`` gives back bit for bit what ``save`` wrote, or refuses."""

import math
from dataclasses import FrozenInstanceError
from itertools import product
from pathlib import Path

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.damage import flip_bit
from support.families import family_and_config
from support.refusals import Refused, refusals
from support.strangers import STUBS
from support.written_before import CONFIG, FOLDER, STEPS, WRITTEN, Embedder, differing
from support.written_before import LORA as STORED_LORA
from torch import nn
from torch.distributed import checkpoint as dcp
from trilith.checkpoints import (
    Loaded,
    Manifest,
    convert,
    convert_to_dcp,
    describe_module,
    differences,
    load,
    read_source,
    save,
)
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder
from trilith.models import LoraConfig, adapted, family_of
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, pieces
from trilith.training import Precision, make_adamw, shard_over_data

OPTIMIZERS = {
    "SGD": {},
    "SGD-momentum": {"momentum": 0.9, "dampening": 0.3},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "ASGD": {"t0": 1.0},
    "Adadelta": {},
    "Rprop": {},
}


class Late(Embedder):
    """Have a parameter without a gradient in the first steps."""

    def __init__(self, *, state):
        super().__init__(state=state)
        describe_module(self)  # the names of an Embedder would not do
        self.late = nn.Parameter(torch.ones(3))


def made(name, layout):
    state = ParallelState.alone() if layout.world == 1 else ParallelState.start(layout)
    model = Late(state=state)
    shard_over_data(model, state, Precision())
    optimizer = getattr(torch.optim, name.partition("-")[0])
    return state, model, optimizer(model.parameters(), 0.01, **OPTIMIZERS[name])


def moved(model, optimizer, number):
    for name, parameter in model.named_parameters():
        late = name == "late" and number < 2
        parameter.grad = None if late else torch.sin(parameter.detach() * (number + 1))
    optimizer.step()


def saved_again(names, root, layouts):
    """Load what one device saved with each optimizer, and save it again, in each of the layouts."""
    for name, (number, layout) in product(names, enumerate(layouts)):
        state, model, optimizer = made(name, layout)
        assert load(f"{root}/{name}/alone", model, optimizer, state=state).step == 2
        save(f"{root}/{name}/{number}", model, optimizer, step=2, state=state)


def begun(name, root):
    """Save after two steps; return the model after one more."""
    _, model, optimizer = made(name, Layout())
    initialize(model, 1, among=[n for n, _ in model.named_parameters() if n != "late"])
    for number in range(2):
        moved(model, optimizer, number)
    save(root / "alone", model, optimizer, step=2)
    moved(model, optimizer, 2)
    return model


def check_goes_on(name, place, expected):
    _, model, optimizer = made(name, Layout())
    moved(model, optimizer, 7)  # nothing that it keeps of this stays
    padding = model.embed.weight.data[37:].fill_(1)
    load(place, model, optimizer)
    assert not padding.any()
    moved(model, optimizer, 2)
    for (key, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter[:37], other[:37]), key  # without the padding


def test_every_optimizer_goes_on_bit_for_bit_through_any_layout(tmp_path):
    expected = {name: begun(name, tmp_path / name) for name in OPTIMIZERS}
    layouts = [Layout(tensor=2), Layout.of(data=2, zero=3)]
    run_parallel(saved_again, 2, [*OPTIMIZERS], str(tmp_path), layouts)
    for name in OPTIMIZERS:
        alone = tmp_path / name / "alone"
        stated = Manifest.load(alone / "step-00000002").optimizer
        assert stated is not None and stated.kind == name.partition("-")[0]
        for place in (alone, tmp_path / name / "0", tmp_path / name / "1"):
            assert Manifest.load(place / "step-00000002").optimizer == stated, name
            assert [*differences(read_source(alone), read_source(place))] == [], name
            check_goes_on(name, place, expected[name])


def test_the_state_goes_along_into_a_converted_checkpoint(tmp_path):
    whole, cut, expected = tmp_path / "alone", tmp_path / "cut", begun("NAdam", tmp_path)
    assert run(["reshard", str(whole), str(cut), "--tensor", "2"]) == 0
    assert run(["diff", str(whole), str(cut)]) == 0
    check_goes_on("NAdam", cut, expected)


def test_every_number_of_an_optimizer_goes_along_to_dcp(tmp_path, capsys):
    """NAdam's product of momenta too."""
    model = Embedder(state=ParallelState.alone())
    initialize(model, 1)
    ours = torch.optim.NAdam(model.parameters(), 0.01)
    moved(model, ours, 0)
    save(tmp_path / "run", model, ours, step=1)
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    kept = ours.state[model.gain.weight]
    assert {*kept} == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
    state = {key: torch.zeros_like(number) for key, number in kept.items()}
    dcp.load({"optim": {"state": {"gain.weight": state}}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[key], number) for key, number in kept.items())
    ours.state[model.blocks[0].gate_up.up.weight]["step"] += 1  # of one of two that are one tensor there
    save(tmp_path / "two", model, ours, step=2)
    assert run(["convert", str(tmp_path / "two"), str(tmp_path / "no"), "--to", "dcp"]) == 2
    assert "optimizer.step: expected one number for h.0.fused, found " in capsys.readouterr().err


def grouped(layout, rates):
    """Return a model whose gain has another learning rate, on the ranks of a layout."""
    state = ParallelState.alone() if layout.world == 1 else ParallelState.start(layout)
    model = shard_over_data(Embedder(state=state), state, Precision())
    initialize(model, 1, state=state)
    named = [*model.named_parameters()]
    groups = [[p for n, p in named if n.startswith("gain") == gain] for gain in (False, True)]
    pairs = zip(groups, rates, strict=True)
    return state, model, torch.optim.AdamW([{"params": group, "lr": rate} for group, rate in pairs])


def loaded_rates(root, layout):
    state, model, optimizer = grouped(layout, (1.0, 1.0))
    load(root, model, optimizer, state=state)
    return [group["lr"] for group in optimizer.param_groups]


def test_each_group_goes_on_with_its_learning_rate_in_any_layout(tmp_path):
    """As decayed by then; and a group of parameters that had two is refused."""
    _, model, optimizer = grouped(Layout(), (0.5, 0.25))
    moved(model, optimizer, 0)
    optimizer.param_groups[1]["lr"] /= 10
    save(tmp_path, model, optimizer, step=1)
    for layout in (Layout(), Layout.of(data=2, zero=3)):
        assert run_parallel(loaded_rates, layout.world, str(tmp_path), layout)[0] == [0.5, 0.025]
    with pytest.raises(BadInput, match=r"optimizer\.lr: .* found .* with 0\.5 and gain\.weight with 0\.025"):
        load(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_an_optimizer_without_state_is_saved_without_moments(tmp_path):
    model = nn.Linear(3, 2)
    folder = save(tmp_path, model, torch.optim.AdamW(model.parameters()), step=4)
    assert {*Manifest.load(folder).tensors} == {"weight", "bias"}
    optimizer = torch.optim.AdamW(model.parameters())
    moved(model, optimizer, 0)
    assert load(tmp_path, model, optimizer).step == 4 and not optimizer.state


@pytest.mark.parametrize("extra", [{"at": [1, 2.5, "a", None]}, [True], 7, "text", None])
def test_what_a_user_adds_comes_back_with_the_step(extra, tmp_path):
    model = nn.Linear(3, 2)
    save(tmp_path, model, step=3, extra=extra)
    loaded = load(tmp_path, nn.Linear(3, 2))
    assert isinstance(loaded, Loaded) and (loaded.step, loaded.extra) == (3, extra)
    assert torch.equal(loaded.model.weight, model.weight)
    with pytest.raises(FrozenInstanceError):
        loaded.step = 4


LORA = LoraConfig(r=2, lora_alpha=4, target_modules=("q_proj", "down_proj"))


def with_adapters(base, layout):
    """Build a model with adapters in a layout; with a base, fill this and draw the adapters."""
    state = ParallelState.alone() if layout.world == 1 else ParallelState.start(layout)
    family, config = family_and_config(TINIEST_LLAMA)
    family = adapted(family, LORA)
    model = family.build(config, state=state, device="cpu")
    shard_over_data(model, state, Precision())
    initialize(model, 9, state=state)
    if base is not None:
        load(base, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1)


def adapters_go_on(root, base, layouts):
    of_layouts = []
    for number, layout in enumerate(layouts):
        model, optimizer = with_adapters(None if number else base, layout)
        if number:
            loaded = load(root, model, optimizer)
            assert (loaded.step, loaded.extra) == (number, number)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.detach() + 0.5
        optimizer.step()
        save(root, model, optimizer, step=number + 1, extra=number + 1)
        of_layouts.append(pieces(model, model.state))
    return of_layouts


def test_adapters_go_on_in_a_loop_of_one_s_own_in_any_layout(tmp_path):
    base, root = tmp_path / "base", tmp_path / "run"
    write_hf_folder(base, TINIEST_LLAMA)
    layouts = [Layout(tensor=2), Layout.of(data=2, zero=3), Layout(pipeline=2)]
    ranks = run_parallel(adapters_go_on, 2, str(root), str(base), layouts)
    (alone,) = run_parallel(adapters_go_on, 1, str(tmp_path / "alone"), str(base), [Layout()] * 3)
    last, expected = assemble([rank[2] for rank in ranks]), assemble([alone[2]])
    for name, tensor in expected.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
    assert all("lora_" in name for name in Manifest.load(root / "step-00000003").tensors)
    model = load(root).model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[: len(last[name])], last[name]), name
    save(tmp_path / "other", zoo()[0])  # a model knows its own base
    model, optimizer = with_adapters(tmp_path / "other", Layout())
    with pytest.raises(BadInput, match="that the adapters were trained on"):
        load(root, model, optimizer)


def linear(kind="AdamW", **options):
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    if kind != "LBFGS":
        moved(model, optimizer, 0)
    return model, optimizer


def saving(*arguments, **options):
    return lambda folder: save(folder / "run", *arguments, **options)


def loading(*arguments, path="run", **options):
    return lambda folder: load(folder / path, *arguments, **options)


def zoo():
    family, config = family_and_config(TINIEST_LLAMA)
    model = family.build(config, device="cpu")
    initialize(model, 3)
    return model, torch.optim.AdamW(model.parameters())


def hugging_face(folder):
    write_hf_folder(folder / "hf", TINIEST_LLAMA)


def changed_companion(folder):
    hugging_face(folder)
    (folder / "hf" / "tokenizer.json").write_text("{}")
    convert(folder / "hf", folder / "run")
    flip_bit(folder / "run" / "tokenizer.json", 0)


class Pairs(torch.optim.SGD):
    """Keep a tensor that has not the parameter's shape."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["pairs"] = torch.zeros(5)


class Counting(torch.optim.SGD):
    """Keep a number that is no tensor."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["made"] = 1


def kept_by(kind):
    def given(folder):
        model, _ = zoo()
        optimizer = kind(model.parameters())
        optimizer.step()
        save(folder / "run", model, optimizer)

    return given


def test_plain_numbers_rates_in_tensors_and_the_state_of_some_parameters_are_given_back(tmp_path):
    kept_by(Counting)(tmp_path)
    model, _ = zoo()
    counting = Counting(model.parameters())
    load(tmp_path / "run", model, counting)
    assert {type(state["made"]): state["made"] for state in counting.state.values()} == {int: 1}
    some = [next(model.parameters())]
    some[0].grad = torch.ones_like(some[0])
    first, again = (torch.optim.AdamW(some, lr=torch.tensor(rate)) for rate in (0.5, 0.1))
    first.step()
    save(tmp_path / "some", model, first)
    load(tmp_path / "some", model, again)
    assert again.param_groups[0]["lr"].item() == 0.5 and again.state.keys() == {*some}


def adapters(base):
    return adapted(base.family, LORA).build(base.config, device="cpu")


def with_adapters_alone(folder):
    model = adapters(zoo()[0])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    load(folder / "run", model, torch.optim.AdamW(trained))


KEEPS = "optimizer: expected one that keeps tensors of the parameter's shape and .* numbers, found "
SAVED = saving(*linear())
test_what_cannot_be_saved_or_given_back_is_refused = refusals(
    Refused("LBFGS", saving(*linear("LBFGS")), KEEPS + "LBFGS"),
    Refused("Adafactor", saving(*linear("Adafactor")), KEEPS + "Adafactor"),
    Refused("a state of another shape", kept_by(Pairs), KEEPS + r"Pairs, whose pairs of \S+ is \[5\]"),
    Refused("a number for DCP", lambda folder: convert_to_dcp(folder / "run", folder / "dcp"),
            "tensors of an optimizer, found Counting, whose made is no tensor", given=kept_by(Counting)),
    Refused("parameters-of-another", saving(nn.Linear(3, 2), linear()[1]), "the model's parameters, found"),
    Refused("extra-nan", saving(nn.Linear(3, 2), extra=[math.nan]), r"extra\[0\]: expected a finite number"),
    Refused("extra-set", saving(nn.Linear(3, 2), extra={"at": {1}}), r"extra\.at: expected text, a number"),
    Refused("another-class", loading(*linear("SGD")), "expected AdamW, which the checkpoint is of, found SGD",
            given=SAVED),
    Refused("amsgrad-begun-late", loading(*linear(amsgrad=True)),
            r"optimizer\.amsgrad: expected off, as the checkpoint has no max_exp_avg_sq", given=SAVED),
    Refused("a folder that has no state", loading(*zoo(), path="hf"), code=4, given=hugging_face,
            says="expected a checkpoint of a training run, found Hugging Face folder"),
    Refused("weights alone", loading(*linear()), code=4, given=saving(nn.Linear(3, 2)),
            says="expected a checkpoint of a training run, found weights alone"),
    Refused("an optimizer of no model", loading(optimizer=linear()[1]), "model: expected the one whose",
            given=SAVED),
    Refused("a module that load cannot build", loading(), "a model of the zoo, found a module's",
            given=SAVED),
    Refused("G8-bit-flip-in-companion", loading(), "tokenizer.json: CRC-32", code=4, given=changed_companion),
    Refused("adapters of no base", lambda folder: save(folder / "run", adapters(zoo()[0])),
            "expected adapters of a base that load filled"),
    Refused("an optimizer of adapters", with_adapters_alone, "which the model trains, found a whole",
            given=kept_by(torch.optim.AdamW)),
    Refused("extra-number-for-a-name", saving(nn.Linear(3, 2), extra={"at": {1: 2}}),
            r"extra\.at: expected names that are text, found 1"),
    Refused("adapters for a whole model", loading(zoo()[0], path="hf", adapter=Path("any")),
            "expected one with adapters, found one without", given=hugging_face),
)  # fmt: skip


def stub_saved_again(name, root, layouts):
    for number, layout in enumerate(layouts):
        state = ParallelState.start(layout)
        model = STUBS[name].build(state=state)
        shard_over_data(model, state, Precision())
        assert load(f"{root}/alone", model, state=state).step == 1
        save(f"{root}/{number}", model, step=1, state=state)


@pytest.mark.parametrize("name", STUBS)
def test_a_module_with_the_asked_names_alone_is_saved_and_loaded_in_any_layout(name, tmp_path):
    v_shape = Layout.of(pipeline=2, virtual_stages=2, v_shape=True)
    layouts = [Layout(tensor=2), Layout.of(data=2, zero=3), v_shape]
    initialize(model := STUBS[name].build(), 3)
    save(tmp_path / "alone", model, step=1)
    run_parallel(stub_saved_again, 2, name, str(tmp_path), layouts)
    for number in range(len(layouts)):
        assert [*differences(read_source(tmp_path / "alone"), read_source(tmp_path / str(number)))] == []


def test_a_model_without_memory_is_neither_filled_nor_saved(tmp_path):
    """A model of the zoo that was built on meta, and a module of a user's."""
    family, config = family_and_config(TINIEST_LLAMA)
    write_hf_folder(tmp_path / "hf", TINIEST_LLAMA)
    model = family.build(config, device="meta")
    with pytest.raises(BadInput, match=r"load: .*expected a parameter with memory, found one on the meta"):
        load(tmp_path / "hf", model)
    for unfilled in (model, nn.Linear(2, 2, device="meta")):
        with pytest.raises(BadInput, match=r"save: .*weight: expected a parameter with memory"):
            save(tmp_path / "new", unfilled)
        assert not list(tmp_path.glob("new/step-*"))
    model.to_empty(device="cpu")
    load(tmp_path / "hf", model)


LAYOUTS = [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout.of(data=2, zero=3)]


def loaded(kind, layout, place):
    """Load it into a model of other numbers; return what is not as it was stored."""
    state, written = ParallelState.start(layout), WRITTEN[kind]
    family = family_of(CONFIG)
    config = family.from_hf(CONFIG)
    if kind == "adapters":
        family = adapted(family, LoraConfig.model_validate(STORED_LORA))
    own = kind == "module_of_two"
    model = Embedder(state=state) if own else family.build(config, state=state, device="cpu")
    for name, parameter in model.named_parameters():
        if written.frozen in name:
            parameter.requires_grad_(False)
    shard_over_data(model, state, Precision())
    initialize(model, 1, state=state)
    optimizer = make_adamw(model, lr=0.1) if written.moments else None
    if kind == "adapters":
        base = Path(place) / f"{state.rank}"
        write_hf_folder(base, CONFIG)  # the same numbers as when the adapters were trained
        load(base, model)
    progress = load(FOLDER / kind, model, optimizer, state=state)
    assert progress.model is model and (progress.extra == {"at": 5} if own else True)
    assert (progress.step, progress.layout) == (STEPS, written.layout)
    if optimizer is not None:
        updates = {float(optimizer.state[each]["step"]) for each in optimizer.state}
        assert updates == {STEPS} and progress.memory["updates"] == STEPS
    wrong = differing(kind, model, optimizer, state)
    return [name for name in wrong if kind != "adapters" or "lora_" in name]


def all_loaded(kinds, layout, place):
    return {kind: loaded(kind, layout, f"{place}/{kind}") for kind in kinds}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_bit_is_there_in_any_layout(layout, tmp_path):
    # A module that is not cut into stages goes into no pipeline.
    kinds = [kind for kind in WRITTEN if kind != "module_of_two" or layout.pipeline == 1]
    wrong = run_parallel(all_loaded, layout.world, kinds, layout, str(tmp_path))
    assert wrong == [{kind: [] for kind in kinds}] * layout.world
