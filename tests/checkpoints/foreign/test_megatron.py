"""Checkpoints of Megatron become the same model bit for bit, or are refused with the reason."""

import tarfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_by_hand import FUSED, extra_state, whole, write_dist
from megatron_models import MODELS
from safetensors.torch import load_file
from trilith.checkpoints import convert, load_model, read_source, restore_model, save_model
from trilith.cli.app import run
from trilith.parallel_state import BadCheckpoint, BadInput, Box

MOMENTS = ("exp_avg", "exp_avg_sq")
WRITTEN = {
    path.name.split(".")[0]: path for path in sorted((Path(__file__).parent / "megatron").glob("*.tar.xz"))
}


def model_of(name):
    return next(MODELS[one] for one in sorted(MODELS, key=len, reverse=True) if name.startswith(one))


def unpacked(name, folder):
    """Return the checkpoint, and a folder with the config and without weights."""
    with tarfile.open(WRITTEN[name]) as tar:
        tar.extractall(folder, filter="data")
    return folder / "iter_0000003", config_of(model_of(name), folder)


def config_of(m, folder, **changed):
    made = folder / "config"
    made.mkdir(exist_ok=True)
    replace(m, config=m.config | changed).write_config(made)
    return made


def assert_same(folder, m):
    """The folder of Hugging Face holds the model's tensors and no others, bit for bit."""
    found, wanted = load_file(folder / "model.safetensors"), m.tensors()
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_every_form_has_an_archive_by_the_real_writer():
    forms = ("llama", "llama_flat", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe")
    assert set(WRITTEN) == {*forms, *(f"{one}_legacy" for one in ("llama", "gpt2", "mixtral", "qwen3_moe"))}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_tensor_of_a_megatron_checkpoint_is_hugging_faces_bit_for_bit(name, tmp_path):
    checkpoint, config = unpacked(name, tmp_path)
    plan = convert(checkpoint, tmp_path / "hf", config=config, to="hf")
    assert_same(tmp_path / "hf", model_of(name))
    assert any("_extra_state are not read" in line for line in plan.source.warnings)


@pytest.mark.parametrize("name", ["llama_legacy", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe_legacy"])
def test_logits_after_conversion_are_transformers(name, tmp_path):
    checkpoint, config = unpacked(name, tmp_path)
    convert(checkpoint, tmp_path / "sharded", config=config, tensor=2, pipeline=2)
    ids = torch.arange(12)[None] % 27
    with torch.no_grad():
        ours = load_model(tmp_path / "sharded").eval()(ids)[..., :27]
        theirs = model_of(name).transformers()(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


def moment(source, kind, hf):
    """Return a moment by the name of Hugging Face's tensor, of a model whose tensors are alike in both."""
    ours = {link.hf: link.ours for link in source.family.links(source.model_config)[0]}
    name = f"optimizer.{kind}.{ours[hf]}"
    return source.read(name, Box.whole(source.catalog[name].shape), source.links())


@pytest.mark.parametrize("name", ["llama", "llama_flat"])
def test_moments_of_both_readable_forms_are_the_weights_moments_bit_for_bit(name, tmp_path):
    checkpoint, config = unpacked(name, tmp_path)
    convert(checkpoint, tmp_path / "sharded", config=config, tensor=2, pipeline=2)
    source = read_source(tmp_path / "sharded")
    assert source.manifest is not None and source.manifest.kind == "training" and source.manifest.step == 3
    for kind in MOMENTS:
        for hf, value in model_of(name).tensors(kind).items():
            assert torch.equal(moment(source, kind, hf), value), (kind, hf)


def step(model, optimizer, number):
    optimizer.zero_grad()
    ids = (torch.arange(16)[None] * (number + 2)) % 27
    model(ids).logsumexp(-1).sum().backward()
    optimizer.step()


def start(folder):
    model = load_model(folder)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_run_from_imported_moments_goes_on_as_the_run_that_wrote_them(tmp_path):
    m = MODELS["llama"]
    begin = tmp_path / "begin"
    begin.mkdir()
    m.write_hugging_face(begin)
    model, optimizer = start(begin)
    for number in range(3):
        step(model, optimizer, number)
    source = read_source(save_model(tmp_path / "own", model, optimizer, step=3))
    hf = {link.ours: link.hf for link in source.family.links(source.model_config)[0]}
    drawn = {
        (hf[name.partition("optimizer.")[2].partition(".")[2] or name], kind): source.read(
            name, Box.whole(stored.shape), source.links()
        )
        for name, stored in source.catalog.items()
        for kind in [name.split(".")[1] if name.startswith("optimizer.") else ""]
    }
    trained = replace(m, draw=lambda name, shape, kind: drawn[name, kind])
    # The model's own weights are rounded, as bf16 training has them; the optimizer's are not.
    rounded = {name: value.bfloat16() for name, value in whole(trained).items()}
    states = {"fp32_param": whole(trained), **{one: whole(trained, one) for one in MOMENTS}}
    written = write_dist(tmp_path / "iter_0000003", rounded, args=m.args, states=states, iteration=7)
    convert(written, tmp_path / "imported", config=config_of(m, tmp_path), to="sharded")

    other, its_optimizer = start(begin)
    progress = restore_model(tmp_path / "imported", other, its_optimizer)
    assert progress.step == 7  # of which four were skipped: the optimizer made three updates
    for number in range(3, 5):
        step(model, optimizer, number)
        step(other, its_optimizer, number)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_numbered_layers_with_norms_of_transformer_engine_are_read(prefix, tmp_path):
    m = MODELS["llama"]
    weights = {}
    for name, value in whole(m).items():
        local = ".".join(name.split(".")[3:])
        weights[name.replace(local, FUSED[local]) if local in FUSED else name] = value
    moments = {kind: {name: value.abs() for name, value in weights.items()} for kind in MOMENTS}
    written = write_dist(tmp_path / "weights", weights, args=None, prefix=prefix, states=moments)
    plan = convert(written, tmp_path / "hf", config=config_of(m, tmp_path), to="hf")
    assert plan.source.trains
    assert_same(tmp_path / "hf", m)
    assert any("states nothing about the model" in line for line in plan.source.warnings)


def test_the_model_in_megatron_bridges_file_is_compared_with_the_config(tmp_path):
    m = MODELS["llama"]
    written = write_dist(tmp_path / "iter_0000003", whole(m), args=None)
    stated = (
        "model:\n  num_layers: 4\n  num_attention_heads: 4\n  num_query_groups: {groups}\n  kv_channels: 4\n"
        "  normalization: RMSNorm\n  layernorm_epsilon: 1.0e-05\n  gated_linear_unit: true\n"
        "  activation_func: {{_target_: torch.nn.functional.silu, _call_: false}}\n"
        "  share_embeddings_and_output_weights: false\n  rotary_base: 10000\n"
        "  position_embedding_type: rope\n"
    )
    (written / "run_config.yaml").write_text(stated.format(groups=2))
    source = read_source(written, config=config_of(m, tmp_path))
    assert source.foreign is not None and len(source.foreign.stated) == 8
    (written / "run_config.yaml").write_text(stated.format(groups=4))
    with pytest.raises(BadInput, match=r"num_key_value_heads: .*num_query_groups in .*run_config\.yaml"):
        read_source(written, config=config_of(m, tmp_path))
    for text in ("model: [", "a: &a {b: 1}\nmodel:\n  <<: [*a, *a]\n"):
        (written / "run_config.yaml").write_text(text)
        with pytest.raises(BadInput, match="YAML"):
            read_source(written, config=config_of(m, tmp_path))


def test_moments_that_depend_on_the_ranks_are_left_and_the_flag_for_readable_ones_told(tmp_path):
    m = MODELS["llama"]
    place = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    )
    other = {f"{place}.exp_avg": torch.zeros(8), "decoder.layers.0.mlp._extra_state": extra_state()}
    written = write_dist(tmp_path / "iter_0000003", whole(m), args=m.args, other=other)
    plan = convert(written, tmp_path / "out", config=config_of(m, tmp_path), tensor=2)
    told = "\n".join(plan.source.warnings)
    assert "1 entries of the optimizer" in told and "--dist-ckpt-optim-fully-reshardable" in told
    assert "1 entries _extra_state" in told
    manifest = read_source(tmp_path / "out").manifest
    assert manifest is not None and manifest.kind == "weights"


def shared_dicts():
    """Return dicts that are the same one a hundred times over, on each of six levels."""
    inside = {"number": 1}
    for _ in range(6):
        inside = {str(number): inside for number in range(100)}
    return inside


def other_args(**changed):
    return Namespace(**vars(MODELS["llama"].args) | changed)


@pytest.mark.parametrize(
    ("argument", "changed", "field"),
    [
        ("num_layers", 5, "num_hidden_layers"),
        ("hidden_size", 32, "hidden_size"),
        ("num_attention_heads", 8, "num_attention_heads"),
        ("num_query_groups", 4, "num_key_value_heads"),
        ("kv_channels", 8, "head_dim"),
        ("ffn_hidden_size", 48, "intermediate_size"),
        ("padded_vocab_size", 64, "vocab_size"),
        ("rotary_base", 500000, "rope_theta"),
        ("rotary_percent", 0.5, "rotary_dim"),
        ("use_rope_scaling", True, "rope_scaling"),
        ("norm_epsilon", 1e-6, "rms_norm_eps"),
        ("swiglu", False, "hidden_act"),
        ("untie_embeddings_and_output_weights", False, "tie_word_embeddings"),
    ],
)
def test_an_argument_that_disagrees_with_the_config_is_refused_by_both_names(
    argument, changed, field, tmp_path
):
    args = other_args(**{argument: changed})
    written = write_dist(
        tmp_path / "iter_0000003", {"embedding.word_embeddings.weight": torch.zeros(32, 16)}, args=args
    )
    with pytest.raises(BadInput, match=rf"{field}: .*args\.{argument} in .*common\.pt"):
        read_source(written, config=config_of(MODELS["llama"], tmp_path))


LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("stated", "scaling", "said"),
    [
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {"rope_type": "llama3", **LLAMA_3},
            "llama3 32.0",
        ),
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear"}, "linear 4"),
    ],
    ids=["llama3", "linear"],
)
def test_a_factor_of_the_scaled_rotation_that_differs_is_refused(stated, scaling, said, tmp_path):
    embedding = {"embedding.word_embeddings.weight": torch.zeros(32, 16)}
    written = write_dist(tmp_path / "iter_0000003", embedding, args=other_args(**stated))
    config = config_of(MODELS["llama"], tmp_path, rope_scaling=scaling | {"factor": 8.0})
    with pytest.raises(BadInput, match=f"rope_scaling: expected {said}, .*found .*8.0"):
        read_source(written, config=config)


@pytest.mark.parametrize(
    ("field", "changed", "argument"),
    [
        ("num_experts", 8, "num_experts"),
        ("num_experts_per_tok", 3, "moe_router_topk"),
        ("norm_topk_prob", True, "moe_router_pre_softmax"),
        ("shared_expert_intermediate_size", 16, "moe_shared_expert_intermediate_size"),
        ("moe_intermediate_size", 16, "moe_ffn_hidden_size"),
    ],
)
def test_experts_that_disagree_with_the_config_are_refused(field, changed, argument, tmp_path):
    checkpoint, _ = unpacked("qwen2_moe", tmp_path)
    config = config_of(MODELS["qwen2_moe"], tmp_path, **{field: changed})
    with pytest.raises(BadInput, match=rf"args\.{argument}"):
        read_source(checkpoint, config=config)


@pytest.mark.parametrize(
    "argument", ["rotary_interleaved", "num_layers", "apply_layernorm_1p", "multi_latent_attention"]
)
def test_a_model_whose_weights_mean_something_else_is_refused(argument, tmp_path):
    written = write_dist(
        tmp_path / "iter_0000003",
        {"embedding.word_embeddings.weight": torch.zeros(32, 16)},
        args=other_args(**{argument: shared_dicts()}),
    )
    with pytest.raises(BadInput, match=argument):
        read_source(written, config=config_of(MODELS["llama"], tmp_path))


def test_a_family_that_scales_what_megatron_cannot_is_refused(tmp_path):
    m = MODELS["llama"]
    written = write_dist(tmp_path / "iter_0000003", whole(m), args=m.args)
    changed = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0}
    with pytest.raises(BadInput, match="embed_tokens"):
        read_source(written, config=config_of(m, tmp_path, **changed))


