"""Recipes of a user's own module, loss and data sets: one run in every layout, planned, resumed, refused."""

import difflib
import json
import math
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.refusals import Refused, refusal_of, refusals
from support.short_runs import losses, run_and_listen, run_recipe, train, whole_tensors, write_recipe
from support.token_files import write_token_file
from torch import nn
from trilith.cli.app import run
from trilith.data.batches import GlobalBatches
from trilith.data.items import ItemBatches
from trilith.data.token_file import TokenFile
from trilith.layers import IGNORE
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import ParallelState, initialize
from trilith.parallel_state.engine import to_empty
from trilith.planner.dry_run import dry_run, work_of
from trilith.planner.search import Worker
from trilith.planner.search.choice import Choice
from trilith.planner.search.evaluate import Evaluator
from trilith.planner.search.request import request_of
from trilith.planner.time import machine_named
from trilith.ranks import RankError
from trilith.ranks.pool import run_parallel
from trilith.recipes.recipe import _changed as changed
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import ModelSection
from trilith.training.own_code import own_code
from trilith.training.run_plan import check_run, plan
from trilith.training.supervised import check_memory

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Of each example: the class, the loss, the data set or the length of rows of tokens.
MODELS = {
    "t5": ("T5", "loss", "Reversed"),
    "vit": ("ViT", "loss", "Stripes"),
    "latent": ("Decoder", "cut_loss", None),
}


def own(file, model, loss="loss"):
    """Return what a recipe says of a model and a loss of one file."""
    return {"model": {"module": f"{file}:{model}"}, "loss": {"module": f"{file}:{loss}"}}


def data_of(name, folder):
    _, _, items = MODELS[name]
    return {"module": f"{EXAMPLES / 'own_data.py'}:{items}"} if items else {"tokens": str(folder / "tokens")}


def recipe(name, folder, out="run", **changes):
    model, loss, _ = MODELS[name]
    data = {"global_batch": 4, "micro_batch": 1} | data_of(name, folder)
    data |= {"sequence_length": 16} if "tokens" in data else {}
    raw = {
        "out": str(folder / out), "steps": 3, "seed": 3, "device": "cpu", "dtype": "float64",
        **own(EXAMPLES / f"{name}_parallel.py", model, loss), "data": data, "layout": {},
        "optimizer": {"lr": 1e-2, "clip": 0.5}, "checkpoint": {"keep": 10},
    }  # fmt: skip
    for key, value in changes.items():
        raw[key] = raw[key] | value if isinstance(value, dict) and key in raw else value
    return raw


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("own") / "tokens", vocab_size=97).parent


TENSOR, PIPELINE = {"tensor": 2, "sequence": True}, {"pipeline": 2}
V, INTERLEAVED = ({"pipeline": 2, "schedule": name} for name in ("zbv", "interleaved"))
ZERO_1, ZERO_3 = ({"data": 2, "zero": zero} for zero in (1, 3))
LAYOUTS = [TENSOR, PIPELINE, ZERO_3, V, ZERO_1, INTERLEAVED, {"tensor": 2, "pipeline": 2}]
CONTEXT = [{"context": 2}, {"context": 2, "ring": True}, {"context": 2, "pipeline": 2}]


def drawn(name):
    """Draw the layout that a run begins in, and the one in which it goes on."""
    rng = random.Random(name)
    pairs = [rng.sample(LAYOUTS, 2) for _ in range(2)]
    if name == "latent":
        pairs[0][0], pairs[1][1] = rng.sample(CONTEXT, 2)
    return pairs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pairs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_recipe_of_a_users_module_equals_one_process_and_goes_on_in_another_layout(
    name, pairs, tokens, tmp_path
):
    held_out = {"every": 3, "samples": 8} | data_of(name, tokens)
    if "module" in held_out:
        held_out["arguments"] = {"seed": 1}

    def trained(out, **changes):
        (*_, last) = train(recipe(name, tokens, tmp_path / out, **changes))
        return last

    whole = trained("whole", evaluation=held_out)
    expected, weights = losses(tmp_path / "whole"), whole_tensors(tmp_path / "whole")
    assert expected[-1] != expected[0] and len(expected) == 3
    for number, pair in enumerate(drawn(name)[:pairs]):
        out, close = str(number), {"rtol": 0, "atol": 1e-10}
        trained(out, layout=pair[0], stop_after=1)
        then = trained(out, layout=pair[1], evaluation=held_out)
        found = losses(tmp_path / out)
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), **close), pair
        for key, tensor in whole_tensors(tmp_path / out).items():
            assert torch.allclose(tensor, weights[key], **close), (key, pair)
        assert then.evaluation_loss == pytest.approx(whole.evaluation_loss, abs=1e-10)


