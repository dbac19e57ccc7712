"""Saving a run's state against a raw write of as many bytes, safetensors and DCP.

And what a save in the background costs the loop, against one copy of the state in memory.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from conversion import wide
from measure import Row, afresh, in_turn, ratio, seconds_of
from safetensors.torch import save_file
from trilith.checkpoints import Contents, Described, Progress, Saver
from trilith.models import CausalLM, family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.runs.launch import process_group
from trilith.training import make_adamw

PIECE = 4 << 20


def main(folder: Path, rounds: int) -> list[Row]:
    with process_group(Layout()) as state:
        return measured(folder, rounds, state)


def trained(raw: dict[str, Any], state: ParallelState) -> tuple[CausalLM, torch.optim.Optimizer, Contents]:
    """Return what a saver saves of a run: a model, an optimizer after one step, what both are."""
    family = family_of(raw)
    config = family.from_hf(raw)
    model = family.build(config, state=state)
    model.to_empty(device="cpu")
    initialize(model, 0, state=state)
    optimizer = make_adamw(model, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer, Contents(Described(family, config), raw)


def measured(folder: Path, rounds: int, state: ParallelState) -> list[Row]:
    run = trained(wide(1024, 6, 16000), state)
    savers = {way: Saver(folder / str(way), *run, keep=1, background=way) for way in (False, True)}
    tensors = savers[False]._own_tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    step = [0]

    def saved(background: bool) -> float:
        step[0] += 1
        saver = savers[background]
        taken = afresh(saver.root, partial(saver.save, Progress(step=step[0], layout=Layout())))
        saver.wait()
        return taken

    def raw() -> None:
        fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT, 0o600)
        for tensor in tensors.values():
            data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
            for at in range(0, len(data), PIECE):
                os.write(fd, data[at : at + PIECE])
        os.fsync(fd)
        os.close(fd)

    def memcpy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    def with_dcp_async() -> float:
        began: list[Any] = []
        place = folder / "dcp-async"
        taken = afresh(place, lambda: began.append(dcp.async_save(tensors, checkpoint_id=place)))
        began[0].result()
        return taken

    st, whole = folder / "st", folder / "dcp"
    turns = {
        "raw": partial(afresh, folder / "raw", raw),
        "ours": partial(saved, False),
        "safetensors": partial(afresh, st, partial(save_file, tensors, st)),
        "dcp": partial(afresh, whole, partial(dcp.save, tensors, checkpoint_id=whole)),
        "memcpy": partial(seconds_of, memcpy),
        "stall": partial(saved, True),
        "dcp stall": with_dcp_async,
    }
    taken = in_turn(turns, rounds)
    name = f"save of {size / 1e9:.2f} GB, CRC-32 and fsync included, of a raw write"
    stall = "stall of a save in the background, of one copy in memory"
    return [
        ratio(name, taken["ours"], taken["raw"], goal=0.9),
        ratio("of safetensors' save_file, without checksum or fsync", taken["ours"], taken["safetensors"]),
        ratio("of dcp.save", taken["ours"], taken["dcp"]),
        ratio(stall, taken["stall"], taken["memcpy"], goal=0.9),
        ratio("stall, of dcp.async_save's", taken["stall"], taken["dcp stall"]),
    ]
