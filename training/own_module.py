"""Treat a user's module that a recipe names as a family of one model: built, cut, counted and checked. Make
what a run of it has beside it, its loss and its samples.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic_core import from_json
from torch import Tensor, nn

from ..checkpoints.described import describe_build
from ..data.batches import GlobalBatches
from ..data.items import ItemBatches
from ..layers import Stage, VocabParallelEmbedding, set_attention_backend, stage_parts
from ..models import Family, ModelConfig, Rule
from ..models.base.family import making
from ..models.base.keys import LARGEST_NUMBER, Whole
from ..parallel_state import BadInput, Layout, MachineFailed, ParallelState, alone_or, declarations, require
from ..recipes.recipe import Recipe
from ..recipes.section import ParameterGroup
from .loss import FunctionLoss, Loss, as_loss, refuse_uncut
from .optimizer import freeze, groups_of
from .own_code import OwnCode, call_own, check_keywords, names, own_code, signature_of
from .own_exchange import check_dims, check_exchange, check_split
from .run_data import open_data
from .samples import Samples

#: The axes that a class without the keyword ``state`` knows nothing of.
_AXES = ("tensor", "context", "pipeline", "expert")
_MODULE = "a subclass of torch.nn.Module"


class OwnConfig(ModelConfig):
    """Hold ``arguments``, the keywords of a module's class as JSON, and what the whole module shows."""

    head_is_last: ClassVar[bool] = False  # the loss is given what the module gives
    arguments: str
    vocab_size: Whole = LARGEST_NUMBER  # as of positions: no bound is known
    hidden_size: Whole = 1
    #: Not known: each layer refuses a cut of its own that is not even.
    intermediate_size: int = 0
    num_hidden_layers: Whole = 1
    num_attention_heads: int = 0
    max_position_embeddings: Whole = LARGEST_NUMBER


