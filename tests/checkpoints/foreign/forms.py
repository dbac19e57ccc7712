"""Write one small model in every form that other projects use, Megatron's aside."""

import json
import shutil
import tarfile
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from make_fixtures import CONFIG, titan_weights
from safetensors.torch import load_file
from trilith.machine.random_files import write_hf_folder

HERE = Path(__file__).parent
WEIGHTS = "model.safetensors"


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
