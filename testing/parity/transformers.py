"""Observe the same model in transformers, under our names, by the table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...checkpoints import read_source
from ...layers import IGNORE, routers
from ...models import Link
from ...parallel_state import Box
from ...ranks.pool import run_parallel
from .case import Observation, Question


def observe_hf(question: Question, *, timeout: float = 600) -> Observation:
    """Run the folder's model with transformers in a process of its own; ``timeout`` in seconds."""
    found: list[Observation] = run_parallel(observe_alone, 1, question, timeout=timeout)
    return found[0]


def observe_alone(question: Question) -> Observation:
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    source = read_source(question.folder)
    links, _ = source.family.links(source.model_config)
    model = AutoModelForCausalLM.from_pretrained(question.folder, dtype=question.dtype)
    if any(routers(source.family.on_meta(source.model_config))):
        model.set_experts_implementation("eager")  # the other one has no fp64
    model.eval()
    outputs: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for ours, (theirs, features) in counterparts(links).items():
        # Files of a model with experts bear other names than its modules; Gemma's embedding scales as well.
        if theirs in modules and not hasattr(modules[theirs], "embed_scale"):
            modules[theirs].register_forward_hook(_note(outputs, ours, features))
    input_ids, labels = question.batch(source.model_config)
    logits = outputs["logits"] = model(input_ids).logits
    inner = torch.promote_types(logits.dtype, torch.float32)
    summed = F.cross_entropy(
        logits.flatten(0, 1).to(inner), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = summed / (labels != IGNORE).sum()
    loss.backward()
    (stated,) = source.family.declarations(source.model_config)
    moved = [link for link in links if not stated[link.ours].buffer]
    held = {name: [(Box.whole(tuple(one.shape)), one.detach())] for name, one in outputs.items()}
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return Observation(
        float(loss.detach()), held, _gradients(moved, revert_weight_conversion(model, gradients))
    )


def counterparts(links: list[Link]) -> dict[str, tuple[str, list[slice]]]:
    """Return, for our modules with a weight and our blocks, their module and the features of its output."""
    found: dict[str, tuple[str, list[slice]]] = {}
    for link in links:
        ours, _, leaf = link.ours.rpartition(".")
        if leaf == "weight" and ours != "head":
            along = 1 if link.transpose else 0
            whole = len(link.hf_box.stop) == 1
            features = slice(None) if whole else slice(link.hf_box.start[along], link.hf_box.stop[along])
            found.setdefault(ours, (link.hf.rpartition(".")[0], []))[1].append(features)
        if ours.startswith("layers."):
            number = ours.split(".")[1]
            before, _, _ = link.hf.partition(f".{number}.")
            found[f"layers.{number}"] = f"{before}.{number}", [slice(None)]
    return found


def _note(
    outputs: dict[str, Tensor], ours: str, features: list[slice]
) -> Callable[[nn.Module, Any, Any], None]:
    def look(module: nn.Module, arguments: Any, given: Any) -> None:
        output = given[0] if isinstance(given, tuple) else given
        if output.ndim == 3:
            outputs[ours] = torch.cat([output[..., one] for one in features], dim=-1)

    return look


def _gradients(links: list[Link], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients under our names, from those under the names in HF's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        stop = link.ours_box.stop
        shapes[link.ours] = tuple(map(max, shapes.get(link.ours, stop), stop))
    whole: dict[str, Tensor] = {}
    for link in links:
        assert link.hf in found, f"{link.hf} has no gradient"
        piece = found[link.hf][link.hf_box.slices]
        mine = whole.setdefault(link.ours, torch.empty(shapes[link.ours], dtype=piece.dtype))
        mine[link.ours_box.slices] = piece.T if link.transpose else piece
    return whole
