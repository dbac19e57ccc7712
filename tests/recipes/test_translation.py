"""Configurations of other trainers become recipes that load: nothing vanishes, contradictions are refused."""

import copy
import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import TorchContextParallelConfig
from support.bash_words import words_of_bash
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.parallel_state import BadInput
from trilith.recipes import load_recipe
from trilith.recipes.foreign.from_deepspeed import from_deepspeed
from trilith.recipes.foreign.from_megatron import from_megatron
from trilith.recipes.foreign.from_trainer import from_trainer
from trilith.recipes.foreign.megatron_arguments import Arguments, arguments_of, read_arguments
from trilith.storage.small_files import read_json

HERE = Path(__file__).parent


def read(name):
    return json.loads((HERE / name).read_text())


def arguments_in(file):
    """Read stored arguments, or those of a script as bash gives them."""
    if file.suffix != ".sh":
        return read_arguments(file)
    callers = ("out", "vocab.json", "tokens") if file.stem == "gpt3" else ()
    return arguments_of(words_of_bash(file, *callers))


#: As in DeepSpeed's tutorials: ZeRO-3 with everything on the CPU, fp16, WarmupDecayLR.
ZERO3 = read("deepspeed/zero3.json")
TRAINER = read("trainer/arguments.json")
#: A whole configuration of each kind, and what translates a file of it. Megatron's is a small model.
ORIGINS = {
    "deepspeed": (ZERO3, lambda file, _=None: from_deepspeed(read_json(file), str(file))),
    "trainer": (TRAINER, lambda file, ranks=4: from_trainer(read_json(file), str(file), ranks=ranks)),
    "megatron": (
        read("megatron/small.json"),
        lambda file, ranks=None: from_megatron(arguments_in(file), str(file), ranks=ranks),
    ),
}
ROWS = {origin: read(f"{origin}/rows.json") for origin in ORIGINS}


def write_changed(origin, changes, folder, without=()):
    """Write the configuration with the changes; Megatron stores no argument that has no value."""
    raw = {key: value for key, value in ORIGINS[origin][0].items() if key not in without} | changes
    if origin == "megatron":
        raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "raw.json").write_text(json.dumps(raw))


def translated(origin, changes, folder, without=()):
    write_changed(origin, changes, folder, without)
    return ORIGINS[origin][1](folder / "raw.json")


def lost(translation):
    return [line.split(" = ")[0] for line in translation.missed]


def rows_of(kind):
    return [
        pytest.param(origin, *row, id=f"{origin}-{row[1]}-{json.dumps(row[0])[:50]}")
        for origin, rows in ROWS.items()
        for row in rows.get(kind, ())
    ]


@pytest.mark.parametrize(("origin", "changes", "key", "value"), rows_of("becomes"))
def test_a_setting_becomes_its_key(origin, changes, key, value, tmp_path):
    became = translated(origin, changes, tmp_path, ROWS[origin].get("without", ())).values.get(key)
    assert became == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)


@pytest.mark.parametrize(("origin", "changes", "line"), rows_of("lost"))
def test_a_setting_without_a_key_is_listed(origin, changes, line, tmp_path):
    missed = translated(origin, changes, tmp_path).missed
    assert any(line in each for each in missed), missed


def refused(origin, why, changes, says):
    def write(folder):
        write_changed(origin, changes, folder)

    return Refused(
        f"{origin}, {why}", lambda folder: ORIGINS[origin][1](folder / "raw.json"), says, given=write
    )


test_a_contradiction_is_refused = refusals(
    [refused(origin, *row) for origin, rows in ROWS.items() for row in rows["refused"]]
)


def no_deepspeed(why, text, says):
    def given(folder):
        return (folder / "x.json").write_text(text) if text is not None else None

    return Refused(why, lambda folder: ORIGINS["deepspeed"][1](folder / "x.json"), says, given=given)


