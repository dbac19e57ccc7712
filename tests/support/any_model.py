"""Try a causal model of transformers at a tiny size: against transformers itself, and in each layout."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from trilith.checkpoints import convert, load, read_source, save
from trilith.checkpoints import differences as differences_of_files
from trilith.data import Batch
from trilith.layers import KeyValueCache, set_auxiliary_losses
from trilith.models import FAMILIES, implemented_by
from trilith.models.base.keys import names
from trilith.models.from_transformers import TransformersFamily, family_of_type
from trilith.models.from_transformers import model as adopted
from trilith.models.from_transformers.config import FROM_PADDING, config_class, model_class
from trilith.models.from_transformers.files import held_links
from trilith.parallel_state import (
    BadInput,
    Layout,
    Normal,
    ParallelState,
    clip_gradients,
    declarations,
    seed_of,
    stored_box,
)
from trilith.parallel_state.engine import local_data
from trilith.parallel_state.initial_weights import fill
from trilith.ranks import RankError, run_parallel
from trilith.testing.layouts import Observation, assemble, differences, observe, random_rows
from trilith.training import Precision, Step, TokenLoss, shard_over_data

#: Layouts by the axis that each proves.
LAYOUTS = {
    "tensor": Layout.of(tensor=2),
    "sequence": Layout.of(tensor=2, sequence=True),
    "pipeline": Layout.of(pipeline=2),
    "data": Layout.of(data=2, zero=3),
    "ZeRO 0": Layout.of(data=2),
    "context": Layout.of(context=2),
    "tensor x pipeline": Layout.of(tensor=2, pipeline=2),
}
LENGTH, SAMPLES, VOCABULARY, MOST = 32, 4, 130, 8_000_000
#: How far a layout may be from one process, and ours from transformers where that casts to fp32 inside.
SAME, NEAR = 1e-9, 1e-7

#: Sizes by config key, of whatever type; only keys that a config class has are set.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "sliding_window": 8, "attention_window": 8, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1, "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "mlp_only_layers": [0], "n_group": 2, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "shared_intermediate_size": 32, "state_size": 8,
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "time_step_rank": 4,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_chunk_size": 8, "chunk_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    "attention_chunk_size": 8, "intermediate_size_mlp": 96, "dim_model_base": 32, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 8, "word_embed_proj_dim": 64, "rotary_dim": 8, "n_inner": 96,
    "num_nextn_predict_layers": 0, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    "mtp_num_layers": 0, "linear_head_dim": 8, "linear_num_heads": 4, "unpadded_vocab_size": VOCABULARY,
    "num_kv_shared_layers": 0, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 8, "ple_embed_dim": 8,
    "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "num_decoder_layers": 4,
    "num_decoder_attention_heads": 4, "max_target_positions": 64, "encoder_layers": 1,
    "num_encoder_layers": 1, "encoder_ffn_dim": 96, "encoder_attention_heads": 4, "depth": 2,
    "image_size": 32, "patch_size": 8, "out_hidden_size": 64, "num_heads": 4, "vision_output_dim": 64,
    "num_global_layers": 1, "projector_input_dim": 64, "projector_output_dim": 64,
}  # fmt: skip
#: Keys that are no factor of the forward pass, by a part of their names; those of dropouts become 0.
_OFF = ("drop", "jitter")
_LEAVE = names("eps init std range coef rope rotary theta time_step aux ratio percent")
#: What the scheme above gets wrong, by type.
SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: {"pad_token_id": 0} for kind in FROM_PADDING},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    **{kind: {"layer_types": ["conv", "full_attention"] * 2} for kind in ("lfm2", "lfm2_moe")},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "zaya": {"num_experts_per_tok": 1},
    "ctrl": {"dff": 96},
    "roc_bert": {
        **{f"{kind}_vocab_size": 40 for kind in ("pronunciation", "shape")},
        **{f"{kind}_embed_dim": 16 for kind in ("pronunciation", "shape")},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {  # whose positions are those of rows that it trains on
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 48],
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
    },
    **{
        f"{kind}_text": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        }
        for kind in ("glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")
    },
    "glm4v_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "qwen2_vl_vision": {"embed_dim": 64},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    **{f"kosmos_{number}_text_model": {"ffn_dim": 96} for number in ("2", "2_5")},
    "prophetnet": {"pad_token_id": 0},
    "moshi": {"ffn_dim": 96},
    "xmod": {"pad_token_id": 0, "default_language": "en_XX"},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "xglm": {"pad_token_id": 0, "ffn_dim": 96},
    "modernbert-decoder": {"pad_token_id": 0, "local_attention": 16},
}


def tiny(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny config.json's dict of a type, with each factor off its default where it has one."""
    return tiny_of(config_class(kind)()) | {"model_type": kind} | SPECIAL.get(kind, {}) | changes


