"""Write one small model in every form that other projects use, Megatron's aside.

Run as a program, it writes the forms that need the writers which users have, as two ranks, because one
process writes no tensor in several chunks. Archives are packed because most of a small DCP folder is padding.

- ``titan.tar.xz``: torchtitan's names and its form of an optimizer's state, with
  ``torch.distributed.checkpoint`` and tensors sharded as FSDP2 does. The moments of a weight w are 2 w and
  w * w.
- ``accelerate.tar.xz``: transformers' Llama under FSDP2 after two steps of AdamW with a learning rate of 0,
  through the functions that Accelerate's ``save_state`` calls.
"""

import json
import os
import shutil
import tarfile
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.configs import WHOLE
from trilith.machine.random_files import write_hf_folder

HERE = Path(__file__).parent
WEIGHTS = "model.safetensors"
CONFIG = WHOLE | {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
MLP = {"gate": "w1", "up": "w3", "down": "w2"}
TITAN = {
    **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "layers"},
    **{f"self_attn.{part}_proj": f"attention.w{part}" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"feed_forward.{name}" for part, name in MLP.items()},
}


def titan_name(name):
    """Return torchtitan's and Meta's name of a tensor of Hugging Face's Llama."""
    for theirs, ours in TITAN.items():
        name = name.replace(f"{theirs}.", f"{ours}.")
    return name


def paired(name, weight):
    """Return a weight as Meta and torchtitan store it: the halves of a head's rows take turns."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weight
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, 2, rows, -1).transpose(1, 2).reshape(weight.shape)


def titan_weights(hf):
    return {titan_name(name): paired(name, weight) for name, weight in hf.items()}


def save(state, folder):
    """Write with DCP as one process; torch warns that there is only one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)


def write_forms(folder):
    """Write ``hf`` and every other form of the same weights into a folder."""
    write_hf_folder(folder / "hf", CONFIG)
    (folder / "hf" / "tokenizer.json").write_text("{}")
    for name in ("titan", "accelerate"):
        with tarfile.open(HERE / f"{name}.tar.xz") as packed:
            packed.extractall(folder, filter="data")
    hf = load_file(folder / "hf" / WEIGHTS)
    save({"model": hf}, folder / "dcp")
    torch.save({"step": 3, "model": hf, "notes": ["text", 1.5]}, folder / "model.pt")
    for name in ("bin", "bins"):
        (folder / name).mkdir()
        shutil.copy(folder / "hf" / "config.json", folder / name)
    torch.save(hf, folder / "bin" / "pytorch_model.bin")
    names = [*hf]
    shards = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for shard, held in shards.items():
        torch.save({name: hf[name] for name in held}, folder / "bins" / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "bins" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name, along in (("llama2", 1), ("llama3", 0)):
        write_meta(folder / name, hf, parts=2, embedding=along)
    return folder


_KEPT = tempfile.TemporaryDirectory(prefix="forms-")


@cache
def made_once():
    """Return a folder with ``hf`` and every other form, which stays until this process ends."""
    return write_forms(Path(_KEPT.name))


PARAMS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": CONFIG["rms_norm_eps"]}


def write_meta(folder, hf, *, parts, embedding):
    """Write Meta's form by hand: its own writer is in no package."""
    folder.mkdir()
    for part in range(parts):
        held = {"rope.freqs": torch.ones(2)}
        for name, weight in titan_weights(hf).items():
            along = 1 if name.endswith(("wo.weight", "w2.weight")) else None if "norm" in name else 0
            along = embedding if name.startswith("tok_emb") else along
            rows = torch.tensor_split(weight, parts, along)[part] if along is not None else weight
            held[name] = rows.clone()
        torch.save(held, folder / f"consolidated.{part:02d}.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | {"vocab_size": -1, "use_scaled_rope": True}))


def write(rank, folder):
    """Write both checkpoints as one of two ranks."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers import AutoModelForCausalLM

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29561", RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    accelerator = Accelerator(cpu=True)  # starts the process group, with gloo
    mesh = init_device_mesh("cpu", (2,))
    hf = load_file(folder / "hf" / "model.safetensors")
    weights = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in titan_weights(hf).items()}
    state = {
        name: {"exp_avg": one * 2, "exp_avg_sq": one * one, "step": torch.tensor(7.0)}
        for name, one in weights.items()
    }
    optimizer = {"state": state, "param_groups": {name: {"lr": 0.1} for name in weights}}
    train_state = {"step": torch.tensor(7, dtype=torch.int32)}
    dcp.save({**weights, "optimizer": optimizer, "train_state": train_state}, checkpoint_id=folder / "titan")

    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.0)
    for seed in range(2):
        ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(seed))
        model(input_ids=ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False
    )
    save_fsdp_model(plugin, accelerator, model, folder / "accelerate")
    save_fsdp_optimizer(plugin, accelerator, adam, model, folder / "accelerate")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write_hf_folder(Path(made) / "hf", CONFIG)
        torch.multiprocessing.spawn(write, (Path(made),), nprocs=2)
        for name in ("titan", "accelerate"):
            with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as packed:
                packed.add(Path(made) / name, name)