test_a_file_of_another_kind_is_refused = refusals(
    no_deepspeed("half a file", "{", "expected valid JSON"),
    no_deepspeed("a list", "[1]", "expected a JSON object, found a list"),
    no_deepspeed("another program's", '{"a": 1}', "expected a DeepSpeed configuration, found keys a"),
    no_deepspeed("nothing", "{}", r"found keys \(none\)"),
    no_deepspeed("no file", None, "expected a file"),
)


def filled(tmp_path, toml):
    """Return the printed recipe with its blanks filled in, as its comments and the command's help say."""
    assert tomllib.loads(toml)
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    return load_recipe(
        path, ["model.init_from=model", "data.tokens=tokens", "data.sequence_length=512", "steps=10000"]
    )


#: What stands in the place of a blank.
FILL = {
    "model.init_from": "model",
    "model.config.vocab_size": 50257,
    "data.tokens": "tokens",
    "data.sequence_length": 512,
}


def value_of(recipe, key):
    for part in key.split("."):
        recipe = recipe[part] if isinstance(recipe, dict) else getattr(recipe, part)
    return [*recipe] if isinstance(recipe, tuple) else recipe


@pytest.mark.parametrize("row", [pytest.param(row, id=row["file"]) for row in read("whole.json")])
def test_a_whole_configuration_becomes_a_recipe(row, tmp_path):
    translation = ORIGINS[Path(row["file"]).parent.name][1](HERE / row["file"], row.get("ranks"))
    (tmp_path / "recipe.toml").write_text(translation.toml())
    recipe = load_recipe(tmp_path / "recipe.toml", [f"{key}={FILL[key]}" for key in translation.blanks])
    for key, value in row["recipe"].items():
        wanted = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        assert value_of(recipe, key) == wanted, key
    blanks = row.get("blanks", translation.blanks)
    assert blanks.keys() == translation.blanks.keys()
    assert all(says in translation.blanks[key] for key, says in blanks.items())
    assert {*row.get("lost", ())} <= {*lost(translation)}
    assert sorted(lost(translation)) == row.get("all lost", sorted(lost(translation)))
    assert all(f"# {line}" in translation.toml() and ": " in line for line in translation.missed)


def test_what_transformers_itself_writes_maps_without_noise(tmp_path):
    from transformers import TrainingArguments

    written = TrainingArguments(output_dir="x", use_cpu=True, max_steps=50, report_to=[]).to_json_string()
    translation = from_trainer(json.loads(written), "args.json", ranks=1)
    assert lost(translation) == ["save_total_limit"]
    recipe = filled(tmp_path, translation.toml())
    assert (recipe.optimizer.schedule, recipe.optimizer.minimum_ratio) == ("linear", 0.0)
    assert (recipe.optimizer.lr, recipe.device, recipe.data.global_batch) == (5e-5, "cpu", 8)


def test_a_deepspeed_file_that_the_trainer_names_has_its_autos_filled_in(tmp_path):
    """As transformers' docs give that file: everything that the Trainer knows is "auto"."""
    (tmp_path / "ds.json").write_text(json.dumps(read("deepspeed/auto.json")))
    arguments = {name: value for name, value in TRAINER.items() if not name.startswith("fsdp")}
    translation = from_trainer({**arguments, "deepspeed": "ds.json"}, str(tmp_path / "args.json"), ranks=4)
    recipe = filled(tmp_path, translation.toml())
    assert (recipe.layout.zero, recipe.layout.data, recipe.data.global_batch) == (2, 4, 128)
    assert (recipe.compute, recipe.optimizer.lr, recipe.optimizer.clip) == ("bfloat16", 2e-5, 0.0)
    assert (recipe.optimizer.schedule, recipe.optimizer.warmup) == ("constant", 60), "DeepSpeed's counts"
    assert not [line for line in translation.missed if "auto" in line]


