"""Write and read checkpoints of a zoo model in a user's own loop, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..models import FAMILIES, CausalLM, Family
from ..parallel_state import BadInput, Layout
from ..parallel_state.collective_errors import together
from .load import load_weights
from .moments import begin_moments, together_updates
from .resume import Progress, load_training, newest_in, restore_progress
from .save import Contents, Saver
from .user_module import check_storable


def save_model(
    root: str | Path,
    model: CausalLM,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    data: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write ``root/step-N`` from what the ranks hold, and delete checkpoints older than the newest ``keep``.

    Collective; returns the checkpoint's folder, which every command and ``load_model`` read. With an
    ``optimizer`` (AdamW) both moments are in it, and ``restore_model`` goes on bit for bit. ``data``: plain
    data that ``restore_model`` gives back, such as where the data stood. Nothing is committed unless every
    rank succeeds.
    """
    state, family = model.state, _family_of(model)

    def here() -> tuple[list[str], dict[int, int]]:
        check_storable("save_model", model, optimizer)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return frozen, {part.number: len(part.blocks) for part in model.stage.parts}

    everywhere = together(here, world=state.layout.world, group=state.file_group)
    counts = {number: count for _, stages in everywhere for number, count in stages.items()}
    contents = Contents(
        family, model.config, family.to_hf(model.config), [counts[number] for number in sorted(counts)],
        frozen=frozenset(name for names, _ in everywhere for name in names),
    )  # fmt: skip
    if optimizer is not None:
        begin_moments(model, optimizer)
    memory = together_updates(model, optimizer, state)
    with Saver(Path(root), model, optimizer, contents, keep=keep) as saver:
        saver.save(Progress(step, state.layout, dict(data or {}), memory))
    return Path(root) / f"step-{step:08d}"


def restore_model(
    path: str | Path, model: CausalLM, optimizer: torch.optim.Optimizer | None = None
) -> Progress:
    """Fill a model and, if given, its optimizer from what ``save_model`` or a run wrote in any layout.

    Collective. ``path``: a checkpoint, or the folder of several, of which the newest complete one is taken.
    The model may be cut, sharded by FSDP, a stage. Without an optimizer a Hugging Face folder will do, too.
    """
    state, family = model.state, _family_of(model)

    def load(found: str) -> Progress:
        source = load_weights(found, model, family, model.config)
        if source.manifest is None:
            return Progress(0, Layout())
        return restore_progress(source, source.manifest, model, None, state)

    with newest_in(path, state) as found:
        if optimizer is not None:
            return load_training(found, model, optimizer, family, model.config)
        each = together(lambda: load(found), world=state.layout.world, group=state.file_group)
        return each[state.rank]


def _family_of(model: CausalLM) -> Family:
    if any(".lora_" in name for name, _ in model.named_parameters()):
        todo = "`trilith train` with a [lora] section saves adapters; merge-lora adds them to weights"
        raise BadInput(
            "save_model", "model", expected="a whole model", found="LoRA adapters in it", todo=todo
        )
    return next(one for one in FAMILIES.values() if one.config is type(model.config))
