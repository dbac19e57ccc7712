"""Write ``megatron/*.tar.xz``: small checkpoints by the real writers of megatron-core, on a CPU and gloo.

Ran with megatron-core 0.16.1 and 0.13.1, torch 2.13, numpy 2.4, Python 3.11. A second environment is needed,
as the project does not depend on megatron-core:

    pip install --no-deps megatron-core==0.16.1 && python make_megatron_fixtures.py
    pip install --no-deps megatron-core==0.13.1 && python make_megatron_fixtures.py flat

What is real: the models (``GPTModel`` with its local layers), which tensor each rank holds and under which
name, and every file. Before it writes, rank 0 computes logits with Megatron's model of one rank, and they
equal transformers' for the same numbers. What is not: the distributed optimizer needs CUDA tensors, so its
own methods that describe what to save (``sharded_param_state_...``) are called with moments made here.
Transformer Engine does not run on a CPU. The distributed form has its names for norms (the local layers are
stored under them); its numbered experts and fused norms of the legacy form are in ``megatron_by_hand.py``.
"""

import argparse
import contextlib
import os
import signal
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
from megatron_models import MODELS

WORLD = 4
HERE = Path(__file__).parent / "megatron"
#: Name of the file -> the model, and what is special about the way in which it is written.
WRITTEN = {
    "llama": dict(model="llama", tp=2, pp=2, moments="fully_reshardable"),
    "llama_legacy": dict(model="llama", tp=2, pp=2, vp=2, legacy=True),
    "gpt2": dict(model="gpt2", tp=2, pp=2),
    "gpt2_legacy": dict(model="gpt2", tp=2, pp=2, legacy=True),
    "mixtral": dict(model="mixtral", tp=1, pp=2, ep=2),
    "mixtral_legacy": dict(model="mixtral", tp=1, pp=2, ep=2, legacy=True),
    "qwen3_moe": dict(model="qwen3_moe", tp=2, pp=1, ep=2, grouped=True),
    "qwen3_moe_legacy": dict(model="qwen3_moe", tp=2, pp=1, ep=2, grouped=True, legacy=True),
    "qwen2_moe": dict(model="qwen2_moe", tp=2, pp=1, ep=2, grouped=True, singleton=True),
}
#: By megatron-core 0.13: later versions refuse to write moments as flat ranges.
FLAT = {"llama_flat": dict(model="llama", tp=2, pp=1, moments="fully_sharded_model_space")}


def fill(model, m, at):
    """Set each parameter of one rank's part from the model's whole tensors."""
    first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(m.part(name, first, at).reshape(parameter.shape))