def test_the_command_prints_a_recipe_and_says_on_stderr_what_it_lost(tmp_path, capfd):
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    assert run(["recipe", "from-deepspeed", str(tmp_path / "ds.json")]) == 0
    out, err = capfd.readouterr()
    assert filled(tmp_path, out).layout.zero == 3
    assert "not mapped: zero_optimization.overlap_comm = true: " in err
    assert "fill in: data.tokens: " in err
    (tmp_path / "args.json").write_text(json.dumps(TRAINER))
    written = tmp_path / "made.toml"
    words = ["recipe", "from-trainer", str(tmp_path / "args.json"), "--ranks", "8", "--out", str(written)]
    assert run(words) == 0 and not capfd.readouterr().out
    assert filled(tmp_path, written.read_text()).layout.data == 8
    assert run(words) == 2 and "expected a new file" in capfd.readouterr().err


#: Configurations of which every value is another than the program's default.
NOT_DEFAULTS = [
    pytest.param(read("deepspeed/not_defaults.json"), lambda raw: from_deepspeed(raw, "x"), id="deepspeed"),
    pytest.param(
        read("trainer/not_defaults.json"), lambda raw: from_trainer(raw, "x", ranks=4), id="trainer"
    ),
]
#: Settings that change nothing whether they are present or not, and why.
SAME = {
    "train_micro_batch_size_per_gpu": "follows from the other two",
    "gradient_accumulation_steps": "follows from the other two",
    "zero_optimization.offload_optimizer.device": "offload_param says it too",
    "tensor_parallel.tp.tp_size": "1 is the default",
    "tensor_parallel.autotp_size": "1 is the default",
}


def objects(raw, path=()):
    yield path
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from objects(value, (*path, key))


def at(raw, path):
    for key in path:
        raw = raw[key]
    return raw


def of_script(name, ranks=None):
    """Return the arguments of a script of Megatron-LM by name, and what translates them."""
    stated = arguments_in(HERE / f"megatron/{name}.sh")
    return dict(stated.values), lambda raw: from_megatron(Arguments(raw, stated.ranks, []), "x", ranks=ranks)


SCRIPTS = [of_script("gpt3", 1024), of_script("llama3"), of_script("mixtral")]


@pytest.mark.parametrize(("config", "translate"), [*NOT_DEFAULTS, *SCRIPTS])
def test_every_setting_changes_the_recipe_or_is_listed(config, translate):
    def outcome(raw):
        try:
            return translate(raw).toml()
        except BadInput as error:
            return str(error)

    settings = [
        (path, key) for path in objects(config) for key, v in at(config, path).items() if type(v) is not dict
    ]
    vanished = set()
    for path, key in settings:
        without = copy.deepcopy(config)
        del at(without, path)[key]
        if outcome(without) == outcome(config):
            vanished.add(".".join((*path, key)))
    assert vanished <= {*(ROWS["megatron"]["same"] if (config, translate) in SCRIPTS else SAME)}


@pytest.mark.parametrize(("config", "translate"), NOT_DEFAULTS)
def test_an_unknown_key_is_listed_wherever_it_stands(config, translate):
    for path in objects(config):
        odd = copy.deepcopy(config)
        at(odd, path)["unheard_of"] = 3
        translation = translate(odd)
        inside = {".".join((*path, "unheard_of")), *(".".join(path[:n]) for n in range(1, len(path) + 1))}
        assert {*lost(translation)} & inside, f"{'.'.join(path) or 'the top'}: {translation.missed}"
    plain, hostile = translate(config), translate({**config, "unheard\nsteps = 7": 3})
    assert tomllib.loads(plain.toml()) == tomllib.loads(hostile.toml())


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "rate", "vanishes"),
    [
        ({"lr": 3e-5}, {"type": "WarmupLR", "params": {}}, 1e-3, True),
        ({"lr": 3e-5}, {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, 1e-3, True),
        ({"lr": 3e-5}, {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}}, 2e-4, True),
        ({"lr": 3e-5}, {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, 3e-5, False),
        ({}, None, 1e-3, False),
        ({"lr": 3e-5}, None, 3e-5, False),
    ],
)
def test_the_rate_is_the_one_that_deepspeed_takes(optimizer, scheduler, rate, vanishes):
    raw = {"optimizer": {"type": "AdamW", "params": optimizer}, "train_batch_size": 8}
    translation = from_deepspeed({**raw, **({"scheduler": scheduler} if scheduler else {})}, "ds.json")
    assert translation.values["optimizer.lr"] == rate
    assert any(line.startswith("optimizer.params.lr = 3e-05: ") for line in translation.missed) == vanishes
    straight = "scheduler.params.warmup_type" in lost(translation)
    assert straight == (scheduler is not None), "a straight line, whatever the schedule after it"


