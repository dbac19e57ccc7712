"""Sequence, context, expert, pipeline parallelism of foreign configurations: a layout, or listed."""

import dataclasses
import json

import pytest
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import TorchContextParallelConfig
from support.refusals import Refused, refusals
from trilith.recipes.foreign.from_deepspeed import from_deepspeed
from trilith.recipes.foreign.from_trainer import from_trainer

DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
TRAINER = {"output_dir": "x", "max_steps": 9, "per_device_train_batch_size": 2, "fsdp": "full_shard"}


def layout(found):
    return {key[7:]: value for key, value in found.values.items() if key.startswith("layout.")}


def deepspeed(ranks=8, **more):
    return from_deepspeed({**DEEPSPEED, **more}, "ds.json", ranks=ranks)


def trainer(ranks=None, /, *, raw=TRAINER, **sizes):
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


def refused(why, says, call, *given, **sizes):
    return Refused(why, lambda folder: call(*given, **sizes), says)


RING = {"cp_size": 2, "cp_handler": {"cp_comm_strategy": "ring"}}
THREE_EXPERTS = {"enabled": True, "autoep_size": 3}
test_sizes_that_contradict_each_other_are_refused_with_both_numbers = refusals(
    refused("context ranks", "pipeline=1 x context=3, found 8", deepspeed, sequence_parallel_size=3),
    refused("expert ranks", "a divisor of .* = 8, found 3", deepspeed, expert_parallel=THREE_EXPERTS),
    refused("two kinds", r"\.sp_size: expected 1 with cp_size=2, found 4", trainer, cp_size=2, sp_size=4),
    refused("fewer ranks", "product is the 8 ranks, found 4", trainer, 8, tp_size=2, dp_shard_size=2),
    refused("an exchange that is none", "cp_comm_strategy: expected allgather or alltoall", trainer, **RING),
)


def test_shards_without_fsdp_are_listed_and_a_hybrid_without_sizes_asks_for_them():
    plain = {key: value for key, value in TRAINER.items() if key != "fsdp"}
    found = trainer(raw=plain, dp_shard_size=4, dp_replicate_size=2)
    assert layout(found) == {"data": 8} and "parallelism_config.dp_shard_size" in missed(found)
    hybrid = {**TRAINER, "fsdp": "hybrid_shard"}
    assert "fsdp" in missed(from_trainer(hybrid, "args.json", ranks=8))
    assert "fsdp" not in missed(trainer(raw=hybrid, dp_shard_size=4, dp_replicate_size=2))


def test_with_deepspeed_the_trainer_s_sizes_count_where_its_file_is_silent(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    raw = {"output_dir": "x", "max_steps": 9, "per_device_train_batch_size": 2, "deepspeed": "ds.json"}
    raw["parallelism_config"] = {"sp_size": 2, "dp_shard_size": 2}
    found = from_trainer(raw, str(tmp_path / "args.json"), ranks=4)
    assert layout(found) == {"context": 2, "data": 2, "zero": 3}
    assert found.values["data.global_batch"] == 4