def tiny_of(base: Any) -> dict[str, Any]:
    """Return the dict of a config, and of each that it has inside, made tiny."""
    names = {attribute: key for attribute, key in base.attribute_map.items()}
    stated = base.to_dict()
    raw: dict[str, Any] = {}
    for key in base.sub_configs:
        if (part := getattr(base, key, None)) is not None:
            raw[key] = tiny_of(part) | {"model_type": part.model_type} | SPECIAL.get(part.model_type, {})
            if "pad_token_id" in raw[key]:
                raw[key]["pad_token_id"] = 0
    for key, value in stated.items():
        if isinstance(value, float) and value not in (float("inf"), float("-inf")):
            if any(word in key for word in _OFF):
                raw[key] = 0.0
            elif value and not any(word in key for word in _LEAVE):
                raw[key] = value * 1.25
    for key, value in SMALL.items():
        key = names.get(key, key)
        usual = key.endswith("token_id") or key in ("head_dim", "num_key_value_heads", "sliding_window")
        if key in stated and (usual or stated[key] is not None):
            raw[key] = value
    if "qk_rope_head_dim" in stated:  # from which the head dim follows
        raw["head_dim"] = SMALL["qk_rope_head_dim"]
        raw["num_key_value_heads"] = SMALL["num_attention_heads"]
    for key, value in (("is_decoder", True), ("is_encoder_decoder", False)):
        if key in stated:
            raw[key] = value
    kinds = stated.get("layer_types")
    if isinstance(kinds, list) and kinds:
        raw["layer_types"] = (list(dict.fromkeys(kinds)) * 4)[:4]
    for key, value in stated.items():
        by_block = isinstance(value, list) and key.endswith(("_types", "_pattern", "_layers"))
        if by_block and key not in raw and len(value) > 4:
            raw[key] = value[:4]
    return raw


@dataclass
class Row:
    """State what is proved of a type: the largest difference by axis, or why the axis is refused."""

    kind: str
    proved: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def family(kind: str) -> TransformersFamily:
    """Return the family of a type with no axis refused for want of a proof."""
    made = family_of_type(kind)
    assert isinstance(made, TransformersFamily), kind
    return replace(made, trusted=True)


@torch.no_grad()
def draw(model: nn.Module, state: ParallelState) -> None:
    """Fill all parameters by their names, none with the values that it begins with."""
    stated = declarations(model)
    for name, parameter in model.named_parameters():
        declaration, data = stated[name], local_data(parameter)
        box = declaration.true_part(stored_box(parameter, declaration, state))
        data.zero_()
        if declaration.integer:  # of whatever it chooses among, from the first three
            data.copy_(torch.arange(data.numel()).view_as(data) % 3)
        elif box.size:
            flat = len(declaration.shape) < 2
            part = data[: box.shape[0]] if box.shape else data
            fill(part, box, declaration.shape, Normal(0.3 if flat else 0.1), seed_of(0, name))
            if flat and not name.endswith("bias"):
                part.add_(0.5)
            if declaration.buffer and len(box.shape) > 2:  # of tokens by tokens: none sees later ones
                part.tril_()


def batch() -> Batch:
    generator = torch.Generator().manual_seed(7)
    ids, labels = random_rows(SAMPLES, LENGTH, VOCABULARY - 6, generator)
    return Batch(ids + 3, torch.where(labels < 0, labels, labels + 3))