def patch_cuda_away():
    """Let megatron-core's optimizer and experts, which ask for a CUDA device by name, run on the CPU."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *device: None
    torch.cuda.Stream = SimpleNamespace
    torch.Tensor.cuda = lambda self, *device, **how: self
    np.product = np.prod  # megatron-core 0.13 with numpy 2
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None  # only a forward needs it
    moe_utils.te_general_gemm = None  # a name that 0.16 forgets without Transformer Engine

    megatron_random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def build(m, written, vp_stage, pre, post):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    a = m.args
    moe = a.num_experts is not None
    tp, pp, vp, ep = (written.get(key, 1) for key in ("tp", "pp", "vp", "ep"))
    same = [
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("ffn_hidden_size", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    ]
    of_experts = [
        *("moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_pre_softmax"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    ]
    experts = {key: getattr(a, key) for key in of_experts} | dict(
        expert_tensor_parallel_size=1, num_moe_experts=a.num_experts, moe_router_load_balancing_type="none",
        moe_grouped_gemm=written.get("grouped", False),
        moe_token_dispatcher_type="alltoall" if ep > 1 else "allgather",
    )  # fmt: skip
    config = TransformerConfig(
        **{key: getattr(a, key) for key in same}, **(experts if moe else {}),
        use_cpu_initialization=True, gated_linear_unit=a.swiglu, layernorm_epsilon=a.norm_epsilon,
        activation_func=torch.nn.functional.silu if a.swiglu else m.gelu,
        attention_dropout=0.0, hidden_dropout=0.0, pipeline_dtype=torch.float32,
        bias_activation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        sequence_parallel=False, expert_model_parallel_size=ep,
    )  # fmt: skip
    if moe:
        stage = {} if vp_stage is None else {"vp_stage": vp_stage}
        spec = get_gpt_decoder_block_spec(config, False, normalization=a.normalization, **stage)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=a.qk_layernorm, normalization=a.normalization)
    return GPTModel(
        config, spec, vocab_size=a.padded_vocab_size, max_sequence_length=a.max_position_embeddings,
        position_embedding_type=a.position_embedding_type, rotary_base=a.rotary_base,
        share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
        pre_process=pre, post_process=post, **({} if vp_stage is None else {"vp_stage": vp_stage}),
    )  # fmt: skip


def check_logits(m):
    """Megatron's model computes what transformers computes with the same numbers."""
    model = build(m, {"grouped": False}, None, True, True).eval()
    fill(model, m, SimpleNamespace(tp=0, tps=1, ep=0, eps=1))
    ids = torch.arange(12)[None] % m.config["vocab_size"]
    mask = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), 1)
    with torch.no_grad():
        ours = model(ids, torch.arange(12)[None], mask)[..., : m.config["vocab_size"]]
        theirs = m.transformers()(ids).logits
    worst = float((ours - theirs).abs().max())
    assert worst < 1e-4 * float(theirs.abs().max()), (m.name, worst)
    print(f"{m.name}: logits differ by {worst:.1e} of {float(theirs.abs().max()):.1f}", flush=True)


def moments_of(model, m, at):
    first = model.decoder.layers[0].layer_number - 1
    return {
        parameter: {
            key: m.part(name, first, at, key).reshape(parameter.shape).contiguous()
            for key in ("param", "exp_avg", "exp_avg_sq")
        }
        for name, parameter in model.named_parameters()
    }