def test_its_checkpoint_is_cut_into_any_number_of_stages_verified_and_reported(
    tokens, tmp_path, monkeypatch, capsys
):
    """And is no model for commands that compute."""
    monkeypatch.chdir(tmp_path)
    train(recipe("t5", tmp_path, steps=1, layout=PIPELINE))
    for line in (
        "reshard run cut --tensor 2 --pipeline 4", "verify cut", "diff run cut",
        "reshard cut again --pipeline 3", "diff again run", "report run",
    ):  # fmt: skip
        assert run(line.split()) == 0, line
    with safe_open("again/pipeline-01-of-03.tensor-00-of-01.safetensors", "pt") as file:
        stored = file.keys()
    names = {name for name in stored if not name.startswith("optimizer.")}
    blocks = {match[1] for name in names if (match := re.match(r"blocks\.(\d)\.", name))}
    assert blocks == {"1", "2"} and "memory_norm.weight" in names and "distances.2.table.weight" in names
    for line in (f"evaluate run {tokens / 'tokens'}", "generate run --prompt ab", "chat run"):
        assert run(line.split()) == 2, line
        assert "expected a model of the zoo, found a module's checkpoint" in capsys.readouterr().err, line


def theirs(name):
    """Return the plain model's name of a parameter."""
    return re.sub(r"\.(qkv|kv)\.", ".", name).replace("net.up.", "net.0.").replace("net.down.", "net.2.")


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_model_and_the_parallel_one_are_one_in_at_most_40_lines(name):
    files = [(EXAMPLES / f"{name}_{form}.py").read_text().splitlines() for form in ("plain", "parallel")]
    lines = [line for line in difflib.ndiff(*files) if line.startswith("+ ") and line[2:].strip()]
    assert len(lines) <= 40
    model, _, items = MODELS[name]

    def entry(form, of):
        return own_code(f"{EXAMPLES / f'{name}_{form}.py'}:{of}", "model.module").entry

    plain, ours = (entry(form, model)().double() for form in ("plain", "parallel"))
    initialize(ours, 3)
    mine = dict(ours.named_parameters())
    renamed = {theirs(key): key for key in mine}
    rows = {key: mine[ours_key][: len(plain.get_parameter(key))] for key, ours_key in renamed.items()}
    plain.load_state_dict({key: value.detach() for key, value in rows.items()})
    if items is None:
        ids = torch.randint(97, (2, 9))
        samples = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
    else:
        data = own_code(f"{EXAMPLES / 'own_data.py'}:{items}", "data.module").entry()
        samples = {key: torch.stack([data[0][key], data[1][key]]) for key in data[0]}
    if "labels" in samples:  # padding, and what a chat set does not teach, is not counted
        samples["labels"][1, 2:] = IGNORE
    taken = {key: value for key, value in samples.items() if key not in ("labels", "kind")}
    for form, made in (("plain", plain), ("parallel", ours)):
        given = {} if form == "plain" or name == "vit" else {"state": None}
        total, count = entry(form, "loss")(made(**taken), samples, **given)
        assert count == (samples["labels"] != IGNORE).sum() if "labels" in samples else count == 2
        total.backward()
    for key, ours_key in renamed.items():
        expected, found = plain.get_parameter(key).grad, mine[ours_key].grad
        assert torch.allclose(found[: len(expected)], expected, rtol=1e-9, atol=1e-12), key


def with_factor(file, line):
    """Return changes of a recipe: a class whose constructor makes, in this line, a factor of its output."""
    text = (EXAMPLES / "vit_plain.py").read_text()
    made = text.replace("        self.patch, count", f"        {line}\n        self.patch, count")
    file.write_text(made.replace("self.head(x[:, 0])", "self.head(x[:, 0]) * self.factor"))
    return own(file, "ViT") | {"steps": 1}