def test_another_backend_is_refused_with_the_flag(tmp_path):
    m = MODELS["llama"]
    written = write_dist(tmp_path / "iter_0000003", {"a": torch.zeros(1)}, args=m.args)
    (written / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(BadInput, match="--ckpt-format torch_dist"):
        read_source(written, config=config_of(m, tmp_path))


def test_the_folder_of_a_run_means_its_newest_step(tmp_path):
    m = MODELS["llama"]
    write_dist(tmp_path / "run" / "iter_0000003", whole(m), args=m.args)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3\n")
    convert(tmp_path / "run", tmp_path / "hf", config=config_of(m, tmp_path), to="hf")
    assert_same(tmp_path / "hf", m)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("9\n")
    with pytest.raises(BadInput, match=r"latest_checkpointed.*found iter_0000009, which is not there"):
        read_source(tmp_path / "run", config=tmp_path / "config")


def test_more_layers_than_a_model_has_are_refused(tmp_path):
    stack = {"decoder.layers.mlp.linear_fc2.weight": torch.zeros((1 << 16) + 1, 1)}
    written = write_dist(tmp_path / "iter_0000003", stack, args=MODELS["llama"].args)
    with pytest.raises(BadInput, match="at most 65,536 layers"):
        read_source(written, config=config_of(MODELS["llama"], tmp_path))


def test_an_optimizer_of_shared_dicts_is_walked_once(tmp_path):
    m = MODELS["llama"]
    states = {one: whole(m, one) for one in MOMENTS}
    written = write_dist(tmp_path / "iter_0000003", whole(m), args=m.args, states=states)
    torch.save({"args": m.args, "iteration": 3, "optimizer": shared_dicts()}, written / "common.pt")
    assert read_source(written, config=config_of(m, tmp_path)).trains


def test_the_commands_read_a_checkpoint_of_megatron(tmp_path, capsys):
    checkpoint, config = map(str, unpacked("llama_legacy", tmp_path))
    out = str(tmp_path / "out")
    assert run(["convert", checkpoint, out, "--config", config, "--tensor", "2", "--pipeline", "2"]) == 0
    assert run(["diff", checkpoint, out, "--config", config]) == 0
    assert run(["verify", checkpoint, "--config", config]) == 0
    assert run(["inspect", checkpoint]) == 0
    said = capsys.readouterr().out
    assert "Megatron legacy" in said and "equal, bit for bit" in said and "vocab_size = 1 to 32" in said


def test_a_flipped_bit_in_a_megatron_checkpoint_is_found(tmp_path):
    checkpoint, config = unpacked("gpt2", tmp_path)
    source = read_source(checkpoint, config=config)
    part = source.catalog["transformer.h.0.mlp.c_fc.weight"].parts[0]
    held = source.files[part.file]
    begin, _ = next(held.byte_ranges(part.key))
    raw = bytearray(held.path.read_bytes())
    raw[begin] ^= 1
    held.path.write_bytes(raw)
    with pytest.raises(BadCheckpoint, match="CRC-32"):
        convert(checkpoint, tmp_path / "hf", config=config, to="hf")
    assert not (tmp_path / "hf").exists()
