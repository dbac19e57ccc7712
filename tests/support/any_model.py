"""Try a causal model of transformers at a tiny size: against transformers itself, and in each layout."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite, prod
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
    Box,
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
from trilith.testing.layouts import (
    Observation,
    Pieces,
    as_pieces,
    assemble,
    differences,
    observe,
    random_rows,
)
from trilith.training import Precision, Step, TokenLoss, shard_over_data

from support.families import in_files

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

#: Config keys by their size, of whatever type; only keys that a config class has are set. Of two names of one
#: key the later has the say.
_SIZES: dict[int | None, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    96: "intermediate_size ffn_hidden_size intermediate_size_mlp decoder_ffn_dim encoder_ffn_dim",
    64: """hidden_size max_position_embeddings word_embed_proj_dim max_target_positions out_hidden_size
        vision_output_dim projector_input_dim projector_output_dim""",
    32: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size mamba_d_head dim_model_base image_size""",
    24: "q_lora_rank",
    16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim indexer_head_dim",
    8: """sliding_window qk_rope_head_dim state_size mamba_d_state mamba_chunk_size chunk_size
        linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input patch_size
        attention_chunk_size index_topk rotary_dim indexer_budget hc_lowrank ple_embed_dim""",
    4: """num_hidden_layers num_attention_heads num_experts num_local_experts mamba_d_conv mamba_dt_rank
        time_step_rank mamba_n_heads linear_num_value_heads linear_num_heads num_heads decoder_layers
        decoder_attention_heads num_decoder_layers num_decoder_attention_heads encoder_attention_heads""",
    2: """num_key_value_heads num_experts_per_tok moe_topk n_group mamba_expand linear_num_key_heads
        index_n_heads eos_token_id indexer_n_heads indexer_compress_ratio depth""",
    1: """n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers topk_group mamba_n_groups
        bos_token_id indexer_kv_heads encoder_layers num_encoder_layers num_global_layers""",
    0: "num_nextn_predict_layers num_kv_shared_layers",
    None: "pad_token_id",
}
SMALL: dict[str, Any] = {key: size for size, keys in _SIZES.items() for key in keys.split()}
SMALL["mlp_only_layers"] = [0]
#: Keys that are no factor of the forward pass, by a part of their names; those of dropouts become 0.
_OFF = ("drop", "jitter")
_LEAVE = names("eps init std range coef rope rotary theta time_step aux ratio percent")
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
#: What the scheme above gets wrong, by type.
SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: {"pad_token_id": 0} for kind in (*FROM_PADDING, "prophetnet", "xmod", "xglm")},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "o_groups": 2, "o_lora_rank": 16,
    },
    **{kind: {"layer_types": ["conv", "full_attention"] * 2} for kind in ("lfm2", "lfm2_moe")},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "zaya": {"num_experts_per_tok": 1},
    "ctrl": {"dff": 96},
    "roc_bert": {
        f"{kind}_{key}": size for kind in ("pronunciation", "shape")
        for key, size in (("vocab_size", 40), ("embed_dim", 16))
    },
    "qwen4_exp_text": {key: SMALL[key] for key in SMALL if key.startswith("indexer_")},
    "reformer": {  # whose positions are those of rows that it trains on
        "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 48], "attention_head_size": 16,
        "feed_forward_size": 96, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4,
        "hash_seed": 1,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4,
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16,
    },
    **{
        f"{kind}_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
        for kind in ("glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")
    },
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "whisper": {"encoder_attention_heads": 4},
    "qwen2_vl_vision": {"embed_dim": 64},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    **{kind: {"ffn_dim": 96} for kind in ("kosmos_2_text_model", "kosmos_2_5_text_model", "moshi")},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "modernbert-decoder": {"pad_token_id": 0, "local_attention": 16},
}  # fmt: skip
SPECIAL["xmod"]["default_language"], SPECIAL["xglm"]["ffn_dim"] = "en_XX", 96