def test_a_plain_class_trains_over_data_ranks_with_what_its_constructor_computes(tmp_path):
    """A model is made without memory where that loses nothing: a buffer would be lost."""
    kept = "self.register_buffer('factor', torch.full((1,), 3.0), persistent=False)"
    for name, line, layout in (("number", "self.factor = 3.0", {}), ("buffer", kept, ZERO_3)):
        changes = with_factor(tmp_path / f"{name}.py", line) | {"steps": 2, "layout": layout}
        train(recipe("vit", tmp_path, name, **changes))
    one, two = (losses(tmp_path / name) for name in ("number", "buffer"))
    assert two == [pytest.approx(step, abs=1e-10) for step in one]


PLACED = f"""
import sys
sys.path.append({str(EXAMPLES)!r})
from latent_parallel import Decoder, loss
class Placed(Decoder):
    def forward(self, *, input_ids, positions):
        assert positions.shape == input_ids.shape
        return super().forward(input_ids=input_ids)
"""


@pytest.mark.parametrize("chat", [True, False])
def test_a_module_may_take_the_positions_of_packed_rows(chat, tmp_path):
    """A chat set always has them, running text with documents = "separate"."""
    (tmp_path / "placed.py").write_text(PLACED)
    documents = [np.arange(n, n + 9) for n in range(40)]
    targets = [np.ones(9, dtype=np.uint8)] * len(documents) if chat else None
    write_token_file(tmp_path / "chat", documents, targets, vocab_size=97)
    changes = own(tmp_path / "placed.py", "Placed") | {"steps": 1}
    raw = recipe("latent", tmp_path, data={"tokens": str(tmp_path / "chat")}, **changes)
    if not chat:
        words = refusal_of(lambda: plan(parse_recipe(raw)))
        assert "expected a sample positions, which the model's forward takes" in words
        raw["data"]["documents"] = "separate"
    assert "positions" in plan(parse_recipe(raw)).own.samples
    (step,) = train(raw)
    assert math.isfinite(step.loss)


def losses_after_numbers(raw, count):
    """Train in a process that has drawn other random numbers before."""
    with torch.random.fork_rng():
        torch.manual_seed(count)
        return [step.loss for step in run_recipe(raw)]


def test_what_a_constructor_draws_follows_the_seed(tmp_path):
    line = "self.register_buffer('factor', torch.rand(1) + 1, persistent=False)"
    changes, runs = with_factor(tmp_path / "drawn.py", line), []
    for number, seed in enumerate((3, 3, 4)):
        raw = recipe("vit", tmp_path, f"drawn-{number}", **changes, seed=seed)
        runs += run_parallel(losses_after_numbers, 1, raw, number)
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 2, "zero": 3},
        {"data": 2, "zero": 2, "data_replicate": 2},
        PIPELINE,
        {"pipeline": 2, "schedule": "zbv"},
    ],
    ids=str,
)
def test_it_is_planned_before_it_starts(layout, tmp_path):
    checked = parse_recipe(recipe("t5", tmp_path, dtype="float32", layout=layout))
    check_memory(checked, plan(checked))  # as the command does, before it starts ranks
    planned = dry_run(checked)
    assert planned.parameters == 15912 and planned.rank.memory.total > 12 * planned.rank.stored
    sent = {traffic.axis: traffic for traffic in planned.rank.traffic}
    if "data_replicate" in layout:  # six blocks and the rest, after each micro-batch: one may leave some out
        assert sent["replicas"].count == 2 * 7
    if "pipeline" in layout:  # both sides of a border, of 4 micro-batches: 6 words twice, and the biases
        borders = 1 if "schedule" not in layout else 2
        assert sent["pipeline"].bytes == 4 * borders * 4 * (2 * 6 * 16 + 4 * 6 * 6)


