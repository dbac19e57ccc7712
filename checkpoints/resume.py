"""Resume a run: find its newest complete checkpoint and read it in any layout. ``save.py`` writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models import CausalLM, Family, ModelConfig
from ..parallel_state import BadCheckpoint, BadInput, Layout, ParallelState
from ..parallel_state.collective_errors import together
from ..storage.dtypes import TORCH
from ..storage.file_names import MANIFEST, STEP_NAME
from ..storage.folder_kind import holds_steps
from ..system.addresses import as_url
from .find import Found, folder_of_steps, latest_checkpoint, newest_at, warn_of
from .load import check_same_model, fill, fill_from
from .lora import check_same_base
from .manifest import Manifest, StoredAdapter
from .moments import MOMENTS, begin_moments, moment_name, moment_of
from .rank_storage import stored_parts
from .source import Source, read_source
from .stated_progress import check_progress
from .verify_together import verify_share


@dataclass(frozen=True)
class Progress:
    """State how far a run is: ``step``, the number of steps done, and the ``layout`` that did the last of
    them.

    ``data``: plain data that fixes the order of the samples. ``memory``: plain data of the training loop,
    such as the number of updates (``Update.remember``, ``together_updates``).
    """

    step: int
    layout: Layout
    data: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


def newest_checkpoint(
    root: Path, state: ParallelState, *, say: Callable[[str], None] = lambda text: None
) -> Path | None:
    """Return the newest complete checkpoint in a run's folder, or ``None``; the same on every rank.

    Rank 0 looks and tells the others. For each incomplete checkpoint that it skips, ``say`` gets the reason.
    """

    def look() -> tuple[str | None, tuple[str, ...]]:
        if state.rank or not root.is_dir() or not any(root.iterdir()):
            return None, ()
        if not any(STEP_NAME.fullmatch(path.name) for path in root.iterdir()):
            left = ", ".join(sorted(path.name for path in root.iterdir()))
            return None, (f"no checkpoint was ever completed ({left}): from the beginning",)
        found = latest_checkpoint(root)
        return str(found.directory), found.passed_over

    path, passed_over = together(look, world=state.layout.world, group=state.file_group)[0]
    for line in passed_over:
        say(line)
    return None if path is None else Path(path)


@contextmanager
def newest_in(path: str | Path, state: ParallelState, opened: Source | None = None) -> Iterator[str]:
    """Yield the newest complete checkpoint of a run's folder or a folder of checkpoints, here or at an
    address, or else ``path``; the same on every rank.

    Collective. Only rank 0 looks, because a run may save meanwhile, and then ranks could find different
    checkpoints; it warns of each newer one that it passes over. If it has ``opened`` the newest before, that
    is the one. Rank 0 holds the checkpoint during the block, so that the run does not delete it; the block
    must end with a collective.
    """
    held: list[Found] = []

    def look() -> str:
        if state.rank:
            return ""
        if (url := as_url(path)) is not None:
            chosen, passed_over = newest_at(url)
        elif holds_steps(folder := folder_of_steps(Path(path))) and opened is not None:
            chosen, passed_over = str(opened.path), []  # warned of when it was opened
        elif holds_steps(folder):
            held.append(latest_checkpoint(folder))
            chosen, passed_over = str(held[0].directory), [*held[0].passed_over]
        else:
            chosen, passed_over = str(path), []
        warn_of(passed_over)
        return chosen

    yield together(look, world=state.layout.world, group=state.file_group)[0]
    held.clear()


def load_training(
    path: str | Path,
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    family: Family,
    config: ModelConfig,
    *,
    adapter: StoredAdapter | None = None,
) -> Progress:
    """Fill the model and the optimizer from a run's checkpoint of any layout. Collective.

    ``adapter``: for LoRA, the adapters of the run now; a checkpoint of adapters for another base is refused.
    """
    state = model.state

    def load() -> Progress:
        source = read_source(path, whole=state.rank == 0)
        manifest = source.manifest
        if manifest is None or manifest.kind != "training" or manifest.step is None:
            raise BadCheckpoint(
                path,
                expected="a checkpoint of a training run",
                found="weights alone",
                todo="Start from it with model.init_from",
            )
        check_same_model(source, family, config)
        if adapter is not None and source.adapter is not None:
            check_same_base(source.adapter, adapter, path)
        check_same_dtype(source, model)
        # Every byte is read against its checksum before a run goes on: each rank sees to some of the files.
        verify_share(source, manifest, state)
        fill_from(source, model)
        return restore_progress(source, manifest, model, optimizer, state)

    return load_together(load, state)


def check_same_dtype(source: Source, model: nn.Module) -> None:
    """Refuse a training checkpoint whose dtype is not that of the trained parameters of ``model``.

    A cast would change weights and moments, and the run would continue with other numbers.
    """
    stored = {TORCH[one.dtype] for name, one in source.catalog.items() if name.startswith("optimizer.")}
    here = {one.dtype for one in model.parameters() if one.requires_grad}
    if stored and here and stored != here:
        expected, found = (
            ", ".join(sorted(f"{one}".removeprefix("torch.") for one in dtypes)) for dtypes in (stored, here)
        )
        raise BadInput(
            source.path,
            "dtype",
            expected=f"{expected}, as the run's weights and moments are",
            found=found,
            todo="Resume with that dtype, or start a new run from these weights",
        )


def load_together(load: Callable[[], Progress], state: ParallelState) -> Progress:
    """Call ``load`` on every rank; a checkpoint that one rank cannot use is refused by all of them."""
    return together(load, world=state.layout.world, group=state.file_group)[state.rank]


def restore_progress(
    source: Source,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: ParallelState,
) -> Progress:
    """Fill the moments of the optimizer, if there is one, and return the run's progress.

    Call it after the weights are filled. Raises ``BadCheckpoint`` for a parameter that is trained now but was
    frozen in the run that saved.
    """
    check_progress(manifest, source.path / MANIFEST)
    memory = manifest.state.get("memory")
    memory = {"updates": manifest.step or 0} | (dict(memory) if isinstance(memory, dict) else {})
    if optimizer is not None:
        links = source.links()
        begin_moments(model, optimizer, memory)
        for moment in MOMENTS:
            for name, tensor, box in stored_parts(model, state, moment_of(optimizer, moment)):
                if name in manifest.frozen:
                    raise BadCheckpoint(
                        source.path,
                        moment_name(moment, name),
                        expected="the moment of a parameter that is trained",
                        found="none: it was frozen",
                        todo="Freeze the parameters that the run began with frozen, or start a new run "
                        "from these weights",
                    )
                fill(tensor, source.read(moment_name(moment, name), box, links))
    data = manifest.data_position if isinstance(manifest.data_position, dict) else {}
    return Progress(manifest.step or 0, manifest.layout, dict(data), memory)
