"""Make what a run of a user's module has beside it, its loss and its samples, and check that they fit."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import GlobalBatches
from ..data.items import ItemBatches
from ..layers import set_attention_backend
from ..models import Family, ModelConfig
from ..parallel_state import BadInput, Layout, MachineFailed, ParallelState, require
from ..recipes.recipe import Recipe
from ..recipes.section import ParameterGroup
from ..system import literal
from .loss import FunctionLoss, Loss, as_loss, refuse_uncut
from .optimizer import freeze
from .own.code import OwnCode, call_own, check_keywords, own_code, signature_of
from .own.module import OwnConfig, OwnFamily
from .own_exchange import check_exchange, check_split
from .precision import multiply_in_float8
from .run_data import open_data
from .samples import Samples


@dataclass(frozen=True)
class OwnParts:
    """Hold what a run of a user's module has beside it.

    ``loss``: as ``Step`` takes it. ``samples``: the form of a micro-batch of whole rows, on the meta device.
    ``items``: batches of the user's data sets, unless the data are token files.
    """

    loss: Any
    samples: Mapping[str, Tensor]
    items: ItemBatches | None
    #: What the recipe says of the tokens in a row.
    length: int
    #: What module and loss are, by key of the recipe: their arguments, and the digests of their files.
    code: Mapping[str, str]
    #: Sets in the module, for a state, what the recipe says of it: what is frozen, and how it multiplies.
    set_up: Callable[[nn.Module, ParallelState], None]
    #: What a planner has found out about the module and its loss, by layout.
    known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def check_layout(self, family: OwnFamily, config: OwnConfig, layout: Layout) -> None:
        """Refuse sequence parallelism for a module that does not split its tokens, context ranks for a loss
        that does not say what they cut, and for a module with a block that sends nothing between them.
        """
        split = "split", layout.tensor
        if layout.sequence and layout.tensor > 1 and split not in self.known:
            check_split(family, config, layout, self.samples)
            self.known[split] = True
        if layout.context == 1:
            return
        loss = as_loss(self.loss, ParallelState.stand_in(layout))
        refuse_uncut(loss, layout)
        _check_dims(self.samples, loss.sequence, "loss.module")
        for name in loss.sequence.keys() & self.samples.keys():
            dim = loss.sequence[name]
            length = self.samples[name].shape[dim]
            expected = f"{length}, dim {dim} of {name}, which context ranks cut"
            require(length == self.length, "recipe", "data.sequence_length", expected, self.length)
        check_exchange(family, config, layout, self.samples, loss.sequence)


def own_parts(
    recipe: Recipe, family: OwnFamily, config: OwnConfig, groups: Mapping[str, ParameterGroup]
) -> OwnParts:
    """Make the recipe's loss and data sets; ``BadInput`` for those that do not fit the module."""
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
    code = {
        "model.arguments": config.arguments,
        "model.module": _shown(family.code),
        "loss.arguments": json.dumps(recipe.loss.arguments, sort_keys=True, default=str),
        "loss.module": _shown(own_code(recipe.loss.module, "loss.module")),
    }

    def set_up(model: nn.Module, state: ParallelState) -> None:
        set_up_own(model, recipe, groups)
        if recipe.compute == "float8":
            multiply_in_float8(model, recipe, state)

    return OwnParts(loss, samples, items, rows.sequence_length, code, set_up)


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


def set_up_own(model: nn.Module, recipe: Recipe, groups: Mapping[str, ParameterGroup]) -> None:
    """Freeze what the recipe's groups say, and choose the attention, of a user's module; in place."""
    freeze(model, groups)
    set_attention_backend(model, recipe.attention_backend)


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


def _check_dims(samples: Mapping[str, Tensor], dims: Mapping[str, int], key: str) -> None:
    """Refuse a dim of the sequence that a sample lacks."""
    for name in dims.keys() & samples.keys():
        dim, count = dims[name], samples[name].ndim
        is_dim = type(dim) is int and -count <= dim < count
        require(is_dim, "recipe", key, f"a dim of {name}, which has {count}", literal(dim))


def check_held_out(
    parts: OwnParts, family: Family, config: ModelConfig, rows: Samples, layout: Layout
) -> None:
    """Refuse held-out data without a sample that the module's forward asks for, or without a dim that context
    ranks cut. ``rows``: some of them.
    """
    _check_taken(family.on_meta(config), rows, "evaluation")
    if layout.context > 1:
        _check_dims(rows, getattr(parts.loss, "sequence", {}), "evaluation")