def stepped(raw: Mapping[str, Any], state: ParallelState) -> tuple[nn.Module, Step]:
    """Return the model on this rank, with weights drawn by their names, and the step that trains it."""
    made, layout = family(str(raw["model_type"])), state.layout
    model = made.build(made.from_hf(raw), state=state, dtype=torch.float64)
    shard_over_data(model, state, Precision(torch.float64, torch.float64, torch.float64))
    model.to_empty(device=state.device)
    draw(model, state)
    # Under a pipeline and under ZeRO in two micro-batches, else in one, which one process takes too.
    rows = SAMPLES // layout.data
    return model, Step(
        model,
        TokenLoss(model),
        schedule="zbv" if layout.v_shape else "interleaved" if layout.virtual_stages > 1 else "1f1b",
        micro_batch=rows // 2 if layout.pipeline > 1 or layout.zero else rows,
    )


def observed(model: nn.Module, step: Step, state: ParallelState, steps: int = 2) -> Observation:
    """Take steps with this rank's rows of the batch."""
    whole, each = batch(), SAMPLES // state.layout.data
    rows = slice(state.data_index * each, (state.data_index + 1) * each)
    mine = Batch(whole.input_ids[rows], whole.labels[rows])

    def clip(model: nn.Module) -> Tensor:
        return clip_gradients(model, 0.1, state=state)

    return observe(lambda: (model, step), [mine] * steps, state, lr=1e-2, clip=clip)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Drop the warnings of transformers' own code."""
    with warnings.catch_warnings(action="ignore"):
        yield


@without_warnings()
def train_all(raw: Mapping[str, Any], layouts: Mapping[str, Layout]) -> dict[str, Observation]:
    """Train in each of these layouts of as many ranks; an error names its axis, and ends all of the ranks."""
    seen: dict[str, Observation] = {}
    for axis, layout in layouts.items():
        state = ParallelState.start(layout)
        try:
            with InFp64():
                seen[axis] = observed(*stepped(raw, state), state)
        except Exception as error:
            raise AxisError(axis, words(error)) from error
    return seen


class AxisError(Exception):
    """Say in which layout a rank failed, and how."""

    def __str__(self) -> str:
        return str(self.args[1])


def words(error: BaseException) -> str:
    """Return the first line of what an error says, or of the error that it began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BadInput):
        return error.todo or str(error)
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def reference(raw: Mapping[str, Any]) -> tuple[Row, Observation]:
    """Train in one process, and compare its logits, first loss and gradients with transformers' own."""
    kind, raw = str(raw["model_type"]), implemented_by(raw, "transformers")
    made, row, state = family(kind), Row(kind), ParallelState.alone()
    config, given = made.from_hf(raw), batch()
    made.links(config)  # which refuses rules for files that keep no boxes
    size = sum(parameter.numel() for parameter in made.on_meta(config).parameters())
    assert size < MOST, f"its config here is not tiny: {size:,} parameters"
    ours, step = stepped(raw, state)
    theirs = plain(config, made, ours)
    for training in (False, True):
        ours.train(training), theirs.train(training)
        with torch.no_grad():
            logits = ours(given.input_ids)
        wanted = theirs(input_ids=given.input_ids, use_cache=False).logits
        gap = apart(logits[..., :VOCABULARY], wanted)
        row.proved["transformers"] = max(row.proved.get("transformers", 0.0), gap)
    loss = nn.functional.cross_entropy(wanted.flatten(0, 1), given.labels.flatten(), ignore_index=-100)
    loss.backward()
    causal(ours, row)
    ours.train()
    if kind in FAMILIES:
        seen, row.proved["zoo"] = beside_zoo(ours, step)
    else:
        seen = observed(ours, step, state)
    gaps = [abs(seen.losses[0] / float(loss) - 1)]
    named = dict(theirs.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in named.values() if p.grad is not None)
    for link in held_links(made, config):
        if link.hf not in named:
            continue
        of_theirs = named[link.hf].grad
        if link.ours not in seen.gradients:  # not trained: then theirs must have none
            gaps.append(0.0 if of_theirs is None else float(of_theirs.abs().max()) / largest)
            continue
        piece = seen.gradients[link.ours][2][link.ours_box.slices]
        if of_theirs is None:
            gaps.append(float(piece.abs().max()) / largest)
            continue
        wanted = of_theirs[link.hf_box.slices]
        scale = max(float(wanted.abs().max()), 1e-7 * largest)
        gaps.append(float((piece.reshape(wanted.shape) - wanted).abs().max()) / scale)
    row.proved["gradients"] = max(gaps, key=lambda gap: (gap != gap, gap))
    return row, seen


