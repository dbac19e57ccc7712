"""Measure one norm for each parameter, by its Hugging Face name, and each block's output.

The numbers are the same in every layout. Where Hugging Face holds several of our tensors in one (GPT-2's
c_attn), that one has the norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.base.hugging_face_names import Link
from ..parallel_state import declarations, together
from ..parallel_state.engine import local_data, tensors_in
from ..runs.metrics import StepLog, StepMetrics
from .callbacks import Callback

if TYPE_CHECKING:
    from .trainer import Trainer


class NormLog(Callback):
    """Write ``norms.jsonl`` every ``watch.norms`` steps of a recipe, and hand the same numbers to trackers.

    The 2-norms of each weight and each gradient; with ``watch.activation_norms`` also the root mean square of
    each block's output over a step's tokens, padding included. As a mean it does not change where activation
    checkpointing computes a block twice.
    """

    def __init__(self) -> None:
        self._log: StepLog | None = None
        self._measured: dict[str, dict[str, float]] = {}
        #: Of the blocks' outputs in a step that is measured: the sum of squares, and the number of elements.
        self._sums: Tensor | None = None

    def begin(self, trainer: Trainer, start: int) -> None:
        self.model, self.state, self.track = trainer.model, trainer.state, trainer.files.track
        self.interval, self.activations = trainer.recipe.watch.norms, trainer.recipe.watch.activation_norms
        links = trainer.plan.family.links_of_all(trainer.plan.config)
        self.names = hugging_face_names(self.model, links)
        self.all = sorted(set[str]().union(*together(lambda: {*self.names.values()}, self.state)))
        if self.activations:
            whole = trainer.plan.family.on_meta(trainer.plan.config)
            ours = {module: name for name, module in whole.named_modules()}
            self.blocks = [_block_name(links, ours[block]) for block in whole.layers.values()]
            for number, block in self.model.layers.items():
                block.register_forward_hook(partial(self._count, int(number)))
        if trainer.first:
            self._log = StepLog(trainer.out / "norms.jsonl", start=start)

    def around(self, number: int) -> AbstractContextManager[object]:
        if self._is_due(number) and self.activations:
            self._sums = torch.zeros(2, len(self.blocks), dtype=torch.float64, device=self.state.device)
        return nullcontext()

    def gradients(self, number: int, scale: float) -> None:
        if self._is_due(number):
            named = self.model.named_parameters()
            norms = self._norms({name: weight.grad for name, weight in named if weight.grad is not None})
            self._measured["gradients"] = {name: norm / scale for name, norm in norms.items()}

    def after(self, metrics: StepMetrics) -> None:
        if not self._is_due(metrics.step):
            return
        weights = self._norms(dict(self.model.named_parameters()))  # frozen ones too
        measured, self._measured = self._measured | {"weights": weights}, {}
        if self._sums is not None:
            sums, self._sums = self._sums, None
            # Tensor ranks that hold the same count it alike: the means stay.
            pairs = zip(self.blocks, *self._summed(sums), strict=True)
            measured["activations"] = {
                name: math.sqrt(square / max(count, 1)) for name, square, count in pairs
            }
        if self._log is not None:
            self._log.write({"step": metrics.step, **measured})
        for kind, norms in measured.items():
            self.track(metrics.step + 1, {f"norms/{kind}/{name}": norm for name, norm in norms.items()})

    def close(self, error: BaseException | None) -> None:
        if self._log is not None:
            self._log.close()

    def _is_due(self, number: int) -> bool:
        return (number + 1) % self.interval == 0

    def _norms(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the norms: owners sum each square once, and one reduction serves all names."""
        state, at = self.state, {name: index for index, name in enumerate(self.all)}
        declared = declarations(self.model)
        sums = torch.zeros(2, len(self.all), dtype=torch.float64, device=state.device)
        for name, tensor in tensors.items():
            if declared[name].owner(state.layout, state.at):
                index = at[self.names[name]]
                norm = torch.linalg.vector_norm(local_data(tensor), dtype=torch.float64)
                sums[0, index] += norm**2
                sums[1, index] = 1
        named = zip(self.all, *self._summed(sums), strict=True)
        return {name: math.sqrt(square) for name, square, owners in named if owners}

    def _summed(self, sums: Tensor) -> list[list[float]]:
        if self.state.layout.world > 1:
            dist.all_reduce(sums)
        rows: list[list[float]] = sums.tolist()
        return rows

    def _count(self, block: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._sums is not None:
            hidden, *_ = tensors_in(output)  # of transformers' blocks, some of which give more
            norm = torch.linalg.vector_norm(hidden.detach(), dtype=torch.float64)
            self._sums[0, block] += norm**2
            self._sums[1, block] += hidden.numel()


def hugging_face_names(model: nn.Module, links: Iterable[Link]) -> dict[str, str]:
    """Return the Hugging Face name of each parameter on this rank; its own name if several tensors hold
    it.
    """
    ties = {(link.ours, link.hf) for link in links if not link.copy}
    several = Counter(ours for ours, _ in ties)
    hf_name_of = {ours: hf for ours, hf in ties if several[ours] == 1}
    return {name: hf_name_of.get(name, name) for name, _ in model.named_parameters()}


def _block_name(links: Iterable[Link], block: str) -> str:
    """Return what Hugging Face calls our block: the names of its tensors up to the block's number."""
    tensor = next(link.hf for link in links if link.ours.startswith(f"{block}."))
    number = block.rpartition(".")[2]
    return tensor.partition(f".{number}.")[0] + f".{number}"
