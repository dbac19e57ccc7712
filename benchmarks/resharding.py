"""Reshard a run's checkpoint, weights and both moments, 8x2 -> 4x4 -> 2x1; compare with `cp` and DCP.

DCP loads and saves. Bytes read are counted by the kernel (/proc/self/io) and compared with the bytes that the
output needs.
"""

from __future__ import annotations

import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from conversion import wide
from measure import Row, afresh, at_most, copy, in_turn, ratio
from saving import trained
from trilith.checkpoints import ConversionOptions, Progress, Saver, convert, differences, read_source
from trilith.checkpoints.convert.plan import plan_to_sharded
from trilith.parallel_state import Layout
from trilith.runs.launch import process_group
from trilith.storage.dtypes import TORCH

CHAIN = ((8, 2), (4, 4), (2, 1))


def write_run(folder: Path) -> Path:
    """Write a checkpoint as one rank of a run does, fp32 with both moments; return its place."""
    with process_group(Layout()) as state:
        Saver(folder, *trained(wide(1024, 8, 16000), state)).save(Progress(step=1, layout=Layout()))
    return next(folder.glob("step-*"))


def main(folder: Path, rounds: int) -> list[Row]:
    run = write_run(folder / "run")
    paths = [folder / f"{tensor}x{pipeline}" for tensor, pipeline in CHAIN]

    def recut(src: Path, dst: Path, layout: tuple[int, int]) -> float:
        tensor, pipeline = layout
        return afresh(dst, lambda: convert(src, dst, to="sharded", tensor=tensor, pipeline=pipeline))

    recut(run, paths[0], CHAIN[0])
    contenders = {}
    for number in (1, 2):
        src, dst, layout = paths[number - 1], paths[number], CHAIN[number]
        contenders[f"cp {src.name}"] = partial(copy, src, folder / "copy")
        contenders[f"to {dst.name}"] = partial(recut, src, dst, layout)
    taken = in_turn(contenders, rounds)
    assert not list(differences(read_source(run), read_source(paths[-1]))), "not bit-exact"
    rows = []
    for src, dst in pairwise(path.name for path in paths):
        name = f"{src} -> {dst} with moments, of cp"
        rows.append(ratio(name, taken[f"to {dst}"], taken[f"cp {src}"], goal=0.8))
    rows += [bytes_read(paths[0], folder / "counted", CHAIN[1])]
    shutil.rmtree(folder / "copy")
    rows.append(against_dcp(folder, paths[0], rounds))
    return rows


def bytes_read(src: Path, dst: Path, layout: tuple[int, int]) -> Row:
    """Measure the bytes that the kernel reads for a conversion, over the bytes that its output needs."""
    source = read_source(src)
    plan = plan_to_sharded(source, tensor=layout[0], pipeline=layout[1])
    needed = sum(whole_bytes(one.shape, one.dtype) for one in source.catalog.values())
    before = _read_so_far()
    convert(
        src, dst, to="sharded", tensor=layout[0], pipeline=layout[1], options=ConversionOptions(check=False)
    )
    found = (_read_so_far() - before) / needed
    shutil.rmtree(dst)
    assert plan.nbytes >= needed
    return at_most("bytes read, of the bytes that are needed once", found, 1.01, "x")


def whole_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return torch.Size(shape).numel() * TORCH[dtype].itemsize


def _read_so_far() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def against_dcp(folder: Path, src: Path, rounds: int) -> Row:
    """Compare with DCP, which cannot reshard files: it loads everything into memory and saves it again."""
    source = read_source(src)
    state = {name: tensor.read() for name, tensor in source.ours.items()}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)

    def theirs() -> None:
        empty = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        dcp.load(empty, checkpoint_id=folder / "dcp", no_dist=True)
        dcp.save(empty, checkpoint_id=folder / "dcp-2", no_dist=True)

    ours = partial(convert, src, folder / "ours", to="sharded", tensor=4, pipeline=4)
    places = {
        "ours": partial(afresh, folder / "ours", ours),
        "dcp": partial(afresh, folder / "dcp-2", theirs),
    }
    taken = in_turn(places, rounds)
    return ratio("8x2 -> 4x4, of DCP's load + save of the same state", taken["ours"], taken["dcp"])
