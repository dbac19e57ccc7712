"""Measure one norm for each parameter, by its Hugging Face name, and each block's output.

The numbers are the same in every layout. Where Hugging Face holds several of our tensors in one (GPT-2's
c_attn), that one has the norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.base.hugging_face_names import Link
from ..parallel_state import ParallelState, declarations, state_of
from ..parallel_state.engine import local_data
from ..runs.metrics import StepLog, StepMetrics
from .callbacks import Callback

if TYPE_CHECKING:
    from ..models import CausalLM
    from .trainer import Trainer


class NormLog(Callback):
    """Write ``norms.jsonl`` after every ``interval``-th step, and hand the same numbers to ``track``.

    ``activations``: those of the blocks' outputs too.
    """

    def __init__(
        self, *, interval: int, activations: bool, track: Callable[[int, Mapping[str, float]], None]
    ) -> None:
        self.interval, self.with_activations, self.track = interval, activations, track
        self.activations: Activations | None = None
        self._log: StepLog | None = None
        self._measured: dict[str, dict[str, float]] = {}

    def begin(self, trainer: Trainer, start: int) -> None:
        links = trainer.plan.family.links_of_all(trainer.plan.config)
        self.norms = Norms(trainer.model, links, state=trainer.state)
        if self.with_activations:
            self.activations = Activations(trainer.model, links)
        if trainer.first:
            self._log = StepLog(trainer.out / "norms.jsonl", start=start)

    def around(self, number: int) -> AbstractContextManager[object]:
        if self._is_due(number) and self.activations is not None:
            self.activations.begin()
        return nullcontext()

    def gradients(self, number: int, scale: float) -> None:
        if self._is_due(number):
            norms = self.norms.gradients()
            self._measured["gradients"] = {name: norm / scale for name, norm in norms.items()}

    def after(self, metrics: StepMetrics) -> None:
        if not self._is_due(metrics.step):
            return
        measured, self._measured = self._measured | {"weights": self.norms.weights()}, {}
        if self.activations is not None:
            measured["activations"] = self.activations.end()
        if self._log is not None:
            self._log.write({"step": metrics.step, **measured})
        for kind, norms in measured.items():
            self.track(metrics.step + 1, {f"norms/{kind}/{name}": norm for name, norm in norms.items()})

    def close(self, error: BaseException | None) -> None:
        if self._log is not None:
            self._log.close()

    def _is_due(self, number: int) -> bool:
        return (number + 1) % self.interval == 0


class Norms:
    """Compute 2-norms of the weights and gradients of a model in its layout. Collective over all ranks."""

    def __init__(
        self, model: nn.Module, links: Iterable[Link], *, state: ParallelState | None = None
    ) -> None:
        self.model, self.state = model, state_of(model, state)
        self.names = hugging_face_names(model, links)
        everywhere: list[list[str] | None] = [None] * self.state.layout.world
        dist.all_gather_object(everywhere, sorted(set(self.names.values())))
        self.all = sorted({name for names in everywhere for name in names or ()})

    def weights(self) -> dict[str, float]:
        """Return the norm of each parameter, frozen ones too."""
        return self._measure(dict(self.model.named_parameters()))

    def gradients(self) -> dict[str, float]:
        """Return the norm of the gradient of each parameter that has one."""
        named = self.model.named_parameters()
        return self._measure({name: weight.grad for name, weight in named if weight.grad is not None})

    def _measure(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the norms: owners sum each square once, and one reduction serves all names."""
        state, at = self.state, {name: index for index, name in enumerate(self.all)}
        stated = declarations(self.model)
        sums = torch.zeros(2, len(self.all), dtype=torch.float64, device=state.device)
        for name, tensor in tensors.items():
            if stated[name].owner(state.layout, state.at):
                index = at[self.names[name]]
                data = local_data(tensor)
                if data.numel():
                    sums[0, index] += torch.linalg.vector_norm(data, dtype=torch.float64) ** 2
                sums[1, index] = 1
        if state.layout.world > 1:
            dist.all_reduce(sums)
        squares, owners = sums.tolist()
        return {name: math.sqrt(squares[i]) for i, name in enumerate(self.all) if owners[i]}


def hugging_face_names(model: nn.Module, links: Iterable[Link]) -> dict[str, str]:
    """Return the Hugging Face name of each parameter on this rank; its own name if several tensors hold
    it.
    """
    ties = {(link.ours, link.hf) for link in links if not link.copy}
    several = Counter(ours for ours, _ in ties)
    hf_name_of = {ours: hf for ours, hf in ties if several[ours] == 1}
    return {name: hf_name_of.get(name, name) for name, _ in model.named_parameters()}


class Activations:
    """Measure the root mean square of each block's output over a step's tokens, padded ones too; on request.

    It is a mean, so a block that is computed twice to save memory has the same number.
    """

    def __init__(self, model: CausalLM, links: Iterable[Link]) -> None:
        self.model, self.state, self.links = model, model.state, list(links)
        self._sums: Tensor | None = None
        for number, block in model.layers.items():
            block.register_forward_hook(self._hook(int(number)))

    def begin(self) -> None:
        """Start counting."""
        layers = self.model.config.num_hidden_layers
        self._sums = torch.zeros(2, layers, dtype=torch.float64, device=self.state.device)

    def end(self) -> dict[str, float]:
        """Stop counting; return the numbers by block, in the model's order. Collective over all ranks."""
        assert self._sums is not None, "it has not begun"
        sums, self._sums, state = self._sums, None, self.state
        if state.tensor.size > 1 and not state.sequence and state.at.tensor:
            sums.zero_()  # its neighbours on the tensor axis hold the same
        if state.layout.world > 1:
            dist.all_reduce(sums)
        squares, counts = sums.tolist()
        return {
            self._name(i): math.sqrt(square / max(count, 1))
            for i, (square, count) in enumerate(zip(squares, counts, strict=True))
        }

    def _hook(self, number: int) -> Any:
        def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self._sums is not None:
                norm = torch.linalg.vector_norm(output.detach(), dtype=torch.float64)
                self._sums[0, number] += norm**2
                self._sums[1, number] += output.numel()

        return count

    def _name(self, block: int) -> str:
        """Return what Hugging Face calls the block: the names of its tensors up to the block's number."""
        tensor = next(link.hf for link in self.links if link.ours.startswith(f"layers.{block}."))
        return tensor.partition(f".{block}.")[0] + f".{block}"