@dataclass(frozen=True, kw_only=True)
class OwnFamily(Family):
    """Be the family of a user's module; ``code`` makes it. The rest is what its run has beside it."""

    code: OwnCode
    recipe: Recipe = field(compare=False)
    groups: Mapping[str, ParameterGroup] = field(default_factory=dict, compare=False)
    #: As ``Step`` takes it.
    loss: Any = field(default=None, compare=False)
    #: The form of a micro-batch of whole rows, on the meta device.
    samples: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    #: Batches of the user's data sets, unless the data are token files.
    items: ItemBatches | None = field(default=None, compare=False)
    #: What module and loss are, by key of the recipe: their arguments, and the digests of their files.
    identity: Mapping[str, str] = field(default_factory=dict, compare=False)
    #: What a planner has found out about the module and its loss, by layout.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def build(
        self,
        config: ModelConfig,
        *,
        split: Sequence[int] | None = None,
        state: ParallelState | None = None,
        device: str | torch.device = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        assert isinstance(config, OwnConfig)
        arguments: dict[str, Any] = from_json(config.arguments)
        self._check_known(alone_or(state).layout, split)

        def make(state: ParallelState | None, **keywords: Any) -> Any:
            key, within = "model.arguments", "model.module"
            return call_own(self.code, arguments, key, within=within, state=state, **keywords)

        with making(dtype, device):
            model = make(state, **({} if split is None else {"split": split}))
        require(isinstance(model, nn.Module), "recipe", "model.module", _MODULE, type(model).__name__)
        names_of_code = {"module": self.code.name, "arguments": arguments}
        describe_build(model, names_of_code, make if names(self.code.entry, "state") else None)
        return model

    def set_up(self, model: nn.Module) -> None:
        """Freeze what the recipe's groups say, and choose the attention; in place."""
        freeze(model, self.groups)
        set_attention_backend(model, self.recipe.attention_backend)

    @property
    def takes_split(self) -> bool:
        """Tell whether the class is told the number of blocks of each stage."""
        return names(self.code.entry, "split")

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse a layout that the module cannot be cut into, and that one rank's part of it, or the loss,
        does not take part in: sequence parallelism, and context ranks.
        """
        assert isinstance(config, OwnConfig)
        self._check_known(layout, None)
        super().check_layout(config, layout)
        models = self.stages_on_meta(config, layout)
        staged = all(isinstance(getattr(model, "stage", None), Stage) for model in models)
        require(
            layout.pipeline == 1 or staged, "recipe", "model.module",
            "a Stage in its attribute `stage`, with pipeline ranks", "none",
            "Keep self.stage = Stage.of(blocks, state=state), and make the blocks of it",
        )  # fmt: skip
        split = "split", layout.tensor
        if layout.sequence and layout.tensor > 1 and split not in self.known:
            check_split(self, config, layout, self.samples)
            self.known[split] = True
        if layout.context == 1:
            return
        loss = as_loss(self.loss, ParallelState.stand_in(layout))
        refuse_uncut(loss, layout)
        check_dims(self.samples, loss.sequence, "loss.module")
        recipe_length = self.recipe.data.sequence_length
        for name in loss.sequence.keys() & self.samples.keys():
            dim = loss.sequence[name]
            length = self.samples[name].shape[dim]
            expected = f"{length}, dim {dim} of {name}, which context ranks cut"
            require(length == recipe_length, "recipe", "data.sequence_length", expected, recipe_length)
        check_exchange(self, config, layout, self.samples, loss.sequence)

    def _check_known(self, layout: Layout, split: Sequence[int] | None) -> None:
        if split is not None and not self.takes_split:
            expected, todo = "absent for a class without the keyword split", "Stage.of takes split= as well"
            raise BadInput("recipe", "layout.split", expected=expected, found=list(split), todo=todo)
        todo = "Data ranks need nothing of it; for the others see docs/your_model.md of the repository"
        for axis in () if names(self.code.entry, "state") else _AXES:
            size, expected = getattr(layout, axis), "1 for a class without the keyword state"
            require(size == 1, "recipe", f"layout.{axis}", expected, size, todo)


def own_family(recipe: Recipe) -> tuple[OwnFamily, OwnConfig]:
    """Return the family and the config of the recipe's module, with its loss and its data sets; ``BadInput``
    for what cannot be made, and for parts that do not fit.
    """
    section = recipe.model
    assert section.module is not None
    code = own_code(section.module, "model.module")
    kind = code.entry if isinstance(code.entry, type) else type(code.entry)
    makes = callable(code.entry) and (kind is not code.entry or issubclass(kind, nn.Module))
    require(makes, "recipe", "model.module", _MODULE, kind.__name__)
    family = OwnFamily("module", code.entry.__name__, OwnConfig, code.entry, (), code=code, recipe=recipe)
    try:
        bare = OwnConfig(arguments=json.dumps(section.arguments, sort_keys=True))
    except TypeError as error:
        expected = "numbers, texts, lists and tables"
        raise BadInput("recipe", "model.arguments", expected=expected, found=error) from None
    model: Any = family.on_meta(bare)
    blocks = sum(len(part.blocks) for part in stage_parts(model))
    tables = (module for module in model.modules() if isinstance(module, VocabParallelEmbedding))
    rows = {table.num_embeddings for table in tables}
    vocabulary = rows.pop() if len(rows) == 1 else LARGEST_NUMBER
    config = bare.model_copy(update={"num_hidden_layers": max(blocks, 1), "vocab_size": vocabulary})
    rules = tuple(Rule(name, name) for name in declarations(model))  # nobody else has names for them
    family = replace(family, rules=rules)
    groups = groups_of(recipe.optimizer.groups, family, config)
    return _with_parts(replace(family, groups=groups), config), config


def _with_parts(family: OwnFamily, config: OwnConfig) -> OwnFamily:
    """Return the family with the recipe's loss and data sets."""
    recipe = family.recipe
    rows, loss, items = recipe.data, _own_loss(recipe), None
    first: Mapping[str, Tensor]
    if rows.module is not None:
        batches = open_data(recipe)
        assert isinstance(batches, ItemBatches)
        items, first = batches, batches.first
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
    return replace(family, loss=loss, samples=samples, items=items, identity=identity)


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


def _own_loss(recipe: Recipe) -> Any:
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
        name = f"{getattr(code.entry, '__name__', type(code.entry).__name__)}{signature}"
        expected = "a function of (output, samples)"
        raise BadInput("recipe", "loss.module", expected=expected, found=name) from None
    state = {"state": None} if "state" in signature.parameters else {}
    check_keywords(code, arguments, "loss.arguments", None, None, **state)


def _check_taken(model: nn.Module, samples: Mapping[str, Tensor], key: str) -> None:
    """Refuse data without a sample that the module's forward asks for."""
    parameters = [*inspect.signature(model.forward).parameters.values()]
    first = getattr(model, "first_input", None)
    if first is not None and parameters and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        del parameters[0]  # given without its name
    named = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    for name in [*([] if first is None else [first]), *named]:
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


def needs_memory(model: nn.Module) -> bool:
    """Tell whether a module made on the meta device lacks what its constructor computes: buffers, tensors."""
    return any(
        isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter)
        for module in model.modules()
        for entry in (*module._buffers.values(), *vars(module).values())
    )
