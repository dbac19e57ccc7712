"""Write the fixtures beside this file with the writers that users have; run it as a program.

Every fixture holds the weights of ``write_hf_folder(..., CONFIG)``, so that a test makes the Hugging Face
folder itself. Two ranks write, because one process writes no tensor in several chunks:

- ``titan.tar.xz``: torchtitan's names and its form of an optimizer's state, with
  ``torch.distributed.checkpoint`` and tensors sharded as FSDP2 does. The moments of a weight w are 2 w and
  w * w.
- ``accelerate.tar.xz``: transformers' Llama under FSDP2 after two steps of AdamW with a learning rate of 0,
  through the functions that Accelerate's ``save_state`` calls.

Archives are packed because most of a small DCP folder is padding.
"""

import os
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.configs import WHOLE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from trilith.machine.random_files import write_hf_folder

HERE = Path(__file__).parent
CONFIG = WHOLE | {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TITAN = {
    **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "layers"},
    **{f"self_attn.{one}_proj": f"attention.w{one}" for one in "qkvo"},
    **{
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
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


def write(rank, folder):
    """Write both checkpoints as one of two ranks."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

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

    from transformers import AutoModelForCausalLM

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


def main():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_hf_folder(folder / "hf", CONFIG)
        torch.multiprocessing.spawn(write, (folder,), nprocs=2)
        for name in ("titan", "accelerate"):
            with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as packed:
                packed.add(folder / name, name)


if __name__ == "__main__":
    sys.exit(main())
