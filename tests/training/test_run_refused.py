"""Recipes that no run begins with, and runs that do not go on: a row for each.

Who refuses needs no ranks: it is the plan that each process makes, or the one rank of a run.
"""

from functools import partial
from shutil import copytree, rmtree

import pytest
from safetensors.torch import load_file, save_file
from support.configs import TINIEST_LLAMA, TINY_GLM, TINY_LLAMA, TINY_MIXTRAL, config
from support.refusals import Refused, refusals
from support.short_runs import tiny_recipe
from support.token_files import write_token_file
from trilith.checkpoints import convert
from trilith.data.text.tokenizer_loading import fingerprint_of_folder
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import LoraConfig, adapted, family_of
from trilith.parallel_state import BadInput, ParallelState, host_memory
from trilith.planner.dry_run import rank_plan
from trilith.planner.search import fit
from trilith.recipes.recipe import parse_recipe
from trilith.training import Callback, Trainer, check_run, run
from trilith.training.run_plan import plan
from trilith.training.supervised import check_memory

#: A Llama has no such field.
NO_EXPERTS = "recipe: experts: expected a model with experts, found llama"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def recipe(folder, **changes):
    return parse_recipe(tiny_recipe(folder / "run", folder / "tokens", **changes))


def planned(why, says, changes):
    """A recipe that is refused before anything starts; its tokens are not there, so nothing reads them."""
    return Refused(why, lambda folder: plan(recipe(folder, **changes)), says)


def adapting(why, says, changes, base=TINY_LLAMA):
    """Such a recipe that starts from a folder."""

    def call(folder):
        model = {"config": None, "init_from": str(folder / "base")}
        plan(recipe(folder, model=model, **{"lora": LORA, **changes}))

    return Refused(why, call, says, given=lambda folder: write_hf_folder(folder / "base", base))


def of(model, **changes):
    return {"model": {"config": model}, **changes}


def ranks(model, **layout):
    return of(model, layout=layout, data={"global_batch": 24, "micro_batch": 1})