def beside_zoo(ours: nn.Module, step: Step) -> tuple[Observation, float]:
    """Train the model, and return how far the first loss and gradients of the zoo's own model are from its,
    by the names in files. Asserts that both write the same bytes of the same file.
    """
    with TemporaryDirectory() as place, patch(f"{adopted.__name__}.why_refused", lambda kind: ""):
        there = Path(place)
        convert(save(there / "ours", ours), there / "hf", to="hf")
        zoo = cast(Any, load(there / "hf", dtype=torch.float64).model)
        assert type(zoo) is FAMILIES[zoo.family.model_type].model
        convert(save(there / "zoo", zoo), there / "again", to="hf")
        assert not [*differences_of_files(read_source(there / "hf"), read_source(there / "again"))]
        set_auxiliary_losses(zoo.train(), balance=0.0, z_loss=0.0)
        loss = Step(zoo, TokenLoss(zoo), micro_batch=SAMPLES)(batch())
        with torch.no_grad():
            for parameter in zoo.parameters():
                parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        theirs = read_source(save(there / "zoo gradients", zoo)).hf
        seen = observed(ours, step, step.state)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                parameter.zero_()
                if name in seen.gradients:
                    tensor = seen.gradients[name][2]
                    parameter.data[: len(tensor)] = tensor
        mine = read_source(save(there / "our gradients", ours)).hf
        assert mine.keys() == theirs.keys()
        pairs = [(mine[name].read(), theirs[name].read()) for name in mine]
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    gaps = [float((a - b).abs().max()) / max(float(b.abs().max()), 1e-7 * largest) for a, b in pairs]
    gaps.append(abs(seen.losses[0] / float(loss.detach()) - 1))
    return seen, max(gaps, key=lambda gap: (gap != gap, gap))  # one that is no number before all