def tiny(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny config.json's dict of a type, with each factor off its default where it has one."""
    return tiny_of(config_class(kind)()) | {"model_type": kind} | SPECIAL.get(kind, {}) | changes


def tiny_of(base: Any) -> dict[str, Any]:
    """Return the dict of a config, and of each that it has inside, made tiny."""
    stated, raw = base.to_dict(), dict[str, Any]()
    for key in base.sub_configs:
        if (part := getattr(base, key, None)) is not None:
            raw[key] = tiny_of(part) | {"model_type": part.model_type} | SPECIAL.get(part.model_type, {})
            if "pad_token_id" in raw[key]:
                raw[key]["pad_token_id"] = 0
    for key, value in stated.items():
        if isinstance(value, float) and isfinite(value):
            if any(word in key for word in _OFF):
                raw[key] = 0.0
            elif value and not any(word in key for word in _LEAVE):
                raw[key] = value * 1.25
    for key, value in SMALL.items():
        key = base.attribute_map.get(key, key)
        usual = key.endswith("token_id") or key in ("head_dim", "num_key_value_heads", "sliding_window")
        if key in stated and (usual or stated[key] is not None):
            raw[key] = value
    if "qk_rope_head_dim" in stated:  # from which the head dim follows
        raw |= {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
    alone = {"is_decoder": True, "is_encoder_decoder": False}
    raw |= {key: value for key, value in alone.items() if key in stated}
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
            part, shape = data[: box.shape[0]] if box.shape else data, declaration.shape
            if len(shape) > 3 and not declaration.buffer:  # of an image encoder: as rows, which take no time
                shape, part = (shape[0], prod(shape[1:])), part.flatten(1)
                box = Box((box.start[0], 0), (box.stop[0], shape[1]))
            fill(part, box, shape, Normal(0.3 if flat else 0.1), seed_of(0, name))
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
def train_in(layout: Layout, raw: Mapping[str, Any]) -> Observation:
    """Train on this rank of a layout; an error says in one line how it began."""
    state = ParallelState.start(layout)
    try:
        with InFp64():
            return observed(*stepped(raw, state), state)
    except Exception as error:
        raise RuntimeError(words(error)) from error


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
    wanted = {name: torch.zeros_like(gradient) for name, (_, _, gradient) in seen.gradients.items()}
    named = dict(theirs.named_parameters(remove_duplicate=False))
    for link in held_links(made, config):
        if link.hf in named and (gradient := named[link.hf].grad) is not None:
            piece = gradient[link.hf_box.slices]
            assert link.ours in wanted or not piece.any(), f"{link.ours} is not trained"
            if link.ours in wanted:
                target = wanted[link.ours][link.ours_box.slices]
                target.copy_(piece.reshape(target.shape))
    row.proved["gradients"] = farthest(seen, loss, wanted, seen.gradients)
    return row, seen


def farthest(seen: Observation, loss: Tensor, wanted: Mapping[str, Tensor], found: Pieces) -> float:
    """Return how far the first loss and gradients are from those wanted."""
    gaps = (gap for _, gap in differences(wanted, [found]))
    return max(apart(loss.new_tensor(seen.losses[0]), loss), *gaps)


def beside_zoo(ours: Any, step: Step) -> tuple[Observation, float]:
    """Train the model, and return how far the first loss and gradients of the zoo's own model are from its,
    by the names in files. Asserts that both write the same bytes of the same file.
    """
    with TemporaryDirectory() as place, patch(f"{adopted.__name__}.refusals", lambda kind: {}):
        there = Path(place)
        convert(save(there / "ours", ours), there / "hf", to="hf")
        zoo = cast(Any, load(there / "hf", dtype=torch.float64).model)
        assert type(zoo) is FAMILIES[zoo.family.model_type].model
        convert(save(there / "zoo", zoo), there / "again", to="hf")
        assert not [*differences_of_files(read_source(there / "hf"), read_source(there / "again"))]
        set_auxiliary_losses(zoo.train(), balance=0.0, z_loss=0.0)
        loss = Step(zoo, TokenLoss(zoo), micro_batch=SAMPLES)(batch())
        theirs = {name: weight.grad for name, weight in zoo.named_parameters() if weight.grad is not None}
        wanted, seen = in_files(zoo.family, zoo.config, theirs), observed(ours, step, step.state)
        gradients = {name: gradient for name, (_, _, gradient) in seen.gradients.items()}
        mine = in_files(ours.family, ours.config, gradients)
    return seen, farthest(seen, loss, wanted, as_pieces(mine))


@torch.no_grad()
def causal(model: Any, row: Row) -> None:
    """Refuse a model in which a token changes what comes before it, whose documents in a row see each other,
    or that computes otherwise with a cache.
    """

    def refuse_over(gap: float, why: str) -> None:
        if not gap < 1e-9:
            row.refused["all"] = f"{why} by {gap:.0e}"

    model.eval()
    ids, half, cut = batch().input_ids, LENGTH // 2, LENGTH // 3
    changed = torch.cat([ids[:, :half], (ids[:, half:] + 1) % (VOCABULARY - 4)], dim=1)
    gap = apart(model(changed)[:, :half], model(ids)[:, :half])
    refuse_over(gap, "a token sees later ones: logits change")
    if not model.can_cache:
        return
    ids, positions = ids[:1], torch.arange(LENGTH).unsqueeze(0)
    packed = model(ids, torch.cat([positions[:, :cut], positions[:, : LENGTH - cut]], dim=1))
    gap = apart(packed, torch.cat([model(ids[:, :cut]), model(ids[:, cut:])], dim=1))
    cache = KeyValueCache(1, LENGTH)
    for start, stop in ((0, cut), (cut, LENGTH - 1), (LENGTH - 1, LENGTH)):
        last = model(ids[:, start:stop], positions[:, start:stop], cache)
    refuse_over(max(gap, apart(last, model(ids)[:, -1:])), "packed documents or a cache change logits")


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
    return gap if gap == gap else inf


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
    gradients = max(row.proved["gradients"], row.proved.get("zoo", 0.0))
    if row.proved["transformers"] > NEAR or gradients > 1e-4:
        row.refused["all"] = f"not transformers' own: {row.proved}"
    made = family(kind)
    for axis, layout in axes.items() if "all" not in row.refused else ():
        try:
            made.check_layout(made.from_hf(raw), layout)
            ranks = run_parallel(train_in, layout.world, layout, raw, timeout=50)
        except BadInput as error:
            row.refused[axis] = error.todo or str(error)
        except RankError as error:
            row.refused[axis] = str(error.cause or error).partition("\n")[0]
        else:
            judge(row, axis, alone, ranks)
    return row


def judge(row: Row, axis: str, alone: Observation, ranks: list[Observation]) -> None:
    """Compare what ranks saw with what one process saw."""
    figures = [torch.tensor(seen.losses + seen.norms, dtype=torch.float64) for seen in (alone, *ranks)]
    gaps = [float((figure / figures[0] - 1).abs().max()) for figure in figures[1:]]
    try:
        for what in ("gradients", "parameters"):
            whole, parts = assemble([getattr(alone, what)]), [getattr(rank, what) for rank in ranks]
            gaps += [gap for _, gap in differences(whole, parts)]
    except AssertionError as error:
        row.refused[axis] = f"failed: {str(error)[:160]}"
    else:
        if all(gap <= SAME for gap in gaps):
            row.proved[axis] = max(gaps)
        else:
            row.refused[axis] = f"differs by {max(gaps):.0e}"


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
