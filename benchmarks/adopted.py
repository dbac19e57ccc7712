"""Measure models that transformers computes (docs/any_model.md): training steps and starts beside the zoo's
own code of the same model, and conversion of a type outside the zoo beside ``cp``.

The two trainers take turns, step by step. Processor time, of both ranks together, stands beside seconds:
other work on the machine hardly changes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure import Peak, Row, afresh, at_most, copy, in_turn, ratio
from trainers import save_model
from trilith.machine.random_files import llama, write_hf_folder

from training import Contender, difference

#: Hidden 1,024, 8 blocks: 111 million parameters.
SHAPE = llama(1024, 8, ids=8192, heads=16, groups=8, tie_word_embeddings=False)
WAYS = {"adopted": "transformers", "zoo": "auto"}
#: Of a mixture outside the zoo: 0.8 GB of experts a block in bf16, which files hold one by one.
MIXTURE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
}
BLOCKS = {"2 GB": 2, "20 GB": 24}


def main(folder: Path, rounds: int) -> list[Row]:
    save_model(folder / "model", SHAPE)
    trained = [*steps(folder / "model", rounds), *starts(folder / "model", max(1, rounds // 3))]
    return [*trained, *converted(folder, rounds)]


def trainer(folder: Path, way: str) -> Contender:
    """Start the two ranks of a trainer, with their weights."""
    model = {"config": SHAPE, "implementation": WAYS[way]}
    layout, shape = {"tensor": 2}, {"rows": 2, "compiled": False, "dtype": "float32"}
    return Contender(2, side="ours", folder=str(folder), layout=layout, model=model, **shape)


def steps(folder: Path, rounds: int) -> list[Row]:
    """Compare training steps of two tensor ranks, of one core each."""
    alive = {way: trainer(folder, way) for way in WAYS}
    seconds = in_turn({way: contender.step for way, contender in alive.items()}, rounds)
    for contender in alive.values():
        contender.end()
    if problem := difference(alive["adopted"].losses, alive["zoo"].losses, "float32"):
        print(f"no row: {problem}", flush=True)
        return []
    processor = {way: contender.processor[1:] for way, contender in alive.items()}
    what = "tensor 2, hidden 1,024: tokens a second by transformers' code, of those by the zoo's"
    return [
        ratio(name, taken["adopted"], taken["zoo"], goal=0.9)
        for name, taken in ((what, seconds), (f"{what}, by processor time", processor))
    ]


def starts(folder: Path, rounds: int) -> list[Row]:
    """Compare the starts of the same trainers: from their processes' first moment to the end of a step."""
    processor: dict[str, list[float]] = {way: [] for way in WAYS}

    def start(way: str) -> float:
        began, before = time.perf_counter(), os.times()
        contender = trainer(folder, way)
        contender.step()
        seconds = time.perf_counter() - began
        contender.end()
        after = os.times()
        processor[way].append(sum(after[2:4]) - sum(before[2:4]))
        return seconds

    turns: dict[str, Callable[[], float]] = {way: partial(start, way) for way in WAYS}
    seconds = in_turn(turns, rounds)
    spent = {
        way: [both / 2 for both in taken[1:]] for way, taken in processor.items()
    }  # none of the first round
    rows = []
    for name, taken in (("", seconds), (", processor time of a rank", spent)):
        later = [a - b for a, b in zip(taken["adopted"], taken["zoo"], strict=True)]
        rows.append(at_most(f"the first step, later than the zoo's{name}", later, 4.0))
    return rows


def converted(folder: Path, rounds: int) -> list[Row]:
    """Measure ``trilith convert`` of a type outside the zoo into tensor ranks: its memory at two sizes, and
    its speed from its process's first moment at the larger one.
    """
    hf, cut = folder / "hf", folder / "cut"
    rows, peaks = [], list[float]()
    for size, blocks in BLOCKS.items():
        write_hf_folder(hf, MIXTURE | {"num_hidden_layers": blocks}, dtype="BF16")

        def convert() -> int:
            command = [sys.executable, "-m", "trilith.cli", "convert", str(hf), str(cut), "--tensor", "2"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process, Peak(process.pid) as peak:
                assert process.wait() == 0
            return peak.bytes

        peaks.append(convert() / 1e6)
        rows.append(at_most(f"convert of {size} of olmoe: peak RssAnon", peaks[-1], 450, "MB"))
        if blocks == max(BLOCKS.values()):
            shutil.rmtree(cut)
            ways = {"cp": partial(copy, hf, folder / "copy"), "ours": partial(afresh, cut, convert)}
            taken = in_turn(ways, rounds)
            shutil.rmtree(folder / "copy")
            rows.append(
                ratio(f"convert of {size} from process start, of cp", taken["ours"], taken["cp"], goal=0.7)
            )
        for path in (hf, cut):
            shutil.rmtree(path)
    rows.append(at_most("the larger size's peak, beyond the smaller one's", peaks[1] - peaks[0], 30, "MB"))
    return rows
