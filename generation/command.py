"""Run a command that computes with a model's weights: read them, start the ranks, and leave its figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from ..checkpoints import Source, load_source, read_source, with_adapter
from ..parallel_state import Layout, ParallelState, dtype_named, launched
from ..runs.guard import watched
from ..runs.heartbeat import this_start
from ..runs.launch import check_launch, check_local, device_here, launch, own_rank, process_group
from ..storage.small_files import read_text

if TYPE_CHECKING:
    from ..models import CausalLM


@dataclass(frozen=True)
class Weights:
    """Hold opened weights, those of an adapter for them, and the dtype of the model that they fill."""

    source: Source
    adapter: Source | None
    dtype: torch.dtype

    @staticmethod
    def of(place: str | Path, adapter: Path | None, layout: Layout, dtype: str, command: str) -> Weights:
        """Open weights, read none. ``BadInput`` for a layout that cannot cut the model."""
        first = own_rank() == 0
        source, adapters = with_adapter(read_source(place, whole=first), adapter, whole=first)
        (adapters or source).family.declarations(source.model_config, layout)
        return Weights(source, adapters, dtype_named(dtype, command, "--dtype"))

    def load(self, state: ParallelState) -> CausalLM:
        """Return this rank's part of the model, and of the adapters for it, with these weights."""
        family = (self.adapter or self.source).family
        model = family.build(self.source.model_config, state=state, dtype=self.dtype)
        model.to_empty(device=state.device)
        for source in filter(None, (self.source, self.adapter)):
            load_source(source, model)
        return model


Read = TypeVar("Read", bound=Weights)
#: In the status folder, what the first rank has to say at the end: the ranks' stderr is the launcher's log.
_FIGURES = "figures"


@dataclass(frozen=True)
class Ranks:
    """State on what ranks a command computes: those of ``layout``, started here or by torchrun.

    ``words`` are the command's own, with which a layout of several ranks starts them; ``status`` is the
    folder that they were then given. ``note`` gets the figures at the end.
    """

    layout: Layout
    words: Sequence[str]
    note: Callable[[str], None]
    device: str = "auto"
    status: Path | None = None

    def run(
        self, prepare: Callable[[], Read], work: Callable[[Read, ParallelState, str], str], *, asked: str
    ) -> int:
        """Run ``work(prepare(), state, device)`` on each rank; return the exit code.

        It returns the figures. ``asked``: what is asked for, which all ranks must have been told alike.
        """
        layout, status, device = self.layout, self.status, device_here(self.device)
        if launched() is None:
            check_local(layout, device=device)
            if layout.world > 1:
                prepare()  # bad input is said once and at once, before any rank starts
                with tempfile.TemporaryDirectory(prefix=f"trilith-{self.words[0]}-") as folder:
                    code = launch([*self.words, "--status", folder], layout.world, Path(folder))
                    if (file := Path(folder) / _FIGURES).exists():
                        self.note(read_text(file))
                return code
        check_launch(layout, device=device)
        with ExitStack() as stack:
            if status is not None:
                stack.enter_context(watched(status, own_rank(), layout.world, run=this_start()))
            prepared = prepare()
            # A run may save meanwhile, and each rank chooses its newest checkpoint.
            alike = {"device": device, "asked": asked, "source": str(prepared.source.path)}
            state = stack.enter_context(process_group(layout, device=device, alike=alike))
            figures = work(prepared, state, device)
            if own_rank() == 0:
                if status is None:
                    self.note(figures)
                else:
                    (status / _FIGURES).write_text(figures)
        return 0
