"""Conversion against `cp` of the same bytes: speed both ways, rows and columns apart, memory at two sizes.

Checkpoints of other projects are sources too: torch.distributed.checkpoint's, Megatron-LM's two forms and a
file of torch.save.

The peer is transformers' from_pretrained + save_pretrained, which is how most people convert.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Peak, Row, afresh, at_most, copy, in_turn, ratio, seconds_of
from megatron_checkpoints import write_legacy, write_torch_dist
from safetensors.torch import load_file
from trilith.checkpoints import convert, convert_to_dcp, differences, read_source
from trilith.checkpoints.convert.execute import Work
from trilith.checkpoints.convert.plan import Transfer
from trilith.machine.random_files import llama, write_hf_folder
from trilith.parallel_state import Box, Piece
from trilith.storage import TensorFile, TensorWriter
from trilith.storage.catalog import Key, LazyTensor, listed

TENSOR, PIPELINE = 4, 2
MATRIX, MATRICES = 4096, 16

TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


def wide(hidden: int, layers: int, ids: int = 32000) -> dict[str, Any]:
    """Return a Llama with heads of 64, four query heads to a key/value head, in bf16."""
    heads, other = hidden // 64, {"head_dim": 64, "tie_word_embeddings": False, "dtype": "bfloat16"}
    return llama(hidden, layers, ids=ids, heads=heads, groups=heads // 4, length=2048, **other)


def peak_of(src: Path, dst: Path, hf: Path, said: str, *words: str) -> Row:
    """Return the most bytes of RssAnon that ``trilith convert`` holds; ``hf``: the weights in bf16."""
    command = [sys.executable, "-m", "trilith.cli", "convert", str(src), str(dst), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process, Peak(process.pid) as peak:
        assert process.wait() == 0
    size = sum(file.stat().st_size for file in hf.glob("*.safetensors"))
    raw = json.loads((hf / "config.json").read_text())
    limit = 4 * raw["vocab_size"] * raw["hidden_size"] / 1e6 + 200
    what = f"peak RssAnon, {size / 1e9:.2f} GB {said}"
    return at_most(what, peak.bytes / 1e6, limit, "MB", "2 x the largest tensor + 200")


def main(folder: Path, rounds: int) -> list[Row]:
    models, cuts = whole_models(folder, rounds), kinds_of_cut(folder, rounds)
    return [*models, *cuts, *memory(folder), *other_projects(folder, rounds)]


def other_projects(folder: Path, rounds: int) -> list[Row]:
    """Measure the checkpoints of other projects as sources: speed of cp, and memory at two sizes."""
    names = ("DCP", "torch_dist", "Megatron legacy", "pytorch_model.bin")
    dcp, dist, legacy, pickled = sources = [folder / name for name in names]
    rows, peaks = [], []
    for layers in (4, 12):
        hf, out = folder / "o-hf", folder / "o-out"
        config = wide(2048, layers)
        write_hf_folder(hf, config, dtype="BF16")
        convert_to_dcp(hf, dcp)
        tensors = load_file(hf / "model.safetensors")
        torch.save(tensors, pickled)
        write_torch_dist(dist, config, tensors)
        write_legacy(legacy, config, tensors)
        del tensors
        for src in sources:
            rows.append(peak_of(src, out, hf, f"{src.name} -> hf", "--to", "hf", "--config", str(hf)))
            assert not list(differences(read_source(hf), read_source(out))), f"{src} is not bit-exact"
            shutil.rmtree(out)
            peaks.append(rows[-1].figure)
        if layers == 12:
            rows += [row for src in sources for row in speed_of_foreign(src, hf, out, rounds)]
        for path in (hf, dcp, dist, legacy):
            shutil.rmtree(path)
        pickled.unlink()
    growth = max(peaks[len(sources) :]) / max(peaks[: len(sources)])
    rows.append(at_most("peak at 12 layers over 4 layers", growth, 1.1, "x"))
    return rows


def speed_of_foreign(src: Path, hf: Path, out: Path, rounds: int) -> list[Row]:
    work = partial(convert, src, out, config=hf, tensor=TENSOR, pipeline=PIPELINE)
    turns = {"cp": partial(copy, src, out.with_name("copy")), "ours": partial(afresh, out, work)}
    taken = in_turn(turns, rounds)
    shutil.rmtree(out)
    copied = out.with_name("copy")
    shutil.rmtree(copied) if copied.is_dir() else copied.unlink()
    what = f"{src.name} -> tensor {TENSOR} x pipeline {PIPELINE}, CRC-32 compared, of cp"
    return [ratio(what, taken["ours"], taken["cp"], goal=0.7)]


def whole_models(folder: Path, rounds: int) -> list[Row]:
    hf, sharded, back = folder / "hf", folder / "sharded", folder / "back"
    write_hf_folder(hf, wide(2048, 16), dtype="BF16", max_shard_size=1 << 30)

    def ours(src: Path, dst: Path, **arguments: Any) -> Callable[[], float]:
        return partial(afresh, dst, partial(convert, src, dst, **arguments))

    def command(*words: str | Path, dst: Path) -> Callable[[], float]:
        return partial(afresh, dst, partial(subprocess.run, [sys.executable, *words], **quiet))

    quiet: dict[str, Any] = {"check": True, "capture_output": True}
    turns = {
        "cp hf": lambda: copy(hf, folder / "copy"),
        "to sharded": ours(hf, sharded, tensor=TENSOR, pipeline=PIPELINE),
        "cp sharded": lambda: copy(sharded, folder / "copy"),
        "to hf": ours(sharded, back, to="hf"),
    }
    taken = in_turn(turns, rounds)
    assert not list(differences(read_source(hf), read_source(back))), "the round trip is not bit-exact"
    shutil.rmtree(back)
    layout = ("--tensor", str(TENSOR), "--pipeline", str(PIPELINE))
    started = {
        "cp": lambda: copy(hf, folder / "copy"),
        "command": command("-m", "trilith.cli", "convert", hf, sharded, *layout, dst=sharded),
        "transformers": command("-c", TRANSFORMERS, hf, back, dst=back),
    }
    from_start = in_turn(started, max(1, rounds // 2))
    for path in (back, folder / "copy"):
        shutil.rmtree(path)
    both = [a + b for a, b in zip(taken["to sharded"], taken["to hf"], strict=True)]
    copied = [a + b for a, b in zip(taken["cp hf"], taken["cp sharded"], strict=True)]
    name = f"HF -> tensor {TENSOR} x pipeline {PIPELINE}, of cp"
    start = "trilith convert from process start, of"
    return [
        ratio(name, taken["to sharded"], taken["cp hf"], goal=0.8),
        ratio("and back to HF, of cp", taken["to hf"], taken["cp sharded"], goal=0.8),
        ratio("both ways, of cp", both, copied, goal=0.8),
        ratio(f"{start} cp", from_start["command"], from_start["cp"]),
        ratio(f"{start} transformers' load + save", from_start["command"], from_start["transformers"]),
    ]


def recut(sources: list[Path], boxes: list[Box], targets: list[Path], wanted: list[Box]) -> float:
    """Measure the seconds to write one wanted box of every matrix, of which each source has a box, to each
    target.
    """
    for path in targets:
        path.unlink(missing_ok=True)

    def work() -> None:
        files = [TensorFile.open(path) for path in sources]
        catalog = {
            name: LazyTensor(
                name,
                "BF16",
                (MATRIX, MATRIX),
                listed(Piece.plain(box, Key(file, name)) for file, box in zip(files, boxes, strict=True)),
            )
            for name in files[0].tensors
        }
        writers = [
            TensorWriter(path, {name: ("BF16", box.shape) for name in catalog})
            for path, box in zip(targets, wanted, strict=True)
        ]
        Work().execute(
            [
                (Transfer(name, box, tuple(tensor.pieces(box)), "BF16"), writer)
                for name, tensor in catalog.items()
                for box, writer in zip(wanted, writers, strict=True)
            ],
        )
        for one in writers:
            one.close()

    return seconds_of(work)


def kinds_of_cut(folder: Path, rounds: int) -> list[Row]:
    """Measure one file of square matrices, cut into four files along a dim, and merged again."""
    shape = (MATRIX, MATRIX)
    names = [f"w{number}" for number in range(MATRICES)]
    file = folder / "whole.safetensors"
    writer = TensorWriter(file, {name: ("BF16", shape) for name in names})
    for number, name in enumerate(names):
        writer.write(name, Box.whole(shape), torch.randn(shape).add(number).to(torch.bfloat16))
    writer.close()
    rows = []
    for dim, goal in ((0, 0.9), (1, 0.6)):
        piece = MATRIX // TENSOR
        boxes = [Box.whole(shape).narrow(dim, i * piece, (i + 1) * piece) for i in range(TENSOR)]
        parts = [folder / f"part-{dim}-{i}.safetensors" for i in range(TENSOR)]
        turns = {
            "cp": lambda: copy(file, folder / "copy.safetensors"),
            "cut": partial(recut, [file], [Box.whole(shape)], parts, boxes),
            "merge": partial(recut, parts, boxes, [folder / "merged.safetensors"], [Box.whole(shape)]),
        }
        taken = in_turn(turns, rounds)
        kind = ("rows", "columns")[dim]
        rows += [
            ratio(f"cut by {kind}, CRC-32 included, of cp", taken["cut"], taken["cp"], goal=goal),
            ratio(f"merged by {kind}, CRC-32 included, of cp", taken["merge"], taken["cp"], goal=goal),
        ]
        for path in [*parts, folder / "merged.safetensors", folder / "copy.safetensors"]:
            path.unlink()
    file.unlink()
    return rows


def memory(folder: Path) -> list[Row]:
    """Peak RssAnon of the command, both ways, at two sizes of one width."""
    rows, peaks = [], []
    for layers in (4, 16):
        hf, sharded, back = (folder / name for name in ("m-hf", "m-sharded", "m-back"))
        write_hf_folder(hf, wide(2048, layers), dtype="BF16", max_shard_size=1 << 30)
        cut = ["--tensor", str(TENSOR), "--pipeline", str(PIPELINE)]
        for src, dst, words in ((hf, sharded, cut), (sharded, back, ["--to", "hf"])):
            rows.append(peak_of(src, dst, hf, f"{src.name[2:]} -> {dst.name[2:]}", *words))
            peaks.append(rows[-1].figure)
        for path in (hf, sharded, back):
            shutil.rmtree(path)
    growth = max(peaks[2:]) / max(peaks[:2])
    rows.append(at_most("peak at 16 layers over 4 layers", growth, 1.1, "x"))
    return rows
