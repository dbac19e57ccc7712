"""Choose what to measure on a machine: which layouts, shapes and sizes fit its devices and its disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models import published_size
from ..recipes.recipe import parse_recipe
from ..training.dry_run import heaviest, plan_without_weights
from .conversion import conversion_speed
from .layers import layer_overhead
from .layouts import compare_layout
from .links import collective_speed
from .row import Case
from .speed import device_speed
from .steps import WARM_UP, peak_memory, step_stalls, train_steps

#: The parts in the order in which they run: what is cheap and what the rest is judged by comes first.
PARTS = ("speed", "parity", "links", "layers", "mfu", "memory", "saving", "conversion")

#: The ranks that share a CPU's cores where its speed and its links are measured.
CPU_RANKS = 2
#: Share of a device's free memory that a plan may take: the allocator needs some room between its blocks.
_FILLED = 0.92
#: The shape for a CPU: 58 million parameters, of which half are embeddings.
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
QUICK = SMALL | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
}  # fmt: skip
_LAYOUTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("one process", 1, {}),
    ("tensor 2, sequence", 2, {"tensor": 2, "sequence": True}),
    ("data 2, ZeRO-3", 2, {"data": 2, "zero": 3}),
    ("pipeline 2", 2, {"pipeline": 2}),
    ("context 2, ring", 2, {"context": 2, "ring": True}),
    ("tensor 2 x pipeline 2", 4, {"tensor": 2, "pipeline": 2}),
    ("tensor 2 x data 2, ZeRO-2", 4, {"tensor": 2, "data": 2, "zero": 2}),
    ("tensor 2 x pipeline 2 x data 2, ZeRO-1", 8, {"tensor": 2, "pipeline": 2, "data": 2, "zero": 1}),
)


@dataclass(frozen=True)
class Bench:
    """State what to measure with. ``memory``: the free bytes of a device; ``room``: those of the disk.

    ``folder`` is empty and may be written to; ``tokens`` is a token file of at least ``VOCABULARY`` ids.
    """

    device: str
    gpus: int
    memory: int
    room: int
    folder: Path
    quick: bool = False

    @property
    def tokens(self) -> Path:
        """Return the name of the token file to train on."""
        return self.folder / "tokens"

    @property
    def vocabulary(self) -> int:
        """Return the number of ids of the token file."""
        return int(QUICK["vocab_size"]) if self.device == "cpu" else 128256

    @property
    def ranks(self) -> int:
        return max(1, self.gpus) if self.device == "cuda" else 1


def cases(bench: Bench, parts: Iterable[str] = PARTS) -> Iterator[Case]:
    """Yield what is to be measured, in order; what this machine cannot hold is yielded as left out."""
    made = {
        "speed": _speed,
        "parity": _parity,
        "links": _links,
        "layers": _layers,
        "mfu": _mfu,
        "memory": _memory,
        "saving": _saving,
        "conversion": _conversion,
    }
    for part in PARTS:
        if part in parts:
            yield from made[part](bench)


def _speed(bench: Bench) -> Iterator[Case]:
    side, megabytes = (8192, 1024) if bench.device == "cuda" else (256, 16) if bench.quick else (1024, 128)
    options = {"device": bench.device, "side": side, "megabytes": megabytes}
    ranks = 1 if bench.device == "cuda" else CPU_RANKS
    yield Case("speed", "the device itself", device_speed, options, ranks)


def _parity(bench: Bench) -> Iterator[Case]:
    most = max(bench.gpus, 4)
    for name, world, layout in _LAYOUTS[:3] if bench.quick else _LAYOUTS:
        if world > most:
            continue
        device = bench.device if world <= max(1, bench.gpus) else "cpu"
        apart = bench.device == "cuda" and device == "cpu"
        note = f"on the CPU over gloo: {bench.gpus} GPU here" if apart else ""
        options = {"layout": layout, "device": device}
        yield Case("parity", name, compare_layout, options, world, note=note)
    if bench.device == "cuda":
        compiled = {"layout": {}, "device": "cuda", "compiled": True}
        yield Case("parity", "one process, compiled", compare_layout, compiled)


def _links(bench: Bench) -> Iterator[Case]:
    if bench.device == "cpu":
        options = {"device": "cpu", "megabytes": 1 if bench.quick else 16}
        yield Case("links", f"gloo, {CPU_RANKS} ranks", collective_speed, options, CPU_RANKS)
    elif bench.gpus == 1:
        yield Case("links", "NCCL", note="one GPU: nothing to send to")
    else:
        options = {"device": "cuda", "megabytes": 512}
        yield Case("links", f"NCCL, {bench.gpus} GPUs", collective_speed, options, bench.gpus)


def _layers(bench: Bench) -> Iterator[Case]:
    rounds = 10 if bench.quick else 50
    sizes = ((4096, 8192), (512, 64)) if bench.device == "cuda" else ((16, 8),)
    for width, tokens in sizes:
        options = {"device": bench.device, "width": width, "tokens": tokens, "rounds": rounds}
        yield Case("layers", f"MLP {width:,} wide at tensor 1", layer_overhead, options)


def _mfu(bench: Bench) -> Iterator[Case]:
    steps = WARM_UP + (3 if bench.quick else 10)
    if bench.device == "cpu":
        for compiled in (False,) if bench.quick else (False, True):
            recipe = _recipe(bench, QUICK if bench.quick else SMALL, steps=steps, compile=compiled)
            options = {"recipe": recipe, "side": 128 if bench.quick else None}
            size = "tiny Llama" if bench.quick else "Llama of 58 M"
            yield Case("mfu", f"{size}, {_mode(compiled)}", train_steps, options, seconds=600)
        return
    for size, length in (("llama-3.2-1b", 4096), ("llama-3.1-8b", 8192)):
        for compiled in (False, True):
            name = f"{size}, {_mode(compiled)}"
            found = _that_fits(bench, size, length, steps=steps, compile=compiled)
            if found is None:
                yield Case("mfu", name, note="not one block fits the device, by the planner's figures")
                continue
            recipe, note = found
            yield Case("mfu", name, train_steps, {"recipe": recipe}, bench.ranks, 300, note)


def _memory(bench: Bench) -> Iterator[Case]:
    for mode in ("none",) if bench.quick else ("none", "full"):
        if bench.device == "cpu":
            config = QUICK if bench.quick else SMALL
            recipe = _recipe(bench, config, steps=2, memory={"checkpointing": mode})
            note = ""
        else:
            found = _that_fits(bench, "llama-3.2-1b", 4096, steps=3, memory={"checkpointing": mode})
            if found is None:
                continue
            recipe, note = found
        yield Case("memory", f"checkpointing {mode}", peak_memory, {"recipe": recipe}, bench.ranks, note=note)


def _saving(bench: Bench) -> Iterator[Case]:
    for background in (False, True):
        name = "in the background" if background else "while the run waits"
        save = {"every": 4, "keep": 1, "background": background}
        if bench.device == "cpu":
            steps = 6 if bench.quick else 10
            config = QUICK if bench.quick else SMALL
            recipe, note = _recipe(bench, config, steps=steps, checkpoint=save, name=f"save-{name}"), ""
        else:
            layers = 4
            fields = published_size("llama-3.2-1b").with_fields({"num_hidden_layers": layers})
            recipe = _recipe(bench, fields, steps=10, length=2048, checkpoint=save, name=f"save-{name}")
            note = f"Llama 3.2 1B with {layers} of 16 blocks"
            if bench.room < 30e9:
                yield Case("saving", name, note=f"30 GB of disk needed, {bench.room / 1e9:.0f} GB free")
                continue
        yield Case("saving", name, step_stalls, {"recipe": recipe}, bench.ranks, 200, note)


def _conversion(bench: Bench) -> Iterator[Case]:
    if bench.device == "cpu":
        config, name, need = (QUICK, "tiny Llama", 0.1e9) if bench.quick else (SMALL, "Llama of 58 M", 1e9)
    else:
        config, name, need = dict(published_size("llama-3.2-1b").with_fields({})), "llama-3.2-1b", 15e9
    if bench.room < need:
        note = f"{need / 1e9:.0f} GB of disk needed, {bench.room / 1e9:.0f} GB free"
        yield Case("conversion", name, note=note)
        return
    folder = bench.folder / "conversion"
    yield Case("conversion", name, conversion_speed, {"folder": str(folder), "config": config}, seconds=300)


def _mode(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _recipe(
    bench: Bench,
    config: dict[str, Any],
    *,
    steps: int,
    length: int = 0,
    micro_batch: int = 1,
    name: str = "run",
    zero: int = 1,
    **keys: Any,
) -> dict[str, Any]:
    """Return a recipe as data: all ranks of the bench are data ranks, each with one micro-batch a step."""
    layout = {"data": bench.ranks, "zero": zero} if bench.ranks > 1 else {}
    memory = {"loss_chunk": 2048} if bench.device == "cuda" else {}
    return {
        "out": str(bench.folder / name),
        "steps": steps,
        "device": bench.device,
        "compute": "bfloat16" if bench.device == "cuda" else "float32",
        "model": {"config": config},
        "layout": layout,
        "data": {
            "tokens": str(bench.tokens),
            "sequence_length": length or (64 if bench.quick else 512),
            "global_batch": micro_batch * bench.ranks,
            "micro_batch": micro_batch,
        },
        **keys,
        "memory": memory | keys.get("memory", {}),
    }


def _that_fits(bench: Bench, size: str, length: int, **keys: Any) -> tuple[dict[str, Any], str] | None:
    """Return the recipe of the most blocks, and then of the most rows, that fit the device; and a note on it.

    The planner decides, so a case that then runs out of memory shows that the planner is wrong.
    """
    whole = published_size(size).with_fields({})
    blocks = int(whole["num_hidden_layers"])
    wanted = [count for count in (blocks, 24, 20, 16, 12, 10, 8, 6, 4, 3, 2, 1) if count <= blocks]
    for count in dict.fromkeys(wanted):
        config = dict(whole) | {"num_hidden_layers": count}
        found = None
        for rows in (1, 2, 4, 8):
            zero = 3 if "8b" in size else 1
            recipe = _recipe(bench, config, length=length, micro_batch=rows, zero=zero, **keys)
            if _planned(recipe) > _FILLED * bench.memory:
                break
            part = "" if count == blocks else f"{count} of {blocks} blocks, which is what fits; "
            found = recipe, f"{part}{rows} x {length:,} tokens a GPU, {bench.ranks} GPU"
        if found is not None:
            return found
    return None


def _planned(raw: dict[str, Any]) -> int:
    recipe = parse_recipe(raw)
    return heaviest(recipe, plan_without_weights(recipe)[0]).total