FLOAT8 = {"dtype": "float32", "compute": "float8"}
ZBV = {"layout": {"pipeline": 2, "schedule": "zbv"}}
LORA_ROWS = {
    "typo": (r"targets among .* q_proj.* found .'q_prj'", {"target_modules": ["q_prj"]}),
    "head": (r"ends of names such as .* found 'lm_head'", {"target_modules": ["lm_head", "q_proj"]}),
    "embedding": ("linears of the blocks", {"target_modules": ["embed_tokens"]}),
    "norms": ("linears of the blocks", {"target_modules": r".*norm"}),
    "no-pattern": ("a regular expression", {"target_modules": "("}),
    "no-such-block": ("blocks 0 to 2, found 3", {"layers_to_transform": [3]}),
    "blocks-alone": ("expected layers_to_transform beside it", {"layers_pattern": "layers"}),
    "other-blocks": (
        r"layers_pattern: expected what precedes a block's number in model\.layers\.0\.",
        {"layers_to_transform": 1, "layers_pattern": "h"},
    ),
    "bad-blocks": ("a regular expression", {"layers_to_transform": 1, "layers_pattern": "("}),
    "rank-of-nothing": (r"rank_pattern: .* found 'q'", {"r": 4, "rank_pattern": {"q": 2}}),
    "r-0": (r"lora\.r", {"r": 0}),
    "dora": (r"lora\.use_dora", {"use_dora": True}),
    "r-beside-init": (r"lora\.r: expected only lora_dropout beside", {"r": 4, "init_from": "somewhere"}),
}
ROWS = {
    "data-ranks-do-not-divide-the-batch": (r"data\.global_batch", {"layout": {"data": 3}}),
    "a-rank-to-trace-that-is-none": ("ranks from 0 to 0, found 1", {"watch": {"trace_ranks": [1]}}),
    "a-step-to-trace-that-is-none": (r"steps from 1 to \d+, found 999", {"watch": {"trace_steps": [999]}}),
    "a-share-of-nothing": (
        r"data\.weights: expected 1 number, .* above 0, found \[0\.0\]",
        {"data": {"weights": [0.0]}},
    ),
    "a-tracker-as-a-key": (
        r"watch\.tensorboard: .* keys of watch: trackers",
        {"watch": {"tensorboard": True}},
    ),
    "biases-of-a-router-that-has-none": (
        r"bias_rate: expected 0: the routers of mixtral have no biases, found 0\.1",
        of(TINY_MIXTRAL, experts={"bias_rate": 0.1}),
    ),
    "bias-rate-without-experts": (NO_EXPERTS, of(TINY_LLAMA, experts={"bias_rate": 0.1})),
    "balance-without-experts": (NO_EXPERTS, of(TINY_LLAMA, experts={"balance": 0.1})),
    "experts-on-data-ranks": (
        r"a divisor of context \* data = 6, found 4.*2 or 3",
        ranks(TINY_MIXTRAL, data=6, expert=4),
    ),
    "experts-on-shards": (
        r"context \* data / data_replicate = 4, found 3.*2 or 4",
        ranks(TINY_MIXTRAL, data=8, data_replicate=2, expert=3, zero=1),
    ),
    "more-ranks-than-experts": (
        "a divisor of 4 experts, found 8. Nearest legal expert: 2 or 4",
        ranks(TINY_MIXTRAL, data=8, expert=8),
    ),
    "ranks-for-no-experts": (
        "1: this model has no experts, found 2. Nearest legal expert: 1",
        ranks(TINY_LLAMA, data=2, expert=2),
    ),
    "mtp-no-blocks": ("absent: the model of .* has no blocks of multi-token", {"model": {"mtp": 0.3}}),
    "mtp-with-adapters": (
        "absent with LoRA",
        {"model": {"config": TINY_GLM, "mtp": 0.3}, "lora": LORA},
    ),
    "mtp-without-a-block": (
        "1 or more with mtp",
        {"model": {"config": TINY_GLM | {"num_nextn_predict_layers": 0}, "mtp": 0.3}},
    ),
    "mtp-no-factor": ("a factor: .* states 1 block of multi-token prediction", of(TINY_GLM | {"mtp": True})),
    "float8-fp64": ("dtype: expected float32 or bfloat16 with.*float64", FLOAT8 | {"dtype": "float64"}),
    "float8-scaling-alone": (
        'compute = "float8" beside it.*bfloat16',
        FLOAT8 | {"compute": "bfloat16", "float8_scaling": "rowwise"},
    ),
    "float8-scaling": ("float8_scaling.*blockwise", FLOAT8 | {"float8_scaling": "blockwise"}),
    "float8-zbv": (r"schedule: expected gpipe, 1f1b or interleaved with.*float8.*zbv", FLOAT8 | ZBV),
    "adapters-from-scratch": ("init_from: expected a model to attach adapters to", {"lora": LORA}),
}
test_a_recipe_that_contradicts_itself_or_its_model_is_refused_before_anything_starts = refusals(
    *(planned(why, *row) for why, row in ROWS.items()),
    *(adapting(f"adapters-{why}", says, {"lora": lora}) for why, (says, lora) in LORA_ROWS.items()),
    adapting("adapters-tensor-3", "tensor", {"layout": {"tensor": 3}}),
    adapting(
        "biases-beside-adapters-which-are-the-base-s",
        r"experts\.bias_rate: expected 0 with \[lora\].*, found 0\.1",
        {"experts": {"bias_rate": 0.1}, "lora": {"r": 2}},
        TINY_GLM,
    ),
    adapting(
        "adapters-in-no-block", "blocks 0 to ., found 9", {"lora": {"layers_to_transform": [9]}}, TINY_GLM
    ),
)


def to_experts(model, targets, named):
    """Adapters on experts, which are stacks and no linears; the refusal names the first, and the way out."""

    def call(_):
        family = family_of(model)
        raw = {"peft_type": "LORA", "target_modules": targets, "init_lora_weights": True}
        adapted(family, LoraConfig.from_peft(raw)).check(family.from_hf(model), "adapter_config.json")

    says = f"lora: target_modules: expected linears: experts are stacks.*{named}.*exclude_modules = "
    return Refused(f"{model['model_type']}-{targets}", call, says)


test_adapters_on_experts_are_refused = refusals(
    to_experts(TINY_GLM, ["q_proj", "gate_proj"], r"\['gate_proj'\], .* model.layers.1.mlp.experts.0.gate"),
    to_experts(TINY_GLM, ["gate_up_proj"], r"\['gate_up_proj'\], .* model.layers.1.mlp.experts.gate_up"),
    to_experts(TINY_GLM, ["mlp.experts"], r"\['mlp.experts'\], that is model.layers.1.mlp.experts"),
    to_experts(TINY_GLM, r".*\.experts\..*", "that is model.layers.1.mlp.experts.0.gate_proj"),
    to_experts(TINY_MIXTRAL, ["w2"], r"\['w2'\], that is model.layers.0.block_sparse_moe.experts.0.w2"),
)