def reshardable(sharded, moments):
    """``fully_reshardable`` by the method of megatron-core's distributed optimizer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    at, ranges = 0, {}
    for parameter in moments:
        ranges[parameter] = (at, at + parameter.numel(), 0)
        at += parameter.numel()
    world = {
        key: torch.cat([one[key].reshape(-1) for one in moments.values()])
        for key in ("param", "exp_avg", "exp_avg_sq")
    }
    optimizer = SimpleNamespace(
        get_parameter_state_dp_zero=lambda **kw: {0: {torch.float32: world}},
        gbuf_ranges=[{torch.float32: None}],
        buffers=[SimpleNamespace(param_index_map=ranges, numel_unpadded=at)],
    )
    return DistributedOptimizer.sharded_param_state_fully_reshardable(optimizer, sharded, metadata={})


def model_space(sharded, moments, rank, ranks):
    """``fully_sharded_model_space`` by the method of megatron-core's distributed optimizer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # The ranks of data parallelism share a parameter's elements, and cut within a row.
    cuts = {p: (p.numel() * rank // ranks, p.numel() * (rank + 1) // ranks) for p in moments}
    optimizer = SimpleNamespace(
        _get_main_param_and_optimizer_states=lambda p: {
            key: value.reshape(-1)[slice(*cuts[p])].clone() for key, value in moments[p].items()
        },
        ddp_config=SimpleNamespace(use_custom_fsdp=False),
        distributed_optimizer_instance_id=0,
        gbuf_ranges=[
            {
                torch.float32: [
                    {
                        "param_map": {
                            p: {"param": SimpleNamespace(start=a, end=b)} for p, (a, b) in cuts.items()
                        }
                    }
                ]
            }
        ],
    )
    return DistributedOptimizer.sharded_param_state_fs_model_space(optimizer, sharded)


def common(m, written):
    """Return what ``common.pt`` and the legacy files hold beside tensors, with objects of megatron-core's."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(
        **vars(m.args),
        tensor_model_parallel_size=written["tp"],
        pipeline_model_parallel_size=written["pp"],
        virtual_pipeline_model_parallel_size=written.get("vp"),
        expert_model_parallel_size=written.get("ep", 1),
        expert_tensor_parallel_size=1 if written.get("ep") else written["tp"],
        params_dtype=torch.float32,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        exit_signal=signal.SIGTERM,
        data_path=[Path("corpus_text_document")],
        iteration=3,
        consumed_train_samples=24,
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 3}


def write_legacy(models, m, written, folder, at):
    name = f"mp_rank_{at.tp:02d}"
    if written["pp"] > 1:
        name += f"_{at.pp:03d}"
    if written.get("ep", 1) > 1:
        name += f"_{at.ep:03d}"
    state = common(m, written)
    state["num_floating_point_operations_so_far"] = 0
    if len(models) == 1:
        state["model"] = models[0].state_dict_for_save_checkpoint()
    else:
        state |= {f"model{i}": one.state_dict_for_save_checkpoint() for i, one in enumerate(models)}
    path = folder / name / "model_optim_rng.pt"
    if at.dp == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)


def write(rank, name, written, folder, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    patch_cuda_away()
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    tp, pp, vp, ep = (written.get(key, 1) for key in ("tp", "pp", "vp", "ep"))
    moe = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1} if ep > 1 else {}
    ps.initialize_model_parallel(tp, pp, vp if vp > 1 else None, **moe)
    m = MODELS[written["model"]]
    at = SimpleNamespace(
        tp=ps.get_tensor_model_parallel_rank(), tps=tp, pp=ps.get_pipeline_model_parallel_rank(),
        ep=ps.get_expert_model_parallel_rank() if ep > 1 else 0, eps=ep, dp=ps.get_data_parallel_rank(),
    )  # fmt: skip
    if ep > 1:
        at.dp = ps.get_expert_data_parallel_rank()
    models = []
    for stage in range(vp):
        pre, post = at.pp == 0 and stage == 0, at.pp == pp - 1 and stage == vp - 1
        models.append(build(m, written, stage if vp > 1 else None, pre, post))
        fill(models[-1], m, at)
    if written.get("legacy"):
        write_legacy(models, m, written, Path(folder), at)
        torch.distributed.barrier()
        return
    metadata = {"singleton_local_shards": written.get("singleton", False)}
    if "flat" not in name:
        metadata["dp_cp_group"] = ps.get_data_parallel_group(with_context_parallel=True)
    sharded = models[0].sharded_state_dict(metadata=metadata)
    state = {"model": sharded, **common(m, written)}
    if written.get("moments"):
        moments = moments_of(models[0], m, at)
        by = written["moments"]
        made = (
            reshardable(sharded, moments)
            if by == "fully_reshardable"
            else model_space(sharded, moments, ps.get_data_parallel_rank(), ps.get_data_parallel_world_size())
        )
        group = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3)
        state["optimizer"] = {
            "optimizer": {"param_groups": [group]}, "param_state": made, "param_state_sharding_type": by,
        }  # fmt: skip
    content = {
        "distrib_optim_sharding_type": written.get("moments"),
        "singleton_local_shards": metadata["singleton_local_shards"],
    }
    stated = {} if "flat" in name else {"content_metadata": content}
    dist_checkpointing.save(
        state, folder, TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1), **stated
    )
    torch.distributed.barrier()


def check(rank, name, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    patch_cuda_away()
    from megatron.core import parallel_state as ps

    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    ps.initialize_model_parallel(1, 1)
    check_logits(MODELS[name])


def main():
    table = FLAT if sys.argv[1:2] == ["flat"] else WRITTEN
    wanted = sys.argv[2:] if sys.argv[1:2] == ["flat"] else sys.argv[1:]
    HERE.mkdir(exist_ok=True)
    for number, (name, written) in enumerate(table.items()):
        if wanted and name not in wanted:
            continue
        if not written.get("legacy"):
            mp.spawn(check, (written["model"], 29600 + number), nprocs=1)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "iter_0000003"
            folder.mkdir()
            mp.spawn(write, (name, written, str(folder), 29700 + number), nprocs=WORLD)
            with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9) as tar:
                for path in sorted(folder.rglob("*")):
                    tar.add(path, path.relative_to(scratch), recursive=False)
        print(name, (HERE / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
    main()