OWN = """
import torch, trilith.layers, trilith.parallel_state
from torch import nn
from trilith.training import FunctionLoss, Loss, Sums
class Net(nn.Module):
    def __init__(self, dim, *, state=None):
        super().__init__()
        if dim > 9: raise RuntimeError("too wide")
        self.net = nn.Linear(dim, dim)
    def forward(self, *, x): return self.net(x)
class Piece(Net):
    def forward(self, *, x):
        if x.shape[1] != 2: raise RuntimeError("no half of the row")
        return self.net(x)
class Leaves(Net):
    def forward(self, *, x): raise SystemExit(3)
class First(Net):
    first_input = "y"
    def forward(self, h, x): return self.net(h)
class Rows:
    def __init__(self, kind="good"): self.kind = kind
    def __len__(self): return 0 if self.kind == "empty" else 4
    def __getitem__(self, number):
        if self.kind == "breaks": raise KeyError("nothing there")
        if self.kind == "list": return [1]
        if self.kind == "array": return {"x": [1.0]}
        if self.kind == "uneven": return {"x": torch.zeros(2 + number)}
        return {"y" if self.kind == "other" else "x": torch.zeros(4, 4)}
def total(output, samples): return output.sum(), output.numel()
cut = FunctionLoss(total, sequence={"x": 1})
behind = FunctionLoss(total, sequence={"x": -2})
deep = FunctionLoss(total, sequence={"x": 3})
word = FunctionLoss(total, sequence={"x": "1"})
def weighted(output, samples, weight): return weight * output.sum(), output.numel()
def alone(output): return output.sum(), output.numel()
short = FunctionLoss(alone)
class NoLoss: pass
number = 3
class Cut(Net):
    def __init__(self, dim, *, state=None):
        super().__init__(dim)
        self.up = trilith.layers.ColumnParallelLinear(dim, dim, state=state)
class Whole(Net):
    def __init__(self, dim, *, state=None):
        super().__init__(dim)
        self.norm = trilith.layers.RMSNorm(dim, state=state)
    def forward(self, *, x): return self.norm(x)
class Pair(Cut):
    def __init__(self, dim, *, state=None):
        super().__init__(dim, state=state)
        self.down = trilith.layers.RowParallelLinear(dim, dim, False, state=state)
    def forward(self, *, x): return self.down(self.up(x))
class Alone(Net):
    def __init__(self, dim, *, state=None):
        super().__init__(dim)
        self.state = trilith.parallel_state.alone_or(state)
    def forward(self, *, x):
        return self.net(trilith.layers.split_to_tensor(x, self.state, dim=1) if self.state.sequence else x)
class Stateless(Net):
    def __init__(self, dim): super().__init__(dim)
class Widening(nn.Module):
    hidden_dims = (4, 6, 8, 4)
    def __init__(self, *, split=None, state=None):
        super().__init__()
        self.stage = trilith.layers.Stage.of(3, split=split, state=state)
        widths = [self.hidden_dims[block : block + 2] for block in self.stage.blocks]
        self.blocks = nn.Sequential(*(nn.Linear(*width) for width in widths))
    def forward(self, hidden=None, *, x):
        return self.blocks(x if self.stage.first else hidden)
def tokens(*sizes):
    return [{name: torch.zeros(sizes, dtype=torch.int64) for name in ("input_ids", "labels")}] * 8
def row(): return tokens(16)
def token(): return tokens()
class Counting(Loss):
    def __call__(self, output, samples, scales):
        return Sums({"loss": output.double().square().sum() * scales["loss"]})
    def count(self, samples):
        return {"loss": len(next(iter(samples.values())))}
    def count_labels(self, labels):
        return {"loss": labels}
"""