def go_on(folder, changes):
    Trainer(recipe(folder, **changes), ParallelState.alone(), quiet=True).run()


#: By the changes that they began with: runs that have stopped, of which each row takes a copy.
_stopped = {}


def resumed(why, says, *, code=2, harm=lambda folder: None, began=None, **changes):
    """A run that has stopped after two steps, ``began`` with changes of its own, and does not go on."""

    def given(folder):
        if (begun := _stopped.get(key := repr(began))) is None:
            begun = _stopped[key] = folder.parent / f"stopped-{len(_stopped)}"
            begun.mkdir()
            write_tokens(begun / "tokens")
            go_on(begun, {**(began or {}), "stop_after": 2})
        copytree(begun, folder, dirs_exist_ok=True)
        harm(folder)

    return Refused(why, lambda folder: go_on(folder, changes), says, code=code, given=given)


def readapted(why, says, *, harm=lambda folder: None, **changes):
    """Such a run of adapters, on a base that ``harm`` may change."""

    def start(folder, **more):
        go_on(folder, {"lora": LORA, "model": {"config": None, "init_from": str(folder / "base")}, **more})

    def given(folder):
        write_tokens(folder / "tokens")
        write_hf_folder(folder / "base", TINY_LLAMA)
        start(folder, stop_after=2)
        harm(folder)

    return Refused(why, lambda folder: start(folder, **changes), says, code=4, given=given)


