"""Treat a user's module that a recipe names as a family of one model: built, cut, counted and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol, cast

import torch
from pydantic_core import from_json
from torch import Tensor, nn

from ...checkpoints.described import describe_build
from ...layers import Stage, VocabParallelEmbedding, find_blocks
from ...models import Family, Link, ModelConfig
from ...models.base.family import making
from ...models.base.keys import Whole
from ...parallel_state import BadInput, Box, Layout, ParallelState, Piece, alone_or
from ...recipes.recipe import Recipe
from .code import OwnCode, call_own, names, own_code

#: Of a vocabulary and of positions: no bound is known.
UNKNOWN = 2**31 - 1
#: The axes that a class without the keyword ``state`` knows nothing of.
_AXES = ("tensor", "context", "pipeline", "expert")


class OwnConfig(ModelConfig):
    """Hold ``arguments``, the keywords of a module's class as JSON, and what the whole module shows."""

    head_is_last: ClassVar[bool] = False  # the loss is given what the module gives
    arguments: str
    vocab_size: Whole = UNKNOWN
    hidden_size: Whole = 1
    #: Not known: each layer refuses a cut of its own that is not even.
    intermediate_size: int = 0
    num_hidden_layers: Whole = 1
    num_attention_heads: int = 0
    max_position_embeddings: Whole = UNKNOWN


class OwnRun(Protocol):
    """Define what a module's run adds to the checks of a layout (``OwnParts``)."""

    def check_layout(self, family: OwnFamily, config: OwnConfig, layout: Layout) -> None:
        """Refuse a layout that the run's loss or the module's blocks cannot have."""


@dataclass(frozen=True)
class OwnFamily(Family):
    """Be the family of a user's module; ``code`` makes it."""

    code: OwnCode = field(kw_only=True)
    #: The run's loss and samples, once they are made.
    parts: OwnRun | None = field(default=None, kw_only=True, compare=False)

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
        keywords: dict[str, Any] = {"state": state} | ({} if split is None else {"split": split})
        with making(dtype, device):
            model = call_own(self.code, arguments, "model.arguments", within="model.module", **keywords)
        if not isinstance(model, nn.Module):
            _refuse_kind(type(model).__name__)
        stated = {"module": self.code.name, "arguments": arguments}
        describe_build(model, stated, self._maker(arguments))
        return model

    def _maker(self, arguments: Mapping[str, Any]) -> Callable[[ParallelState], nn.Module] | None:
        """Return the function that makes the module for a state, if its class knows states."""
        if not names(self.code.entry, "state"):
            return None
        key, within = "model.arguments", "model.module"
        return lambda state: call_own(self.code, arguments, key, within=within, state=state)

    @property
    def takes_split(self) -> bool:
        """Tell whether the class is told the number of blocks of each stage."""
        return names(self.code.entry, "split")

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        """Refuse a layout that the module cannot be cut into."""
        self._check_known(layout, None)
        super().check_layout(config, layout)
        for model in self.stages_on_meta(config, layout):
            if layout.pipeline > 1 and not isinstance(getattr(model, "stage", None), Stage):
                todo = "Keep self.stage = Stage.of(blocks, state=state), and make the blocks of it"
                expected = "a Stage in its attribute `stage`, with pipeline ranks"
                raise BadInput("recipe", "model.module", expected=expected, found="none", todo=todo)
        if self.parts is not None:
            assert isinstance(config, OwnConfig)
            self.parts.check_layout(self, config, layout)

    def links(self, config: ModelConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
        """Return links of each parameter to itself: nobody else has names for them."""
        (stated,) = self.declarations(config)
        shapes = {name: declaration.shape for name, declaration in stated.items()}
        links = [Link(name, Piece.plain(Box.whole(shape), name)) for name, shape in shapes.items()]
        return links, shapes

    def _check_known(self, layout: Layout, split: Sequence[int] | None) -> None:
        if split is not None and not self.takes_split:
            expected, todo = "absent for a class without the keyword split", "Stage.of takes split= as well"
            raise BadInput("recipe", "layout.split", expected=expected, found=list(split), todo=todo)
        if names(self.code.entry, "state"):
            return
        for axis in _AXES:
            if (size := getattr(layout, axis)) > 1:
                expected = "1 for a class without the keyword state"
                todo = (
                    "Data ranks need nothing of it; for the others see docs/your_model.md of the repository"
                )
                raise BadInput("recipe", f"layout.{axis}", expected=expected, found=size, todo=todo)


def own_family(recipe: Recipe) -> tuple[OwnFamily, OwnConfig]:
    """Return the family and the config of the recipe's module; ``BadInput`` for none that can be made."""
    section = recipe.model
    assert section.module is not None
    code = own_code(section.module, "model.module")
    if not callable(code.entry) or (isinstance(code.entry, type) and not issubclass(code.entry, nn.Module)):
        kind = code.entry.__name__ if isinstance(code.entry, type) else type(code.entry).__name__
        _refuse_kind(kind)
    family = OwnFamily("module", code.entry.__name__, OwnConfig, cast(Any, code.entry), (), code=code)
    bare = OwnConfig(arguments=_as_json(section.arguments))
    model: Any = family.on_meta(bare)
    stage = getattr(model, "stage", None)
    blocks = len(stage.blocks) if isinstance(stage, Stage) else len(find_blocks(model))
    facts = {"num_hidden_layers": max(blocks, 1), "vocab_size": _vocabulary(model)}
    return family, bare.model_copy(update=facts)


def _as_json(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(arguments, sort_keys=True)
    except TypeError as error:
        expected = "numbers, texts, lists and tables"
        raise BadInput("recipe", "model.arguments", expected=expected, found=error) from None


def _vocabulary(model: nn.Module) -> int:
    """Return the rows of the model's vocabulary; unknown unless its tables agree on a number."""
    tables = (module for module in model.modules() if isinstance(module, VocabParallelEmbedding))
    rows = {table.num_embeddings for table in tables}
    return rows.pop() if len(rows) == 1 else UNKNOWN


def _refuse_kind(kind: str) -> NoReturn:
    raise BadInput("recipe", "model.module", expected="a subclass of torch.nn.Module", found=kind)


def needs_memory(model: nn.Module) -> bool:
    """Tell whether a module made on the meta device lacks what its constructor computes: buffers, tensors."""
    parameters = {id(parameter) for parameter in model.parameters()}
    return any(True for _ in model.buffers()) or any(
        isinstance(entry, Tensor) and id(entry) not in parameters
        for module in model.modules()
        for entry in vars(module).values()
    )
