"""Make what a run of a user's module has beside it, its loss and its samples, and check that they fit."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import GlobalBatches
from ..data.items import ItemBatches
from ..models import ModelConfig
from ..parallel_state import BadInput, Layout, MachineFailed, require
from ..recipes.recipe import Recipe
from ..recipes.section import ParameterGroup
from .loss import FunctionLoss, Loss
from .own_code import OwnCode, call_own, check_keywords, own_code, signature_of
from .own_exchange import check_dims
from .own_module import OwnConfig, OwnFamily
from .run_data import open_data
from .samples import Samples


def with_parts(family: OwnFamily, config: OwnConfig, groups: Mapping[str, ParameterGroup]) -> OwnFamily:
    """Return the family with the recipe's loss and data sets; ``BadInput`` for those that do not fit."""
    recipe = family.recipe
    rows, loss, items = recipe.data, own_loss(recipe), None
    first: Mapping[str, Tensor]
    if rows.module is not None:
        made = open_data(recipe)
        assert isinstance(made, ItemBatches)
        items, first = made, made.first
    else:
        text = ["input_ids", "labels"] + ["positions"] * _packed(recipe)
        first = {name: torch.empty(rows.sequence_length, dtype=torch.int64, device="meta") for name in text}
    samples = {
        name: torch.empty((rows.micro_batch, *x.shape), dtype=x.dtype, device="meta")
        for name, x in first.items()
    }
    _check_taken(family.on_meta(config), samples, "data")
    assert recipe.loss is not None
    identity = {
        "model.arguments": config.arguments,
        "model.module": _shown(family.code),
        "loss.arguments": json.dumps(recipe.loss.arguments, sort_keys=True, default=str),
        "loss.module": _shown(own_code(recipe.loss.module, "loss.module")),
    }
    return replace(family, groups=groups, loss=loss, samples=samples, items=items, identity=identity)


def _packed(recipe: Recipe) -> bool:
    """Tell whether rows of tokens have positions: those of a chat set always do."""
    try:
        opened = open_data(recipe)
    except (BadInput, MachineFailed):  # a plan needs no token file; check_run refuses it
        return recipe.data.documents == "separate"
    assert isinstance(opened, GlobalBatches)
    return opened.packed


def _shown(code: OwnCode) -> str:
    return f"{code.name.rpartition(':')[2]} of a file with SHA-256 {code.digest}"


def own_loss(recipe: Recipe) -> Any:
    """Return the loss that the recipe names; ``BadInput`` for what is none."""
    section, key = recipe.loss, "loss.arguments"
    assert section is not None
    code, arguments = own_code(section.module, "loss.module"), section.arguments
    entry = code.entry
    if isinstance(entry, type) and issubclass(entry, Loss):
        return call_own(code, arguments, key, within="loss.module")
    if isinstance(entry, Loss):
        require(not arguments, "recipe", key, "none for an object", ", ".join(arguments))
        if isinstance(entry, FunctionLoss):
            _check_called(code._replace(entry=entry.function), {})
        return entry
    kind, is_type = getattr(entry, "__name__", type(entry).__name__), isinstance(entry, type)
    expected = "a Loss, a class of it, or a function of (output, samples)"
    require(callable(entry) and not is_type, "recipe", "loss.module", expected, kind)
    _check_called(code, arguments)
    return partial(entry, **arguments) if arguments else entry


def _check_called(code: OwnCode, arguments: Mapping[str, Any]) -> None:
    """Refuse a loss that cannot be called with an output, samples and these arguments."""
    signature = signature_of(code.entry)
    try:
        signature.bind_partial(None, None)
    except TypeError:
        shown = f"{getattr(code.entry, '__name__', type(code.entry).__name__)}{signature}"
        expected = "a function of (output, samples)"
        raise BadInput("recipe", "loss.module", expected=expected, found=shown) from None
    state = {"state": None} if "state" in signature.parameters else {}
    check_keywords(code, arguments, "loss.arguments", None, None, **state)


def _check_taken(model: nn.Module, samples: Mapping[str, Tensor], key: str) -> None:
    """Refuse data without a sample that the module's forward asks for."""
    parameters = [*inspect.signature(model.forward).parameters.values()]
    first = getattr(model, "first_input", None)
    if first is not None and parameters and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        del parameters[0]  # given without its name
    asked = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    for name in [*([] if first is None else [first]), *asked]:
        todo = "The keywords of forward name the samples that it is given"
        expected = f"a sample {name}, which the model's forward takes"
        require(name in samples, "recipe", key, expected, ", ".join(samples), todo)


def check_held_out(family: OwnFamily, config: ModelConfig, rows: Samples, layout: Layout) -> None:
    """Refuse held-out data without a sample that the module's forward asks for, or without a dim that context
    ranks cut. ``rows``: some of them.
    """
    _check_taken(family.on_meta(config), rows, "evaluation")
    if layout.context > 1:
        check_dims(rows, getattr(family.loss, "sequence", {}), "evaluation")