def own_recipe(folder, **changes):
    (folder / "own.py").write_text(OWN)
    return {
        "out": str(folder / "run"), "steps": 1, "device": "cpu", **own(folder / "own.py", "Net", "total"),
        "data": {"module": f"{folder / 'own.py'}:Rows", "global_batch": 4}, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(("split", "width"), [([1, 2], 6), ([2, 1], 8)])
def test_what_stages_send_is_planned_for_the_split_of_the_recipe(split, width, tmp_path):
    """Each block is wider than the one before it."""
    raw = own_recipe(tmp_path, layout={"pipeline": 2, "split": split})
    raw["model"] = {"module": f"{tmp_path / 'own.py'}:Widening"}
    checked = parse_recipe(raw)
    assert work_of(checked, plan(checked)).sent[0] == 4 * 4 * width
    evaluator = Evaluator(request_of("widening", raw, machine_named("h100-80gb"), 2))
    assert evaluator.work(Choice(checked.layout)).sent[0] == 4 * 4 * width


def test_frozen_groups_and_float8_are_planned(tmp_path):
    """The parameters by their names, and the work of their gradients by what is left of it."""

    def planned(**changes):
        model = {"arguments": {"dim": 32}}
        return dry_run(parse_recipe(recipe("vit", tmp_path, dtype="float32", model=model) | changes))

    plain, model = planned(), own_code(f"{EXAMPLES / 'vit_parallel.py'}:ViT", "model.module").entry(dim=32)
    frozen = planned(optimizer={"lr": 1e-2, "groups": [{"match": "blocks", "freeze": True}]})
    still = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert frozen.rank.trained == plain.rank.trained - still
    assert frozen.rank.memory.moments == plain.rank.memory.moments - 8 * still
    assert frozen.rank.memory.gradients == plain.rank.memory.gradients - 4 * still
    assert frozen.flops.trained < plain.flops.trained == frozen.flops.matrices
    assert planned(compute="float8").rank.memory.block != planned(compute="bfloat16").rank.memory.block


def test_a_run_knows_its_groups_and_saves_the_tokenizer_that_it_names(tmp_path):
    """All items are zeros: only the bias could change the loss."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_bytes(b"{}")
    groups = [{"match": "weight", "freeze": True}, {"match": "bias", "lr_scale": 0.0}]
    raw = own_recipe(tmp_path, steps=2, optimizer={"lr": 1e-2, "groups": groups})
    raw["model"] |= {"arguments": {"dim": 4}, "tokenizer": str(tmp_path / "tokenizer")}
    first, second = train(raw)
    assert first.loss == second.loss
    moments = {name for name in whole_tensors(tmp_path / "run") if "exp_avg." in name}
    assert moments == {"optimizer.exp_avg.net.bias"}
    assert [*(tmp_path / "run").rglob("tokenizer.json")]


def test_a_weight_of_two_modules_stays_one_in_memory():
    """As output layers of one's own share the embedding's; torch's ``to_empty`` makes two."""
    with torch.device("meta"):
        first, second = model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        second.weight = first.weight
    to_empty(model, torch.device("cpu"))
    assert second.weight is first.weight and not first.weight.is_meta


OF_STAGES = ("1f1b", "zbv", "interleaved", "interleaved-zero-bubble")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "most"), [(ZERO_3, 1.05), *(({"pipeline": 2, "schedule": name}, 1.125) for name in OF_STAGES)]
)
def test_its_memory_is_that_of_a_simulated_step(layout, most, tokens):
    """Of several stages a rank the plan is up to an eighth above: each is counted in one piece."""
    changes = {"model": {"arguments": {"dim": 64, "latent": 16}}, "data": {"sequence_length": 64}}
    checked = parse_recipe(recipe("latent", tokens, dtype="float32", layout=layout, **changes))
    worker = Worker()
    try:
        peak = worker.simulate(checked, 1).peak
    finally:
        worker.close()
    assert 0.98 < dry_run(checked, rank=1).rank.memory.total / peak < most


@pytest.mark.parametrize("several", [False, True])
def test_items_come_in_the_order_of_token_files(several, tmp_path):
    """Also mixed: by the same shares, each source in an order of its own, over the ends of epochs."""
    sizes = [7, 12] if several else [7]
    files = [
        TokenFile.open(write_tokens(tmp_path / f"t{n}", count=4 * size + 1)) for n, size in enumerate(sizes)
    ]
    weights = [3.0, 1.0] if several else None
    source = list(zip(files, weights, strict=True)) if several else files[0]
    tokens = GlobalBatches(source, 4, 6, 5)
    sets = [[{"n": torch.tensor([k, n])} for n in range(size)] for k, size in enumerate(sizes)]
    items = ItemBatches([(each, f"set {k}") for k, each in enumerate(sets)], weights, 4, 6, 5)
    for step in range(5):
        sources, numbers = tokens.sample_ids(step, range(6))
        rows = items.rows(step, range(6))["n"]
        assert rows.tolist() == [list(pair) for pair in zip(sources.tolist(), numbers.tolist(), strict=True)]
        assert torch.equal(items.rows(step, range(2, 4))["n"], rows[2:4])


@pytest.mark.parametrize("name", ["latent", "vit"])
def test_a_loss_that_counts_labels_is_evaluated(name, tokens, tmp_path):
    (file := tmp_path / "own.py").write_text(OWN)
    held_out = data_of(name, tokens) | {"samples": 8}
    changes = {"loss": {"module": f"{file}:Counting"}, "evaluation": held_out}
    (step,) = train(recipe(name, tokens, f"counted-{name}", steps=1, **changes))
    assert math.isfinite(step.evaluation_loss)


