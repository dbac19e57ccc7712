"""Megatron-LM's first format, one file for each rank: the same weights bit for bit, or a refusal."""

import io
import os
import shutil
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron_by_hand import write_experts, write_legacy
from megatron_models import MODELS
from safetensors.torch import load_file
from trilith.checkpoints import convert, read_source
from trilith.parallel_state import BadInput

LLAMA = MODELS["llama"]


def config(folder, model=LLAMA):
    made = folder / "config"
    made.mkdir()
    model.write_config(made)
    return made


def assert_converts(checkpoint, folder, model=LLAMA):
    """It becomes the model's tensors bit for bit; return what was told."""
    plan = convert(checkpoint, folder / "hf", config=config(folder, model), to="hf")
    found, wanted = load_file(folder / "hf" / "model.safetensors"), model.tensors()
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    return plan.source.warnings


def test_names_from_before_megatron_core_are_read_from_a_release(tmp_path):
    write_legacy(tmp_path / "run" / "release", LLAMA, 2)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    assert_converts(tmp_path / "run", tmp_path)


def test_experts_of_transformer_engine_are_read_from_the_files_of_all_expert_ranks(tmp_path):
    model = MODELS["mixtral"]
    assert_converts(write_experts(tmp_path / "iter_0000003", model, 2), tmp_path, model)


def test_what_a_rank_stores_beside_its_weights_is_passed_over_and_told(tmp_path):
    random = np.random.RandomState(1).get_state()
    beside = {
        "optimizer": {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": []}},
        "rng_state": [{"np_rng_state": random, "cuda_rng_state": torch.zeros(16, dtype=torch.uint8)}],
        "extra": {"_extra_state": io.BytesIO(b"scales of Transformer Engine")},
        "opt_param_scheduler": {"max_lr": 1e-4, "lr_decay_style": "cosine"},
    }
    told = assert_converts(write_legacy(tmp_path / "iter_0000003", LLAMA, 1, **beside), tmp_path)
    assert any("--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable" in line for line in told)


def test_a_norm_that_differs_between_tensor_ranks_is_told_and_taken_from_the_first(tmp_path):
    written = write_legacy(tmp_path / "iter_0000003", LLAMA, 2)
    path = written / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["language_model"]["encoder"]["final_norm.weight"][0] += 1
    torch.save(state, path)
    (line,) = (line for line in assert_converts(written, tmp_path) if "differ between" in line)
    assert ": 1 tensors that several ranks hold" in line and "decoder.final_layernorm.weight" in line


class Calls:
    """Pickle as a call of ``os.system``."""

    def __reduce__(self):
        return os.system, ("touch called",)


def test_a_pickle_that_would_call_something_is_refused(tmp_path):
    written = write_legacy(tmp_path / "iter_0000003", LLAMA, 1, extra=Calls())
    with pytest.raises(BadInput, match=r"posix\.system"):
        read_source(written, config=config(tmp_path))


def test_a_missing_rank_is_refused_by_name(tmp_path):
    written = write_legacy(tmp_path / "iter_0000003", LLAMA, 2)
    shutil.rmtree(written / "mp_rank_01")
    with pytest.raises(BadInput, match=r"mp_rank_01: .*2 tensor ranks"):
        read_source(written, config=config(tmp_path))


def test_ranks_of_two_steps_are_refused(tmp_path):
    written = write_legacy(tmp_path / "iter_0000003", LLAMA, 2)
    path = written / "mp_rank_01" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | {"iteration": 4}, path)
    with pytest.raises(BadInput, match=r"mp_rank_01.*iteration: expected 3, found 4.*not of one checkpoint"):
        read_source(written, config=config(tmp_path))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"checkpoint_version": 1.0}, "checkpoint_version: .*2.0 or later"),
        ({"args": None}, "args: .*arguments"),
        ({"model": {}}, "model: .*tensors"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused(other, said, tmp_path):
    written = write_legacy(tmp_path / "iter_0000003", LLAMA, 1, **other)
    with pytest.raises(BadInput, match=said):
        read_source(written, config=config(tmp_path))


def shared(depth):
    """Return dicts that are the same one fifty times over, on each level."""
    inside = {}
    for _ in range(depth):
        inside = {str(number): inside for number in range(50)}
    return inside


LAYER = "decoder.layers.0"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (shared(8), "model: expected tensors"),
        (
            {"decoder.layers." + "9" * 5000 + ".mlp.linear_fc2.weight": torch.zeros(2, 2)},
            "expected 1, as args",
        ),
        ({f"{LAYER}.mlp.linear_fc2.weight": torch.zeros(2)}, "expected 2 dims"),
        ({f"{LAYER}.x": torch.zeros(2), "output_layer.weight": torch.zeros(())}, "expected 2 dims"),
        ({f"{LAYER}.mlp.experts.local_experts.0.linear_fc1.weight": torch.zeros(2)}, "expected 2 dims"),
        ({f"{LAYER}.mlp.experts.weight1": torch.zeros(3, 5)}, "2 experts of hidden size 16"),
    ],
    ids=["shared dicts", "digits", "one dim", "no dim", "expert", "grouped"],
)
def test_a_model_that_is_not_what_its_names_say_is_refused(model, said, tmp_path):
    args = Namespace(**vars(LLAMA.args) | {"num_experts": 2, "num_layers": 1})
    written = write_legacy(tmp_path / "iter_0000003", replace(LLAMA, args=args), 1, model=model)
    with pytest.raises(BadInput, match=said):
        read_source(written, config=config(tmp_path, one_layer()))


def one_layer():
    return replace(LLAMA, config=LLAMA.config | {"num_hidden_layers": 1})


def test_layers_that_the_files_lack_are_refused(tmp_path):
    written = write_legacy(tmp_path / "iter_0000003", LLAMA, 1)
    path = written / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    encoder = state["model"]["language_model"]["encoder"]
    state["model"]["language_model"]["encoder"] = {k: v for k, v in encoder.items() if "layers.3." not in k}
    torch.save(state, path)
    with pytest.raises(BadInput, match=r"layers: expected 4, as args.num_layers says"):
        read_source(written, config=config(tmp_path))
