"""Checkpoints of Megatron become the same model bit for bit, with the moments of its optimizer."""

import io
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron_by_hand import (
    BRIDGE,
    FUSED,
    WRITTEN,
    config_of,
    extra_state,
    model_of,
    shared_dicts,
    unpacked,
    whole,
    write_dist,
    write_experts,
    write_legacy,
    write_rank,
    write_stages,
)
from megatron_models import MODELS, sized
from support.round_trips import RoundTrip, Source, round_trips
from trilith.checkpoints import convert, load, read_source, save

LLAMA = MODELS["llama"]
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "iter_0000003"
READABLE = "--dist-ckpt-optim-fully-reshardable"


def test_every_form_has_an_archive_by_the_real_writer():
    forms = ("llama", "llama_flat", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe")
    assert set(WRITTEN) == {*forms, *(f"{one}_legacy" for one in ("llama", "gpt2", "mixtral", "qwen3_moe"))}


def source_of(write, model=LLAMA):
    """Return what writes a checkpoint, of which the model's tensors must come."""
    return lambda folder: Source(write(folder), model.tensors(), ["--config", str(config_of(model, folder))])


def fused(prefix):
    """Numbered layers, with norms as Transformer Engine has them, and without a word about the model."""

    def write(folder):
        weights = {}
        for name, value in whole(LLAMA).items():
            local = ".".join(name.split(".")[3:])
            weights[name.replace(local, FUSED[local]) if local in FUSED else name] = value
        moments = {kind: {name: value.abs() for name, value in weights.items()} for kind in MOMENTS}
        return write_dist(folder / "weights", weights, args=None, prefix=prefix, states=moments)

    return write


def run_folder(folder):
    write_dist(folder / "run" / STEP, whole(LLAMA), args=LLAMA.args)
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("3\n")
    return folder / "run"


def release(folder):
    write_legacy(folder / "run" / "release", LLAMA, 2)
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    return folder / "run"


def with_things_beside(folder):
    beside = {
        "optimizer": {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": []}},
        "rng_state": [{"np_rng_state": np.random.RandomState(1).get_state(), "cuda": torch.zeros(16)}],
        "extra": {"_extra_state": io.BytesIO(b"scales of Transformer Engine")},
        "opt_param_scheduler": {"max_lr": 1e-4, "lr_decay_style": "cosine"},
    }
    return write_legacy(folder / STEP, LLAMA, 1, **beside)


def norms_that_differ(folder):
    """Change a norm on the second tensor rank: it is taken from the first."""
    written = write_legacy(folder / STEP, LLAMA, 2)
    path = written / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["language_model"]["encoder"]["final_norm.weight"][0] += 1
    torch.save(state, path)
    return written


def expert_ranks_without_experts(folder):
    """Write a stage of dense layers alone, which is the same on all expert ranks."""
    args = Namespace(**vars(LLAMA.args), expert_model_parallel_size=2)
    for rank in range(2):
        write_rank(folder / STEP / f"mp_rank_00_{rank:03d}", args=args, model=whole(LLAMA))
    return folder / STEP


def archive(name):
    return source_of(lambda folder: unpacked(name, folder)[0], model_of(name))


BY_HAND = {
    **{f"fused norms, {one}": (fused(one), "states nothing about") for one in ("", "module.", "model.")},
    "newest step of a run": (run_folder, ""),
    "older names": (release, ""),
    "what lies beside weights": (with_things_beside, f"--ckpt-format torch_dist {READABLE}"),
    "a stage without experts": (expert_ranks_without_experts, ""),
    "norms that differ": (norms_that_differ, ": the first rank's copy is taken of 1 tensor which"),
}
WINDOW = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
MISTRAL = replace(LLAMA, config=LLAMA.config | WINDOW)
DEEP = sized(LLAMA, 24)
STAGES = source_of(lambda folder: write_stages(folder / STEP, DEEP), DEEP)
EXPERTS = source_of(lambda folder: write_experts(folder / STEP, MODELS["mixtral"], 2), MODELS["mixtral"])
test_every_tensor_of_a_megatron_checkpoint_is_hugging_faces_bit_for_bit = round_trips(
    *(RoundTrip(name, archive(name), ["--to hf"], "_extra_state, without weights") for name in WRITTEN),
    *(RoundTrip(f"{name} in a layout", archive(name), ["--tensor 2 --pipeline 2", "--to hf"])
      for name in ("llama_legacy", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe_legacy")),
    *(RoundTrip(why, source_of(write), ["--to hf"], warns) for why, (write, warns) in BY_HAND.items()),
    RoundTrip("numbered experts of Transformer Engine", EXPERTS, ["--to hf"]),
    RoundTrip("no word of a window", source_of(run_folder, MISTRAL), ["--to hf"], "config's is taken, 8"),
    RoundTrip("twelve virtual stages", STAGES, ["--to hf"]),
)  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "llama_flat"])
def test_moments_of_both_readable_forms_are_the_weights_moments_bit_for_bit(name, tmp_path):
    checkpoint, config = unpacked(name, tmp_path)
    convert(checkpoint, tmp_path / "sharded", config=config, tensor=2, pipeline=2)
    source = read_source(tmp_path / "sharded")
    assert source.manifest is not None and source.manifest.kind == "training" and source.manifest.step == 3
    ours = {link.hf: link.ours for link in source.family.links(source.model_config)[0]}
    for kind in MOMENTS:
        for hf, value in model_of(name).tensors(kind).items():
            assert torch.equal(source.ours[f"optimizer.{kind}.{ours[hf]}"].read(), value), (kind, hf)


def step(model, optimizer, number):
    optimizer.zero_grad()
    ids = (torch.arange(16)[None] * (number + 2)) % 27
    model(ids).logsumexp(-1).sum().backward()
    optimizer.step()


def start(folder):
    model = load(folder).model
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_run_from_imported_moments_goes_on_as_the_run_that_wrote_them(tmp_path):
    m = MODELS["llama"]
    begin = tmp_path / "begin"
    begin.mkdir()
    m.write_hugging_face(begin)
    model, optimizer = start(begin)
    for number in range(3):
        step(model, optimizer, number)
    source = read_source(save(tmp_path / "own", model, optimizer, step=3))
    hf = {link.ours: link.hf for link in source.family.links(source.model_config)[0]}
    drawn = {
        (hf[name.partition("optimizer.")[2].partition(".")[2] or name], kind): stored.read()
        for name, stored in source.ours.items()
        for kind in [name.split(".")[1] if name.startswith("optimizer.") else ""]
    }
    drawn_model = replace(m, draw=lambda name, shape, kind: drawn[name, kind])
    # The model's own weights are rounded, as bf16 training has them; the optimizer's are not.
    rounded = {name: value.bfloat16() for name, value in whole(drawn_model).items()}
    states = {"fp32_param": whole(drawn_model), **{one: whole(drawn_model, one) for one in MOMENTS}}
    written = write_dist(tmp_path / "iter_0000003", rounded, args=m.args, states=states, iteration=7)
    convert(written, tmp_path / "imported", config=config_of(m, tmp_path), to="sharded")

    other, its_optimizer = start(begin)
    progress = load(tmp_path / "imported", other, its_optimizer)
    assert progress.step == 7  # of which four were skipped: the optimizer made three updates
    for number in range(3, 5):
        step(model, optimizer, number)
        step(other, its_optimizer, number)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_model_in_megatron_bridges_file_is_read(tmp_path):
    written = write_dist(tmp_path / STEP, whole(LLAMA), args=None)
    (written / "run_config.yaml").write_text(BRIDGE.format(groups=2))
    source = read_source(written, config=config_of(LLAMA, tmp_path))
    assert source.foreign is not None and len(source.foreign.stated) == 8


def test_fused_norms_come_with_their_moments(tmp_path):
    assert read_source(fused("module.")(tmp_path), config=config_of(LLAMA, tmp_path)).moments


def test_moments_that_depend_on_the_ranks_are_left_and_the_flag_for_readable_ones_told(tmp_path):
    place = "dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    moments = {f"optimizer.distributed.{place}": torch.zeros(8)}
    other = moments | {"decoder.layers.0.mlp._extra_state": extra_state()}
    written = write_dist(tmp_path / STEP, whole(LLAMA), args=LLAMA.args, other=other)
    plan = convert(written, tmp_path / "out", config=config_of(LLAMA, tmp_path), tensor=2)
    told = "\n".join(plan.source.warnings)
    assert "1 entry of the optimizer" in told and READABLE in told
    assert "1 entry _extra_state" in told
    manifest = read_source(tmp_path / "out").manifest
    assert manifest is not None and manifest.kind == "weights"


@pytest.mark.parametrize(
    "optimizer", [{"param_groups": [{"step": 3.0}]}, {"state": {"common_step": torch.tensor(3.0)}}]
)
def test_updates_by_torch_s_adam_are_counted(optimizer, tmp_path):
    states = {kind: whole(LLAMA, kind) for kind in MOMENTS}
    written = write_dist(tmp_path / STEP, whole(LLAMA), args=LLAMA.args, states=states)
    torch.save({"args": LLAMA.args, "iteration": 7, "optimizer": {0: optimizer}}, written / "common.pt")
    source = read_source(written, config=config_of(LLAMA, tmp_path))
    assert source.foreign is not None and source.foreign.updates == 3


def test_an_optimizer_of_shared_dicts_is_walked_once(tmp_path):
    states = {kind: whole(LLAMA, kind) for kind in MOMENTS}
    written = write_dist(tmp_path / STEP, whole(LLAMA), args=LLAMA.args, states=states)
    torch.save({"args": LLAMA.args, "iteration": 3, "optimizer": shared_dicts(100, 6)}, written / "common.pt")
    assert read_source(written, config=config_of(LLAMA, tmp_path)).moments
