"""Checkpoints that are stored in ``tests/checkpoints/written_before``: how each was written, and its numbers.

``PYTHONPATH=tests python -m support.written_before FOLDER`` writes them again. The numbers of every tensor
follow from its name alone (``numbers``), so that a test knows each bit without a second copy.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import torch
from torch import Tensor, nn
from trilith.checkpoints import Saver, convert, describe_module, save
from trilith.checkpoints.optimizer_state import adamw, restore_state
from trilith.checkpoints.rank_files import places, stored_parts
from trilith.layers import GatedMLP, VocabParallelEmbedding
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import Rule, family_of
from trilith.parallel_state import Layout, ParallelState, declarations
from trilith.ranks.pool import run_parallel
from trilith.training import make_adamw
from trilith.training.trainer import Trainer

from support.configs import TINIEST_LLAMA
from support.short_runs import run_recipe, tiny_recipe

FOLDER = Path(__file__).parents[1] / "checkpoints" / "written_before"
CONFIG = TINIEST_LLAMA | {"vocab_size": 37}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 2


@dataclass(frozen=True)
class Written:
    """State how a checkpoint was written: ``recipe`` has what a run's recipe has beside ``tiny_recipe``."""

    layout: Layout = field(default_factory=Layout)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    moments: bool = True
    frozen: str = "nothing"  # part of the names of what has no moments


FROZEN = {"match": "norm", "freeze": True}
WRITTEN = {
    "adamw": Written(),
    "weights": Written(moments=False),
    "adapters": Written(recipe={"lora": LORA}),
    "module_of_two": Written(Layout(tensor=2)),
    "bf16": Written(),
    "pipeline_tensor": Written(Layout(pipeline=2, tensor=2)),
    "float8": Written(recipe={"compute": "float8"}),
    "groups": Written(
        recipe={"optimizer": {"groups": [FROZEN, {"match": "mlp", "lr_scale": 0.5}]}}, frozen="norm"
    ),
}


class Embedder(nn.Module):
    """A module of a user's own."""

    names = (
        Rule("embed.weight", "wte"),
        Rule(("blocks.{i}.gate_up.gate.weight", "blocks.{i}.gate_up.up.weight"), "h.{i}.fused"),
        Rule("blocks.{i}.down.weight", "h.{i}.down", transpose=True),
        Rule("gain.weight", "gain.weight"),
        Rule("gain.bias", "gain.bias"),
    )

    def __init__(self, width: int = 8, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(37, width, state=state)
        self.blocks = nn.ModuleList([GatedMLP(width, 16, state=state) for _ in range(2)])
        self.gain = nn.LayerNorm(width)
        describe_module(self, config={"model_type": "embedder"}, names=self.names)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        normed: Tensor = self.gain(x)
        return normed


def numbers(name: str, shape: tuple[int, ...], *, bits: int = 24) -> Tensor:
    """Return a whole tensor's numbers: multiples of 2^-bits in [0, 1), so exact with so many digits."""
    count = torch.Size(shape).numel()
    scrambled = (torch.arange(count) * 2654435761 + crc32(name.encode())) % 2**bits
    whole: Tensor = (scrambled.double() / 2**bits).float().view(shape)
    return whole


def digits(kind: str, name: str) -> int:
    """Return the bits of a tensor's numbers."""
    return 8 if kind == "bf16" and not name.startswith("optimizer.") else 24


def stored(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: ParallelState
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of every weight and moment that this rank stores, the tensor, and its numbers."""
    shapes = {name: declaration.shape for name, declaration in declarations(model).items()}
    chosen: dict[str, Callable[[nn.Parameter], Tensor | None] | None] = {"": None}
    if optimizer is not None:
        chosen |= {f"optimizer.{moment}.": partial(_moment, optimizer, moment) for moment in MOMENTS}
    for before, choose in chosen.items():
        for name, tensor, box in stored_parts(places(model, state), choose):
            whole = numbers(before + name, shapes[name], bits=digits(kind, before + name))
            yield before + name, tensor, whole[box.slices]


def _moment(optimizer: torch.optim.Optimizer, moment: str, parameter: nn.Parameter) -> Tensor | None:
    value: Tensor | None = optimizer.state[parameter][moment] if parameter in optimizer.state else None
    return value


@torch.no_grad()
def fill(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: ParallelState) -> None:
    """Give every weight and moment that this rank stores its numbers."""
    if optimizer is not None:
        restore_state(model, optimizer, adamw({"updates": STEPS}))
    for _, tensor, given in stored(kind, model, optimizer, state):
        tensor.copy_(given)


def differing(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: ParallelState
) -> list[str]:
    """Return the names of what this rank stores that are not the numbers that ``fill`` gave."""
    each = stored(kind, model, optimizer, state)
    return [name for name, tensor, given in each if not torch.equal(tensor.cpu(), given)]


def write(kind: str, folder: Path) -> None:
    """Write one of the checkpoints into ``folder``, which is new."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "saved" if kind == "bf16" else folder
        run_parallel(_write, WRITTEN[kind].layout.world, kind, run, Path(place))
        if kind == "bf16":
            step = f"step-{STEPS:08d}"
            convert(run / step, folder / step, to="sharded", dtype="bfloat16")


def _write(kind: str, folder: Path, place: Path) -> None:
    written = WRITTEN[kind]
    if kind == "weights":
        family = family_of(CONFIG)
        model = family.build(family.from_hf(CONFIG), device="cpu")
        fill(kind, model, None, model.state)
        save(folder, model, step=STEPS)
    elif kind == "module_of_two":
        state = ParallelState.start(written.layout)
        module = Embedder(state=state)
        optimizer = make_adamw(module, lr=0.1)
        fill(kind, module, optimizer, state)
        save(folder, module, optimizer, step=STEPS, extra={"at": 5}, state=state)
    else:
        _train(kind, folder, place)


def _train(kind: str, folder: Path, place: Path) -> None:
    """Run a recipe; its trainer saves the numbers of ``fill`` in place of what was trained."""
    written, base = WRITTEN[kind], place / "base"
    state = ParallelState.start(written.layout)
    if state.rank == 0:
        write_tokens(place / "tokens", vocab_size=37)
        write_hf_folder(base, CONFIG)
    if state.layout.world > 1:
        torch.distributed.barrier()

    class Filling(Saver):
        def __init__(self, root: Path, model: Any, optimizer: Any, *rest: Any, **options: Any) -> None:
            super().__init__(folder, model, optimizer, *rest, **options)
            self._filled = model, optimizer

        def save(self, progress: Any) -> None:
            fill(kind, *self._filled, state)
            super().save(progress)

    model = {"init_from": str(base)} if "lora" in written.recipe else {"config": CONFIG}
    raw = tiny_recipe(
        place / "run", place / "tokens", steps=STEPS, dtype="float32", data={"global_batch": 8},
        layout={"tensor": state.tensor.size, "pipeline": state.layout.pipeline}, **written.recipe,
    ) | {"model": model}  # fmt: skip
    with mock.patch(f"{Trainer.__module__}.Saver", Filling):
        run_recipe(raw)


if __name__ == "__main__":
    for name in WRITTEN:
        shutil.rmtree(Path(sys.argv[1]) / name, ignore_errors=True)
        write(name, Path(sys.argv[1]) / name)