def test_rows_of_chats_say_how_they_are_tokenized():
    for packing in (True, False):
        assert "tokenize --chat" in from_trainer({**TRAINER, "packing": packing}, "x", ranks=4).toml()


DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
SHARDED = {"output_dir": "x", "max_steps": 9, "per_device_train_batch_size": 2, "fsdp": "full_shard"}


def layout(found):
    return {key[7:]: value for key, value in found.values.items() if key.startswith("layout.")}


def deepspeed(ranks=8, **more):
    return from_deepspeed({**DEEPSPEED, **more}, "ds.json", ranks=ranks)


def trainer(ranks=None, /, *, raw=SHARDED, **sizes):
    return from_trainer({**raw, "parallelism_config": sizes}, "args.json", ranks=ranks)


def missed(found):
    return [line.partition(" = ")[0] for line in found.missed]


def test_ulysses_of_deepspeed_is_context_and_leaves_fewer_data_ranks():
    found = deepspeed(sequence_parallel_size=4, seq_parallel_communication_data_type="fp32")
    assert layout(found) == {"context": 4, "data": 2, "zero": 1}
    assert found.values["data.global_batch"] == 4
    assert "seq_parallel_communication_data_type" in missed(found)


def test_experts_of_deepspeed_are_dealt_out_as_it_says():
    section = {"enabled": True, "autoep_size": 4, "preset_model": "mixtral"}
    found = deepspeed(expert_parallel=section, use_data_before_expert_parallelism=True)
    assert layout(found) == {"data": 8, "expert": 4, "zero": 1}
    assert {"expert_parallel.preset_model", "use_data_before_expert_parallelism"} <= {*missed(found)}
    assert layout(deepspeed(expert_parallel={**section, "enabled": False})) == {"data": 8, "zero": 1}


def test_a_pipeline_of_deepspeed_is_cut_and_recomputed_and_the_rest_is_listed():
    section = {"stages": 2, "partition": "type:Block", "seed_layers": True, "pipe_partitioned": True}
    found = deepspeed(pipeline={**section, "activation_checkpoint_interval": 1}, train_batch_size=16)
    assert layout(found) == {"pipeline": 2, "data": 4, "zero": 1}
    assert found.values["memory.checkpointing"] == "full"
    assert {f"pipeline.{key}" for key in section} - {*missed(found)} == {"pipeline.stages"}
    assert "memory.checkpointing" not in deepspeed(pipeline=section, train_batch_size=16).values
    cut = deepspeed(train_batch_size=32, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps=2)
    assert cut.values["data.micro_batch"] == 2


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2, "dp_shard_size": 4}, {"tensor": 2, "data": 4}),
        ({"cp_size": 4, "cp_backend": "torch", "dp_shard_size": 2}, {"context": 4, "data": 2}),
        ({"sp_size": 2, "sp_backend": "deepspeed", "dp_shard_size": 4}, {"context": 2, "data": 4}),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"data": 8, "data_replicate": 2}),
        (
            {"tp_size": 2, "cp_size": 2, "dp_shard_size": 2, "cp_handler": {"cp_comm_strategy": "alltoall"}},
            {"tensor": 2, "context": 2, "data": 2, "ring": True},
        ),
    ],
)
def test_the_sizes_of_accelerate_are_the_layout_s_with_ranks_and_without(sizes, expected):
    for ranks in (8, None):
        found = trainer(ranks, **sizes)
        assert layout(found) == {**expected, "zero": 3}
        assert found.values["data.global_batch"] == 2 * expected["data"]
        assert not [name for name in missed(found) if name in ("ranks", "fsdp") or "parallelism" in name]