def change_a_weight(folder):
    weights = load_file(folder / "base" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(weights, folder / "base" / "model.safetensors", metadata={"format": "pt"})


def forget_the_moments(folder):
    """Convert there and back; trilith does not write among a run's checkpoints itself."""
    (trained,) = (folder / "run" / "checkpoints").iterdir()
    convert(trained, folder / "hf", to="hf")
    rmtree(trained)
    convert(folder / "hf", folder / "converted")
    (folder / "converted").rename(trained)


def other_tokens(folder):
    for file in folder.glob("tokens*"):
        file.unlink()
    write_tokens(folder / "tokens", seed=1)


ORDER, DTYPE = "Resume with the data that the run began with", "dtype: expected float64, as the run's weights"
FROZEN = {"optimizer": {"groups": [{"match": r"layers\.0\.|embed", "freeze": True}]}}
ANOTHER = of(config("tiny_llama", intermediate_size=64))
test_a_run_does_not_go_on_with_other_data_or_another_model = refusals(
    resumed("another-seed", rf"step-\d+: seed: expected .* 4\. {ORDER}", seed=4),
    resumed("another-batch", ORDER, data={"global_batch": 8}),
    resumed("another-length", ORDER, data={"sequence_length": 8}),
    resumed("in-float32", f"{DTYPE}.*found float32. Resume with", dtype="float32"),
    resumed("in-bfloat16", f"{DTYPE}.*found bfloat16. Resume with", dtype="bfloat16"),
    resumed("F12-other-tokens", r"data\.tokens: .* found .*, of tokens\. Resume", harm=other_tokens),
    resumed("G13-another-model", "size: expected 64, found 48. .*another folder", code=4, **ANOTHER),
    resumed("what-was-frozen", r"exp_avg\.embed\.weight.*it was frozen", code=4, began=FROZEN),
    resumed(
        "G14-weights-without-moments",
        "a checkpoint of a training run, found weights alone.* Start from it with model.init_from",
        code=4,
        harm=forget_the_moments,
    ),
    readapted("adapters-of-another-rank", r"lora\.r: expected 8, found 4", lora=LORA | {"r": 8}),
    readapted("adapters-elsewhere", r"lora\.target_modules", lora=LORA | {"target_modules": ["q_proj"]}),
    readapted("no-adapters", "expected a whole model, found LoRA adapters", lora=None),
    readapted("adapters-of-another-base", "that the adapters were trained on", harm=change_a_weight),
)


HOST = [
    ({"tensor": 2, "data": 2}, {}),
    ({"pipeline": 2, "data": 2, "zero": 1}, {}),
    ({"data": 3, "zero": 3}, {}),
    ({"data": 2, "pipeline": 2}, {"lora": LORA, "model": {"config": None, "init_from": "base"}}),
]


@pytest.mark.parametrize(("layout", "changes"), HOST, ids=["replicas", "zero-1", "zero-3", "lora"])
def test_cpu_ranks_that_cannot_fit_the_host_are_refused_to_the_byte(tmp_path, monkeypatch, layout, changes):
    monkeypatch.chdir(tmp_path)
    write_hf_folder(tmp_path / "base", TINY_LLAMA)
    data = {"global_batch": 12, "micro_batch": 2}
    small = recipe(tmp_path, layout=layout, data=data, **changes)
    planned = plan(small)
    ranks = [rank_plan(small, planned, rank) for rank in range(small.layout.world)]
    weights = [rank.stored if small.layout.zero == 3 else rank.parameters for rank in ranks]
    need = 8 * (sum(weights) + (-1 if changes else 3) * sum(rank.trained for rank in ranks))  # not of LoRA
    for free in need, None:
        monkeypatch.setattr(host_memory, "memory_available", lambda swap, free=free: free)
        check_memory(small, planned)
    monkeypatch.setattr(host_memory, "memory_available", lambda swap: need - 1)
    with pytest.raises(BadInput, match=f"at least .* GB for {small.layout.world} ranks: weights"):
        check_memory(small, planned)
    check_memory(small.on("cuda"), planned)


def many_ids(key):
    def given(folder):
        for name in ("tokens", "held-out"):
            write_tokens(folder / name, vocab_size=500 if name == key else 131)

    def call(folder):
        check_run(recipe(folder, evaluation={"tokens": str(folder / "held-out"), "samples": 3}))

    section = {"tokens": "data", "held-out": "evaluation"}[key]
    says = rf"{section}\.tokens: vocab_size: expected at most 131, .* found 500"
    return Refused(f"{section}-of-more-ids-than-the-model-has", call, says, given=given)


def other_tokenizer(key, kind):
    """Tokens of another tokenizer than the one that the recipe names, or that lies beside its base."""

    def given(folder):
        write_hf_folder(folder / "base", TINIEST_LLAMA)
        (folder / "base" / "tokenizer.json").write_text("{}")
        for name in ("tokens", "held-out"):
            made_by = "b" if name == key else fingerprint_of_folder(folder / "base")
            write_token_file(folder / name, [range(20)] * 20, vocab_size=20, tokenizer_fingerprint=made_by)

    def call(folder):
        base = str(folder / "base")
        model = {"tokenizer": base} if kind == "named" else {"config": None, "init_from": base}
        held_out = {"tokens": str(folder / "held-out"), "samples": 3}
        check_run(recipe(folder, evaluation=held_out, model={"config": TINIEST_LLAMA} | model))

    section = {"tokens": "data", "held-out": "evaluation"}[key]
    says = rf"{section}\.tokens: {key}: expected tokens of the model's tokenizer, base .*another one.* \(b\)"
    return Refused(f"{section}-of-another-tokenizer-{kind}", call, says, given=given)


def refused(why, says, use, **changes):
    """A recipe, and its tokens, that something refuses."""

    def given(folder):
        write_tokens(folder / "tokens")

    return Refused(why, lambda folder: use(recipe(folder, **changes)), says, given=given)


def fit_in_2(loaded):
    fit(loaded, 2)


NOT_PLANNED = "^train: --fit: expected a recipe without float8 and without frozen groups.*, found"
test_a_run_is_refused_before_any_rank_starts = refusals(
    many_ids("tokens"),
    many_ids("held-out"),
    other_tokenizer("tokens", "named"),
    other_tokenizer("held-out", "of the base"),
    refused("ranks-need-a-file", r"a file, which the 2 ranks can read.*torchrun", run, layout={"tensor": 2}),
    refused(
        "trackers-that-are-objects-need-a-launcher",
        r"run: trackers: .*2 ranks to start.*torchrun",
        partial(run, trackers=[object()]),
        layout={"data": 2},
    ),
    refused(
        "callbacks-need-a-launcher",
        r"run: callbacks: .*2 ranks to start.*torchrun",
        partial(run, callbacks=[Callback()]),
        layout={"data": 2},
    ),
    refused("fit-float8", rf"{NOT_PLANNED} compute = float8\. Name", fit_in_2, **FLOAT8),
    refused("fit-frozen", rf"{NOT_PLANNED} optimizer\.groups\[0\]\.freeze\.", fit_in_2, **FROZEN),
    refused(
        "fit-nothing-fits",
        r"^train: --fit: expected a legal .* of at most 2 ranks that fits, found none: .*GB.*Start more",
        fit_in_2,
        **{"layout": {"tensor": 2, "data": 2, "zero": 1}, "device": "cuda", "memory": {"device_gb": 2.0}},
    ),
)