def causal(model: Any, row: Row) -> None:
    """Refuse a model in which a token changes what comes before it."""
    model.eval()
    given = batch().input_ids
    changed = given.clone()
    changed[:, LENGTH // 2 :] = (changed[:, LENGTH // 2 :] + 1) % (VOCABULARY - 4)
    with torch.no_grad():
        gap = apart(model(changed)[:, : LENGTH // 2], model(given)[:, : LENGTH // 2])
    if not gap < 1e-9:
        row.refused["all"] = f"a token sees later ones: logits change by {gap:.0e}"
    if model.can_cache:
        of_documents(model, given[:1], row)


@torch.no_grad()
def of_documents(model: nn.Module, ids: Tensor, row: Row) -> None:
    """Refuse a model whose documents in a row see each other, or that computes otherwise with a cache."""
    positions, cut = torch.arange(LENGTH).unsqueeze(0), LENGTH // 3
    packed = model(ids, torch.cat([positions[:, :cut], positions[:, : LENGTH - cut]], dim=1))
    gap = apart(packed, torch.cat([model(ids[:, :cut]), model(ids[:, cut:])], dim=1))
    cache = KeyValueCache(1, LENGTH)
    for start, stop in ((0, cut), (cut, LENGTH - 1), (LENGTH - 1, LENGTH)):
        last = model(ids[:, start:stop], positions[:, start:stop], cache)
    gap = max(gap, apart(last, model(ids)[:, -1:]))
    if not gap < 1e-9:
        row.refused["all"] = f"packed documents or a cache change logits by {gap:.0e}"


class InFp64(TorchFunctionMode):
    """Let code that computes in fp32 compute in fp64, if it is given fp64: differences are then mistakes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        if func is torch.full and isinstance(args[1], float):
            kwargs = {"dtype": torch.float64} | kwargs
        return func(*args, **kwargs)


def apart(a: Tensor, b: Tensor) -> float:
    gap = float((a.detach().double() - b.detach().double()).abs().max() / b.detach().abs().max())
    return gap if gap == gap else float("inf")


def plain(config: Any, made: TransformersFamily, ours: nn.Module) -> Any:
    """Return transformers' model with the weights of ours."""
    theirs = model_class(config.model_type)._from_config(
        config.in_transformers(), dtype=torch.float64, attn_implementation="eager"
    )
    theirs.config.get_text_config(decoder=True)._experts_implementation = "eager"
    for parameter in theirs.parameters():  # some are in fp32 whatever is asked for
        parameter.data = parameter.data.double()
    links = held_links(made, config)
    tensors = {
        name: torch.full_like(tensor, float("nan") if tensor.is_floating_point() else -1)
        for name, tensor in theirs.state_dict().items()
    }
    parameters = dict(ours.named_parameters())
    for link in links:
        piece = parameters[link.ours].detach()[link.ours_box.slices]
        tensors[link.hf][link.hf_box.slices] = piece.to(tensors[link.hf].dtype)
    for name in getattr(theirs, "all_tied_weights_keys", None) or {}:
        tensors.pop(name, None)
    theirs.load_state_dict(tensors, strict=False)
    for name, tensor in theirs.state_dict().items():
        assert not bool(tensor.isnan().any()), f"{name} has no counterpart"
    return theirs


@without_warnings()
def prove(kind: str, raw: Mapping[str, Any] | None = None, axes: Mapping[str, Layout] = LAYOUTS) -> Row:
    """Return what is proved of a type."""
    try:
        raw = raw or tiny(kind)
        with InFp64():
            row, alone = reference(raw)
    except Exception as error:
        return Row(kind, refused={"all": str(error) if isinstance(error, BadInput) else words(error)})
    gradients = (row.proved["gradients"], row.proved.get("zoo", 0.0))
    if not row.proved["transformers"] <= NEAR or not all(gap <= 1e-4 for gap in gradients):
        row.refused["all"] = f"not transformers' own: {row.proved}"
    made, left = family(kind), dict(axes) if "all" not in row.refused else {}
    for axis, layout in axes.items():
        try:
            made.check_layout(made.from_hf(raw), layout)
        except BadInput as error:
            row.refused[axis] = error.todo or str(error)
            left.pop(axis, None)
    while left:
        world = min(layout.world for layout in left.values())
        layouts = {axis: layout for axis, layout in left.items() if layout.world == world}
        try:
            ranks = run_parallel(train_all, world, raw, layouts, timeout=50)
        except RankError as error:
            # One that raised names its axis; of ranks that wait for each other the first axis is to blame.
            failed, *_ = error.cause.args if isinstance(error.cause, AxisError) else layouts
            row.refused[failed] = str(error.cause or error).partition("\n")[0]
            del left[failed]
            continue
        for axis in layouts:
            judge(row, axis, alone, [rank[axis] for rank in ranks])
            del left[axis]
    return row


def judge(row: Row, axis: str, alone: Observation, ranks: list[Observation]) -> None:
    """Compare what ranks saw with what one process saw."""
    gaps = [
        abs(a - b) / abs(a)
        for rank in ranks
        for a, b in zip(alone.losses + alone.norms, rank.losses + rank.norms, strict=True)
    ]
    try:
        for what in ("gradients", "parameters"):
            whole, parts = assemble([getattr(alone, what)]), [getattr(rank, what) for rank in ranks]
            gaps += [gap for _, gap in differences(whole, parts)]
    except AssertionError as error:
        row.refused[axis] = f"failed: {str(error)[:160]}"
        return
    if not max(gaps) <= SAME:
        row.refused[axis] = f"differs by {max(gaps):.0e}"
    else:
        row.proved[axis] = max(gaps)


def main() -> None:
    """Try the types named, or all, and write a line of JSON for each."""
    import logging

    logging.disable(logging.WARNING)
    from trilith.models.from_transformers import adopted_types

    for kind in sys.argv[2:] or sorted(adopted_types()):
        row = prove(kind)
        with open(sys.argv[1], "a", encoding="utf-8") as out:
            print(json.dumps(asdict(row)), file=out)
        print(kind, {axis: f"{gap:.0e}" for axis, gap in row.proved.items()}, row.refused, flush=True)


if __name__ == "__main__":
    main()
