"""Treat a user's module that a recipe names as a family of one model: built, cut, counted and checked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from pydantic_core import from_json
from torch import Tensor, nn

from ...checkpoints.described import describe_build
from ...layers import Stage, VocabParallelEmbedding, stage_parts
from ...models import Family, ModelConfig, Rule
from ...models.base.family import making
from ...models.base.keys import LARGEST_NUMBER, Whole
from ...parallel_state import BadInput, Layout, ParallelState, alone_or, declarations, require
from ...recipes.recipe import Recipe
from .code import OwnCode, call_own, names, own_code

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


@dataclass(frozen=True)
class OwnFamily(Family):
    """Be the family of a user's module; ``code`` makes it."""

    code: OwnCode = field(kw_only=True)
    #: The run's loss and samples (``OwnParts``), once they are made.
    parts: Any = field(default=None, kw_only=True, compare=False)

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

    @property
    def takes_split(self) -> bool:
        """Tell whether the class is told the number of blocks of each stage."""
        return names(self.code.entry, "split")

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse a layout that the module cannot be cut into."""
        self._check_known(layout, None)
        super().check_layout(config, layout)
        models = self.stages_on_meta(config, layout)
        staged = all(isinstance(getattr(model, "stage", None), Stage) for model in models)
        require(
            layout.pipeline == 1 or staged, "recipe", "model.module",
            "a Stage in its attribute `stage`, with pipeline ranks", "none",
            "Keep self.stage = Stage.of(blocks, state=state), and make the blocks of it",
        )  # fmt: skip
        if self.parts is not None:
            self.parts.check_layout(self, config, layout)

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
    family = OwnFamily("module", code.entry.__name__, OwnConfig, code.entry, (), code=code)
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