def test_every_field_that_accelerate_has_is_known_or_listed():
    """All of the installed version: a new one would be listed, by its name."""
    handler = dataclasses.asdict(TorchContextParallelConfig())
    silent = {"cp_backend", "sp_backend"}  # one choice each
    for field in dataclasses.fields(ParallelismConfig):
        value = 2 if field.name.endswith("_size") else {"odd": 1}
        base = {"cp_size": 2, "cp_handler": handler} if field.name == "cp_handler" else {}
        if field.name in silent:
            continue
        value = {**handler, "odd": 1} if field.name == "cp_handler" else value
        without, found = trainer(**base), trainer(**{**base, field.name: value})
        listed = [name for name in missed(found) if name.startswith(f"parallelism_config.{field.name}")]
        assert listed or layout(found) != layout(without), field.name


def refused_sizes(why, says, call, *given, **sizes):
    return Refused(why, lambda folder: call(*given, **sizes), says)


RING = {"cp_size": 2, "cp_handler": {"cp_comm_strategy": "ring"}}
THREE_EXPERTS = {"enabled": True, "autoep_size": 3}
test_sizes_that_contradict_each_other_are_refused_with_both_numbers = refusals(
    refused_sizes("context ranks", "pipeline=1 x context=3, found 8", deepspeed, sequence_parallel_size=3),
    refused_sizes("expert ranks", "a divisor of .* = 8, found 3", deepspeed, expert_parallel=THREE_EXPERTS),
    refused_sizes(
        "two kinds", r"\.sp_size: expected 1 with cp_size=2, found 4", trainer, cp_size=2, sp_size=4
    ),
    refused_sizes("fewer ranks", "product is the 8 ranks, found 4", trainer, 8, tp_size=2, dp_shard_size=2),
    refused_sizes(
        "an exchange that is none", "cp_comm_strategy: expected allgather or alltoall", trainer, **RING
    ),
)


def test_shards_without_fsdp_are_listed_and_a_hybrid_without_sizes_asks_for_them():
    plain = {key: value for key, value in SHARDED.items() if key != "fsdp"}
    found = trainer(raw=plain, dp_shard_size=4, dp_replicate_size=2)
    assert layout(found) == {"data": 8} and "parallelism_config.dp_shard_size" in missed(found)
    hybrid = {**SHARDED, "fsdp": "hybrid_shard"}
    assert "fsdp" in missed(from_trainer(hybrid, "args.json", ranks=8))
    assert "fsdp" not in missed(trainer(raw=hybrid, dp_shard_size=4, dp_replicate_size=2))


def test_with_deepspeed_the_trainer_s_sizes_count_where_its_file_is_silent(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    raw = {"output_dir": "x", "max_steps": 9, "per_device_train_batch_size": 2, "deepspeed": "ds.json"}
    for ranks, shards, data in ((4, 2, 2), (None, 2, 2), (None, 1, 1)):
        raw["parallelism_config"] = {"sp_size": 2, "dp_shard_size": shards}
        found = from_trainer(raw, str(tmp_path / "args.json"), ranks=ranks)
        assert layout(found) == {"context": 2, "data": data, "zero": 3}
        assert found.values["data.global_batch"] == 2 * data and ("ranks" in missed(found)) == (shards == 1)
