"""Say which backend the attention layers of a model get, and pin it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from ...parallel_state import ParallelState
from .attention import AttentionLayer
from .backends import AttentionCall, Backend, PinnedBackend, choose_backend
from .kernel_checks import checked_backend
from .mask import AttentionScope
from .visible import exceeds


def attention_kinds(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """Return one attention layer of each kind; layers of one kind have the same window and equal calls."""
    stand_in, scope = torch.empty((1, 1, 1, 0), device="meta"), AttentionScope()
    kinds: dict[object, AttentionLayer] = {}
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            kinds.setdefault((module.window, module.call(stand_in, scope)), module)
    return tuple(kinds.values())


def set_attention_backend(model: nn.Module, backend: PinnedBackend) -> None:
    """Let all attention layers of ``model`` be computed by ``backend``."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.backend = backend


def attention_calls(
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    length: int,
    packed: bool,
    backend: PinnedBackend = "auto",
) -> dict[str, AttentionCall]:
    """Return the call of each kind of attention, by its name in words, in rows of ``length`` tokens.

    ``packed``: rows hold several documents. Needs no device. Raises ``BadInput`` if the pinned ``backend``
    cannot compute one of them.
    """
    stand_in, scope = torch.empty((1, 1, 1, 0), device="meta"), AttentionScope()
    calls: dict[str, AttentionCall] = {}
    for module in attention_kinds(model):
        narrow = exceeds(module.window, length)
        call = replace(
            module.call(stand_in, scope),
            device=torch.device(device).type,
            dtype=dtype,
            masked=packed or narrow,
        )
        words = [f"window {module.window}"] * narrow + ["several documents a row"] * packed + [call.score]
        choose_backend(call, backend)
        calls[", ".join(filter(None, words)) or "one document a row"] = call
    return calls


def attention_backends(
    calls: Mapping[str, AttentionCall], backend: PinnedBackend, state: ParallelState
) -> dict[str, Backend]:
    """Return the backend that computes each of these calls on the device of ``state``, where a kernel that
    needs it is checked before. Collective over the tensor and context ranks. Raises ``BadInput`` as
    ``attention_calls`` does.
    """
    return {kind: checked_backend(call, backend, state.device, state) for kind, call in calls.items()}
