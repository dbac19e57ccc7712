"""Choose what to measure on a machine: which layouts, shapes and sizes fit its devices and its disk."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...layers import Checkpointing
from ...models import published_size
from ...planner.dry_run import heaviest, plan_without_weights
from ...recipes.recipe import parse_recipe
from ...system import counted
from ..random_files import llama
from .layouts import compare_layout
from .speed import collective_speed, device_speed
from .steps import WARM_UP, conversion_speed, peak_memory, step_stalls, train_steps

#: The parts, with their titles, in the order in which they run: what is cheap and what the rest is judged by
#: comes first.
PARTS = {
    "speed": "The device itself",
    "parity": "Each layout against one process in fp64",
    "links": "Links between ranks",
    "mfu": "Training steps",
    "memory": "Peak memory against the planner's figure",
    "saving": "Checkpoints: how much longer a step takes",
    "conversion": "Conversion",
}

#: The ranks that share a CPU's cores where its speed and its links are measured.
CPU_RANKS = 2
#: Share of a device's free memory that a plan may take: the allocator needs some room between its blocks.
_FILLED = 0.92
_MODES = ("eager", "compiled")
#: The shape for a CPU: 56 million parameters, most of them embeddings.
SMALL = llama(512, 8, ids=32000)


@dataclass(frozen=True)
class Case:
    """State one measurement: ``work(**options)`` on ``world`` new processes, ended after ``seconds``.

    ``work`` returns ``figures``, and may return ``status`` and ``note``; it stands at the top of a module.
    ``note`` is what the report says besides. A case without ``work`` is left out, for the reason in ``note``.
    """

    part: str
    what: str
    work: Callable[..., dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    seconds: float = 120.0
    note: str = ""


@dataclass(frozen=True)
class Sizes:
    """State how much is measured: the sides of matrices, MiB of copies and of collectives, rounds of small
    blocks, steps that are timed, those of a run that saves, bytes of disk.
    """

    side: int
    copied: int
    sent: int
    blocks: int
    steps: int
    saving: int
    room: float
    modes: tuple[Checkpointing, ...] = ("none", "full")
    compiled: tuple[bool, ...] = (False, True)
    model: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    length: int = 512


_SIZES = {
    "cuda": Sizes(
        side=8192, copied=1024, sent=512, blocks=20, steps=10,
        saving=10, room=15e9, name="llama-3.2-1b",
    ),
    "cpu": Sizes(
        side=1024, copied=128, sent=16, blocks=20, steps=10,
        saving=10, room=1e9, name="Llama of 56 M", model=SMALL,
    ),
    "quick": Sizes(
        side=128, copied=4, sent=1, blocks=2, steps=2,
        saving=6, room=0.1e9, name="tiny Llama", model=llama(64, 2, ids=512), length=64,
        modes=("none",), compiled=(False,),
    ),
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

    ``folder`` is empty and may be written to; ``tokens`` there is a token file of ``vocabulary`` ids.
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
        return 512 if self.device == "cpu" else 128256

    @property
    def ranks(self) -> int:
        return max(1, self.gpus) if self.device == "cuda" else 1

    @property
    def sizes(self) -> Sizes:
        if self.quick and self.device == "cuda":
            return replace(_SIZES["cuda"], steps=3, modes=("none",))
        return _SIZES["quick" if self.quick else self.device]


def cases(bench: Bench, parts: Iterable[str] = PARTS) -> Iterator[Case]:
    """Yield what is to be measured, in order; what this machine cannot hold is yielded as left out."""
    makers = (_speed, _parity, _links, _mfu, _memory, _saving, _conversion)
    for part, make in zip(PARTS, makers, strict=True):
        if part in parts:
            yield from make(bench)


def _speed(bench: Bench) -> Iterator[Case]:
    sizes = bench.sizes
    options = {"device": bench.device, "side": sizes.side, "megabytes": sizes.copied, "rounds": sizes.blocks}
    ranks = 1 if bench.device == "cuda" else CPU_RANKS
    yield Case("speed", "the device itself", device_speed, options, ranks)


def _parity(bench: Bench) -> Iterator[Case]:
    most = max(bench.gpus, 4)
    for name, world, layout in _LAYOUTS[: 3 if bench.quick else None]:
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
    options = {"device": bench.device, "megabytes": bench.sizes.sent, "rounds": bench.sizes.blocks}
    if bench.device == "cpu":
        yield Case("links", f"gloo, {CPU_RANKS} ranks", collective_speed, options, CPU_RANKS)
    elif bench.gpus == 1:
        yield Case("links", "NCCL", note="one GPU: nothing to send to")
    else:
        yield Case("links", f"NCCL, {counted(bench.gpus, 'GPU')}", collective_speed, options, bench.gpus)


def _mfu(bench: Bench) -> Iterator[Case]:
    sizes, steps = bench.sizes, WARM_UP + bench.sizes.steps
    if bench.device == "cpu":
        for compiled in sizes.compiled:
            recipe = _recipe(bench, sizes.model, steps=steps, compile=compiled)
            options = {"recipe": recipe, "side": sizes.side}
            yield Case("mfu", f"{sizes.name}, {_MODES[compiled]}", train_steps, options, seconds=600)
        return
    for size, length, zero in (("llama-3.2-1b", 4096, 1), ("llama-3.1-8b", 8192, 3)):
        fitting = _that_fits(bench, size, length, steps=steps, zero=zero)
        for compiled in sizes.compiled:
            name = f"{size}, {_MODES[compiled]}"
            if fitting is None:
                yield Case("mfu", name, note="not one block fits the device, by the planner's figures")
                continue
            recipe, note = fitting
            recipe = recipe | {"compile": compiled}  # which changes nothing in the plan
            options = {"recipe": recipe, "side": sizes.side}
            yield Case("mfu", name, train_steps, options, bench.ranks, 300, note)


def _memory(bench: Bench) -> Iterator[Case]:
    for mode in bench.sizes.modes:
        memory: dict[str, Any] = {"checkpointing": mode}
        if bench.device == "cpu":
            recipe = _recipe(bench, bench.sizes.model, steps=2, memory=memory)
            fitting: tuple[dict[str, Any], str] | None = (recipe, "")
        else:
            fitting = _that_fits(bench, "llama-3.2-1b", 4096, steps=3, memory=memory)
        if fitting is not None:
            name, options = f"checkpointing {mode}", {"recipe": fitting[0]}
            yield Case("memory", name, peak_memory, options, bench.ranks, note=fitting[1])


def _saving(bench: Bench) -> Iterator[Case]:
    sizes, note, length, model = bench.sizes, "", 0, bench.sizes.model
    if bench.device == "cuda":
        model, length = published_size("llama-3.2-1b").with_fields({"num_hidden_layers": 4}), 2048
        note = "Llama 3.2 1B with 4 of 16 blocks"
    for background in (False, True):
        name = "in the background" if background else "while the run waits"
        if bench.room < 2 * sizes.room:
            yield _no_room("saving", name, 2 * sizes.room, bench)
            continue
        # One save on the way: a second would wait for the first, however long the steps between them are.
        save = {"every": sizes.saving // 2 + 1, "keep": 1, "background": background}
        keys: dict[str, Any] = {"length": length, "checkpoint": save, "name": f"save-{name}"}
        recipe = _recipe(bench, model, steps=sizes.saving, **keys)
        yield Case("saving", name, step_stalls, {"recipe": recipe}, bench.ranks, 200, note)


def _conversion(bench: Bench) -> Iterator[Case]:
    sizes = bench.sizes
    if bench.room < sizes.room:
        yield _no_room("conversion", sizes.name, sizes.room, bench)
        return
    config = dict(sizes.model or published_size(sizes.name).with_fields({}))
    options = {"folder": str(bench.folder / "conversion"), "config": config}
    yield Case("conversion", sizes.name, conversion_speed, options, seconds=300)


def _no_room(part: str, name: str, need: float, bench: Bench) -> Case:
    return Case(part, name, note=f"{need / 1e9:.0f} GB of disk needed, {bench.room / 1e9:.0f} GB free")


def _recipe(
    bench: Bench,
    config: Mapping[str, Any],
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
    data = {"tokens": str(bench.tokens), "sequence_length": length or bench.sizes.length}
    data |= {"global_batch": micro_batch * bench.ranks, "micro_batch": micro_batch}
    return {
        "out": str(bench.folder / name),
        "steps": steps,
        "device": bench.device,
        "compute": "bfloat16" if bench.device == "cuda" else "float32",
        "model": {"config": dict(config)},
        "layout": layout,
        "data": data,
        **keys,
        "memory": memory | keys.get("memory", {}),
    }


def _that_fits(bench: Bench, size: str, length: int, **keys: Any) -> tuple[dict[str, Any], str] | None:
    """Return the recipe of the most blocks, and then of the most rows, that fit the device; and a note on it.

    The planner decides, so a case that then runs out of memory shows that the planner is wrong.
    """
    whole = published_size(size).with_fields({})
    blocks = int(whole["num_hidden_layers"])
    for count in (blocks, *(fewer for fewer in (24, 20, 16, 12, 10, 8, 6, 4, 3, 2, 1) if fewer < blocks)):
        fitting = None
        for rows in (1, 2, 4, 8):
            config = dict(whole) | {"num_hidden_layers": count}
            recipe = _recipe(bench, config, length=length, micro_batch=rows, **keys)
            if _planned(recipe) > _FILLED * bench.memory:
                break
            part = "" if count == blocks else f"{count} of {blocks} blocks, which is what fits; "
            fitting = recipe, f"{part}{rows} x {length:,} tokens a GPU, {bench.ranks} GPU"
        if fitting is not None:
            return fitting
    return None


def _planned(raw: dict[str, Any]) -> int:
    recipe = parse_recipe(raw)
    return heaviest(recipe, plan_without_weights(recipe)[0]).total
