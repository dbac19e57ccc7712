"""Write a checkpoint of any model, in any layout, from a loop of one's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..layers import Stage
from ..models import AdaptedFamily
from ..parallel_state import BadInput, ParallelState, buffer_names, check_state, declarations, state_of
from ..parallel_state.collective_errors import together
from .described import check_memory, describe
from .find import step_directory
from .manifest import StoredAdapter
from .manifest_checks import Progress
from .optimizer_state import gather_optimizer
from .saver import Contents, Saver


def save(
    root: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    keep: int = 2,
    state: ParallelState | None = None,
) -> Path:
    """Write ``root/step-N`` from what the ranks hold, and delete checkpoints older than the newest ``keep``.

    Collective; returns the checkpoint's folder, which ``load`` and every command read. The model: one of the
    zoo (if it has LoRA adapters, they are written alone, and the base is named), or any module, whose
    parameters are stored as they are declared (see ``describe_module``). With an ``optimizer`` its state is
    in it, too, and ``load`` goes on bit for bit: any that keeps tensors of a parameter's shape, and numbers.
    ``extra``: plain data of your own, which ``load`` gives back, such as where the data stood. ``state``: for
    a module that does not have its own. Nothing is committed unless every rank succeeds.
    """
    state = state_of(model, state)
    check_state(model, state, "save")
    contents = contents_of(model, optimizer, state)
    with Saver(Path(root), model, optimizer, contents, keep=keep, state=state) as saver:
        saver.save(Progress(step, state.layout, extra=extra))
    return step_directory(Path(root), step)


def contents_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: ParallelState) -> Contents:
    """Return what the checkpoints of a model have in common, for your own ``Saver``. Collective.

    Raises ``BadInput`` for what a checkpoint cannot hold: persistent buffers, two dtypes, some optimizers.
    """
    described = describe(model, state)
    family, adapts = described.family, isinstance(described.family, AdaptedFamily)
    adapter: StoredAdapter | None = getattr(model, "adapter", None) if adapts else None
    if adapts and adapter is None:
        expected = "adapters of a base that load filled"
        todo = "load(base, model) fills its base and keeps with the model which one it is"
        raise BadInput("save", "model", expected=expected, found="none", todo=todo)
    (declared,) = described.declarations()

    def here() -> tuple[list[str], dict[int, int]]:
        check_memory(model, "save")
        named = {name: parameter for name, parameter in model.named_parameters() if name in declared}
        _check_storable(model, named)
        parts: Sequence[Stage] = cast(Stage, model.stage).parts if described.module is None else ()
        frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
        return frozen, {part.number: len(part.blocks) for part in parts}

    everywhere = together(here, state)
    counts = {number: count for _, stages in everywhere for number, count in stages.items()}
    return Contents(
        described,
        family.to_hf(described.config),
        [counts[number] for number in sorted(counts)] or None,
        adapter=adapter,
        frozen=frozenset(name for names, _ in everywhere for name in names),
        optimizer=None if optimizer is None else gather_optimizer("save", model, optimizer, state),
    )


def _check_storable(model: nn.Module, stored: Mapping[str, nn.Parameter]) -> None:
    """Refuse what a checkpoint could not hold: persistent buffers, several dtypes."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in model.state_dict():
        if name not in names:
            todo = "register_buffer(..., persistent=False), or a declared parameter without gradient"
            raise BadInput("save", name, expected="parameters alone", found="a persistent buffer", todo=todo)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in stored:
            todo = "Freeze the base: only adapters are saved"
            raise BadInput("save", name, expected="adapters alone trained", found="a weight", todo=todo)
    fixed = buffer_names(declarations(model))
    dtypes = {str(parameter.dtype) for name, parameter in stored.items() if name not in fixed}
    if len(dtypes) > 1:
        mixed = " and ".join(sorted(dtypes))
        raise BadInput("save", "dtype", expected="one for all parameters", found=mixed)