def test_data_sets_are_mixed_each_with_its_arguments(tmp_path):
    names = [f"{EXAMPLES / 'own_data.py'}:Stripes"] * 2
    data = {"module": names, "weights": [3.0, 1.0], "global_batch": 8}
    data["arguments"] = [{"items": 16}, {"items": 5, "seed": 1}]
    planned = plan(parse_recipe(recipe("vit", tmp_path, data=data)))
    assert planned.own.items.samples == 21
    sources, _ = planned.own.items.sample_ids(0, range(8))
    assert sources.tolist().count(1) == 2 and "3/4 of 16 items" in planned.own.items.fingerprint


def test_a_run_may_begin_with_the_weights_of_another(tmp_path):
    train(recipe("vit", tmp_path, "first", steps=1))
    model, still = {"init_from": str(tmp_path / "first")}, {"lr": 1e-300, "weight_decay": 0.0}
    train(recipe("vit", tmp_path, "second", steps=1, layout=TENSOR, model=model, optimizer=still))
    first, second = (whole_tensors(tmp_path / out) for out in ("first", "second"))
    weights = [name for name in first if not name.startswith("optimizer.")]
    assert all(torch.equal(first[name], second[name]) for name in weights)


def test_the_fastest_layout_is_searched_for(tmp_path, capsys):
    file = write_recipe(tmp_path / "vit.toml", recipe("vit", tmp_path, dtype="float32"))
    assert run(["plan", str(file), "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = [set(each["recipe"]["layout"]) for each in found["layouts"]]
    assert found["legal"] == 20 and any("tensor" in each for each in keys)
    assert run(["plan", str(file), "--gpus", "2", "--generate"]) == 2
    assert "a model that writes text" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_model_or_other_data(tmp_path):
    """Of one shape: with other arguments or data it is refused, with changed code said."""
    file, data = (tmp_path / f"my_{name}.py" for name in ("vit", "data"))
    file.write_text((EXAMPLES / "vit_parallel.py").read_text())
    data.write_text(items := (EXAMPLES / "own_data.py").read_text())
    again = partial(recipe, "vit", tmp_path, **own(file, "ViT"), data={"module": f"{data}:Stripes"})
    train(again(steps=2, stop_after=1))
    arguments = {"module": f"{file}:ViT", "arguments": {"width": 2}}
    with pytest.raises(RankError, match=r'recipe: model\.arguments: expected {}, .* found {"width": 2}'):
        train(again(steps=2) | {"model": arguments})
    data.write_text(items.replace("0.3 *", "0.4 *"))
    expected = r"data\.module: expected 64 items of Stripes\(\{\}\) of a file with SHA-256"
    with pytest.raises(RankError, match=expected):
        train(again(steps=2))
    data.write_text(items)
    file.write_text(file.read_text().replace("x + self.mix(", "x - self.mix("))
    _, lines = run_parallel(run_and_listen, 1, again(steps=2))[0]
    for key, name in (("model.module", "ViT"), ("loss.module", "loss")):
        assert f"{key}: {name} of a file with SHA-256 {own_code(f'{file}:{name}', key).digest}" in lines
    _, lines = run_parallel(run_and_listen, 1, again(steps=3))[0]
    assert "SHA-256" not in lines


def train_own_copy(folders, raw):
    """Train with this rank's copy of a file."""
    folder = folders[ParallelState.start(parse_recipe(raw).layout).rank]
    run_recipe(json.loads(json.dumps(raw).replace("COPY", folder)))


@pytest.mark.parametrize("key", ["model", "loss", "data", "evaluation"])
def test_ranks_with_different_copies_of_a_file_are_refused(key, tmp_path):
    names = {"model": "vit_parallel", "loss": "vit_parallel", "data": "own_data", "evaluation": "own_data"}
    text = (EXAMPLES / f"{names[key]}.py").read_text()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "copy.py").write_text(f"{text}\n# copy {number}\n")
    entry = {"model": "ViT", "loss": "loss"}.get(key, "Stripes")
    raw = recipe("vit", tmp_path, layout={"data": 2}, steps=1, **{key: {"module": f"COPY/copy.py:{entry}"}})
    folders = [str(tmp_path / str(number)) for number in range(2)]
    with pytest.raises(RankError, match=r"the same on every rank.*, found rank 1"):
        run_parallel(train_own_copy, 2, folders, raw)


#: Keys that mean nothing beside ``model.module``.
BESIDE = {
    "config": ("absent", "config.json"),
    "size": ("absent", "smollm2-135m"),
    "mtp": ("absent", "0.3"),
    "implementation": ("auto", "transformers"),
}
CUT = ("layout.context=2", "data.sequence_length=4")
#: By class, what sequence parallelism would let its layers compute with.
SEQUENCE = {
    "Whole": "norm is given all tokens, not a rank's own, found true. Split once",
    "Pair": "its linears are given all tokens, not a rank's own, found true. Split once",
    "Alone": "net.weight meets a rank's own tokens, and its gradient is not summed, found true. Declare",
}
NO_LOSS = r"loss.module: expected a function of \(output, samples\), found alone\(output\)"
APART = "layout.context: expected 1: {} sends nothing between context ranks, found 2"
TAKEN = "{}: expected a sample {}, which the model's forward takes, found {}"
MULTIPLE = "evaluation.samples: expected a multiple of data x micro_batch = 2"
HELD_OUT = ("evaluation=Rows", "evaluation.samples=3")
#: What is refused, in which words, and how the recipe is changed. A key without a value goes; ``loss=x``
#: is x of the file, and ``kind=x`` an argument of its data set.
ROWS = {
    "no such file": ("module: expected a Python file, found no file .*none.py", "model.module=none.py:A"),
    "no such class": ("expected a name in own.py, found Nett. Nearest: Net", "model=Nett"),
    "no name": (r"model.module: .*file.py:Name, such as", "model.module=own.py"),
    "no module": ("expected a subclass of torch.nn.Module, found Rows", "model=Rows"),
    "an argument that it lacks": (
        r"model.arguments: expected the keywords of Net\(dim, \*, state=None\), found dmi. Nearest: dim",
        "model.arguments={dmi = 3}"),
    "arguments that it refuses": (
        r"one that can be made with \(dim=10\), found RuntimeError: too wide \(.*own.py:8\)",
        "model.arguments.dim=10"),
    "an argument of no JSON": (
        "model.arguments: expected numbers, texts, lists and tables, found Object of type date is not JSON",
        "model.arguments.dim=2026-11-30"),
    "experts that a model lacks": (
        "experts: expected a model with experts, found module", "experts.balance=0.1"),
    "arguments alone": ("model.arguments: expected model.module, a model of your own, beside it",
        "model.module", "model.size=smollm2-135m"),
    "a loss that is none": ("expected a Loss, a class of it, or a function .* found NoLoss", "loss=NoLoss"),
    "a number as loss": ("loss.module: expected a Loss.* found int", "loss=number"),
    "an argument that a loss lacks": (
        r"loss.arguments: expected the keywords of total\(output, samples\), found x", "loss.arguments.x=1"),
    "arguments of an object": ("loss.arguments: expected none for an object, found x",
        "loss=cut", "loss.arguments.x=1"),
    "no data": ("data.tokens: expected a token file, or data sets of your own in module, found neither",
        "data.module"),
    "both data": ("data.module: expected none beside tokens", "data.tokens=tokens", "data.sequence_length=4"),
    "an empty set": ("a data set with at least one item, found none", "kind=empty"),
    "a set that breaks": ("0: expected an item, found KeyError: 'nothing there'", "kind=breaks"),
    "an item that is no dict": ("item 0: expected a dict of tensors by name, found list", "kind=list"),
    "an item of a list": ("found 'x': list. torch.as_tensor", "kind=array"),
    "items of two lengths": (
        r"item \d: expected x: float32 \[2\], as in the first item, found float32 \[\d\]. Pad",
        "kind=uneven"),
    "a sample that is missing": (TAKEN.format("data", "x", "y"), "kind=other"),
    "a first input that is missing": (TAKEN.format("data", "y", "x"), "model=First"),
    "held-out items without a sample": (TAKEN.format("evaluation", "x", "y"),
        *HELD_OUT, "evaluation.arguments.kind=other"),
    "held-out samples without the dim that context ranks cut": (
        "evaluation: expected a dim of (input_ids|labels), which has 1, found 1",
        "model.module=EXAMPLES/latent_parallel.py:Decoder", "model.arguments",
        "loss.module=EXAMPLES/latent_parallel.py:cut_loss", "data=row", "layout.context=2",
        "data.sequence_length=16", "evaluation=token", "evaluation.samples=4"),
    # A loss of one's own would count the rows that fill up the last one.
    "held-out rows that are no whole micro-batches": (MULTIPLE, *HELD_OUT, "data.micro_batch=2"),
    "held-out rows that are none for each data rank": (MULTIPLE,
        *HELD_OUT, "data.micro_batch=1", "layout.data=2"),
    "a loss without its argument": (
        r"expected the keywords of weighted\(output, samples, weight\), found missing .*'weight'",
        "loss=weighted"),
    "an argument in the output's place": (
        r"expected the keywords of weighted.* found multiple values for argument 'output'", "loss=weighted",
        "loss.arguments={output = 1, weight = 2}"),
    "a loss of the output alone": (NO_LOSS, "loss=alone"),
    "the function of an object": (NO_LOSS, "loss=short"),
    "a dim that the sample lacks": ("expected a dim of x, which has 3, found 3", *CUT, "loss=deep"),
    "a dim that is no number": ("expected a dim of x, which has 3, found '1'", *CUT, "loss=word"),
    "a list of arguments": ("data.arguments: expected a table, or a list of 1", "data.arguments=[{}, {}]"),
    "shares": ("data.weights: expected 1 number,", "data.weights=[1.0, 2.0]"),
    "documents of items": ("documents: expected absent with data.module", "data.documents=separate"),
    "a split": ("layout.split: expected absent for a class without the keyword split", "layout.split=[1]"),
    "a cut that is not even": (
        r"weight: 4 units of 1 on dim 0: .* tensor=3 divides, found 4. Nearest .* 2 or 4 \(.*own.py:42\)$",
        "model=Cut", "layout.tensor=3"),
    **{f"tensor ranks that would cut a head of {model}": ("4 units of [48] on dim 0: .* tensor=8 divides",
        f"model.module=EXAMPLES/{model}", "model.arguments", data, "layout.tensor=8")
       for model, data in (("t5_parallel.py:T5", "data.module=EXAMPLES/own_data.py:Reversed"),
                           ("latent_parallel.py:Decoder", "data=row"))},
    "tensor ranks that a class does not know": (
        "layout.tensor: expected 1 for a class without the keyword state, found 2", "model=Stateless",
        "layout.tensor=2"),
    "context without a sequence": ("context: expected 1 for a loss that names no sequence", *CUT),
    "context where nothing is exchanged": (APART.format("the model"), *CUT, "loss=cut"),
    "context where a block exchanges nothing": (APART.format(r"blocks\.0"),
        *CUT, "loss=cut", "model=Widening", "model.arguments"),
    "a dim that counts from the last one": (APART.format("the model"), *CUT, "model=Piece", "loss=behind"),
    "a forward that ends the process": (
        "model.module: expected a forward that runs on a context rank's piece .* SystemExit: 3", *CUT,
        "model=Leaves", "loss=cut"),
    **{f"sequence parallelism of {name}": (f"layout.sequence: expected false: {why}",
        f"model={name}", "layout.tensor=2", "layout.sequence=true") for name, why in SEQUENCE.items()},
    "another length": ("data.sequence_length: expected 4, dim 1 of x, which context ranks cut, found 8",
        "layout.context=2", "data.sequence_length=8", "loss=cut"),
    "smoothing": ("smoothing: expected 0: a module's loss is its own", "optimizer.label_smoothing=0.1"),
    **{f"{key} beside": (f"model.{key}: expected {want} beside model.module", f"model.{key}={text}")
       for key, (want, text) in BESIDE.items()},
}  # fmt: skip


def check_own(words, folder):
    raw = own_recipe(folder)
    raw["model"]["arguments"] = {"dim": 4}
    for section, key in (word.split(".") for word in words if "=" not in word):
        del raw[section][key]
    for word in words:
        word = re.sub("^(model|loss|data|evaluation)=", rf"\1.module={folder}/own.py:", word)
        word = re.sub("^kind=", "data.arguments.kind=", word).replace("EXAMPLES", str(EXAMPLES))
        changed(raw, [word] * ("=" in word))
    checked = check_run(parse_recipe(raw))
    assert checked.own is not None
    checked.own.items.rows(0, range(4))


test_what_a_recipe_of_ones_own_cannot_say = refusals(
    Refused(why, partial(check_own, words), says, given=own_recipe) for why, (says, *words) in ROWS.items()
)


def test_each_key_of_the_model_is_used_beside_a_module_or_refused():
    used = {"module", "arguments", "init_from", "tokenizer"}
    assert BESIDE.keys() == ModelSection.model_fields.keys() - used
