"""Treat a user's module that a recipe names as a family of one model: built, cut, counted and checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from pydantic_core import from_json
from torch import Tensor, nn

from ..checkpoints.described import describe_build
from ..data.items import ItemBatches
from ..layers import Stage, VocabParallelEmbedding, set_attention_backend, stage_parts
from ..models import Family, ModelConfig, Rule
from ..models.base.family import making
from ..models.base.keys import LARGEST_NUMBER, Whole
from ..parallel_state import BadInput, Layout, ParallelState, alone_or, declarations, require
from ..recipes.recipe import Recipe
from ..recipes.section import ParameterGroup
from .loss import as_loss, refuse_uncut
from .optimizer import freeze
from .own_code import OwnCode, call_own, names, own_code
from .own_exchange import check_dims, check_exchange, check_split

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
        """Return the module, or this rank's stages of it, on ``device``."""
        assert isinstance(config, OwnConfig)
        arguments: dict[str, Any] = from_json(config.arguments)
        self._check_known(alone_or(state).layout, split)

        def make(state: ParallelState | None, **keywords: Any) -> Any:
            key, within = "model.arguments", "model.module"
            return call_own(self.code, arguments, key, within=within, state=state, **keywords)

        with making(dtype, device):
            model = make(state, **({} if split is None else {"split": split}))
        require(isinstance(model, nn.Module), "recipe", "model.module", _MODULE, type(model).__name__)
        stated = {"module": self.code.name, "arguments": arguments}
        describe_build(model, stated, make if names(self.code.entry, "state") else None)
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
        stated = self.recipe.data.sequence_length
        for name in loss.sequence.keys() & self.samples.keys():
            dim = loss.sequence[name]
            length = self.samples[name].shape[dim]
            expected = f"{length}, dim {dim} of {name}, which context ranks cut"
            require(length == stated, "recipe", "data.sequence_length", expected, stated)
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
    """Return the family and the config of the recipe's module; ``BadInput`` for none that can be made."""
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
    return replace(family, rules=rules), config


def needs_memory(model: nn.Module) -> bool:
    """Tell whether a module made on the meta device lacks what its constructor computes: buffers, tensors."""
    return any(
        isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter)
        for module in model.modules()
        for entry in (*module._buffers.values(), *vars(module).values())
    )
