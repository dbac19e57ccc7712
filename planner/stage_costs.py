"""Add up the costs that a rank's modules state, for each of its pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from ..layers import (
    Checkpointing,
    Cost,
    Stage,
    Tokens,
    UnknownCost,
    checkpointed,
    chunked_cross_entropy_cost,
    cost_of,
    cross_entropy_cost,
    name_module,
    with_weights,
)
from ..models import CausalLM
from ..parallel_state import BadInput
from .step_shape import Work


@dataclass(frozen=True, slots=True)
class Alike:
    """State the cost of blocks that are alike, and their ``numbers`` in order.

    ``forgets``: whether checkpointing drops what they keep; ``reached``: whether a backward comes to them.
    """

    numbers: tuple[int, ...]
    cost: Cost
    forgets: bool
    reached: bool

    @property
    def number(self) -> int:
        """Return the number of the first one."""
        return self.numbers[0]

    @property
    def count(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class StageCost:
    """Hold the costs of one stage for one micro-batch.

    ``first``: whether it is the model's first stage. ``blocks`` may be recomputed in backward, and have their
    global numbers; ``beside`` is everything else. ``reached``: the blocks that a backward comes to; it ends
    at the first trained parameter. Stages that are alike may share one object, with the numbers of one of
    them.
    """

    first: bool
    blocks: Mapping[int, Cost]
    beside: Cost
    reached: frozenset[int]
    #: On the last stage; and of ``beside`` what the final norm and the output layer keep.
    loss: Cost | None = None
    exit: float = 0.0
    #: Whether the gradient of the logits is written over them.
    overwrites: bool = False
    #: Of ``beside`` the blocks of multi-token prediction, by number: what is in them may be recomputed, too.
    further: Mapping[int, Cost] = field(default_factory=dict)
    _alike: dict[tuple[Checkpointing, int], list[Alike]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def before_trained(self) -> tuple[int, ...]:
        """Return the numbers of the blocks that no backward comes to, in order."""
        return tuple(number for number in self.blocks if number not in self.reached)

    @property
    def has_backward(self) -> bool:
        """Tell whether a backward comes to the stage: to a block, or to the end of the model."""
        return bool(self.reached) or self.loss is not None or not self.blocks

    def alike(self, mode: Checkpointing, every: int) -> list[Alike]:
        """Return one block of each kind; blocks that share a cost are alike, if checkpointing treats them
        alike.
        """
        if (mode, every) not in self._alike:
            kinds: dict[tuple[int, bool, bool], list[int]] = {}
            for number, cost in self.blocks.items():
                key = id(cost), checkpointed(number, mode, every), number in self.reached
                kinds.setdefault(key, []).append(number)
            self._alike[mode, every] = [
                Alike(tuple(numbers), self.blocks[numbers[0]], forgets, reached)
                for (_, forgets, reached), numbers in kinds.items()
            ]
        return self._alike[mode, every]


def stage_costs(work: Work, model: nn.Module, loss: Cost | None = None) -> list[StageCost]:
    """Ask the modules of a rank's model, which may be on the meta device, stage by stage.

    ``loss``: the cost of a loss that is not a zoo model's. Raises ``BadInput`` for a module that does not say
    what it costs, naming it.
    """
    try:
        if isinstance(model, CausalLM):
            return model_stage_costs(work, model)
        return [_of_module(work, model, loss)]
    except UnknownCost as error:
        raise name_module(error, model) from None


def model_stage_costs(
    work: Work, model: CausalLM, known: dict[object, Cost] | None = None
) -> list[StageCost]:
    """Return the costs of each stage that a rank holds of a zoo model.

    ``known``: answers of the same modules to earlier questions; new ones are added.
    """
    known = {} if known is None else known
    layers = {number: model.layers[str(number)] for number in model.stage.blocks}
    return [stage_cost(work, part, layers, lambda: model, known) for part in model.stage.parts]


def model_cost(model: nn.Module, tokens: Tokens) -> Cost:
    """Return the cost of a whole model, without its loss."""
    try:
        if not isinstance(model, CausalLM):
            return cost_of(model, tokens)
        blocks = (cost_of(block, tokens) for block in model.layers.values())
        return sum(blocks, model.cost_beside_blocks(tokens, model.stage))
    except UnknownCost as error:
        raise name_module(error, model) from None


def stage_cost(
    work: Work,
    stage: Stage,
    layers: Mapping[int, nn.Module],
    model: Callable[[], CausalLM],
    known: dict[object, Cost],
) -> StageCost:
    """Return the costs of one stage of a rank that holds ``layers``, its blocks by number; ``model``: the
    rank's model, which is asked for what is not ``known`` yet.
    """

    def ask(key: object, cost: Callable[[], Cost]) -> Cost:
        if key not in known:
            known[key] = cost()
        return known[key]

    tokens, kinds = work.tokens, dict[tuple[int, bool], Cost]()
    blocks, reached = dict[int, Cost](), set[int]()
    if stage.first:  # every later stage sends gradients back, trained or not: torch's stages do
        tokens = replace(tokens, reached=False).after(*model().entry)
    for number in stage.blocks:
        block = layers[number]
        key = id(block), tokens.reached
        if key not in kinds:  # blocks may be one object, and hashes take time
            kinds[key] = ask((id(block), tokens), partial(cost_of, block, tokens))
        blocks[number] = kinds[key]
        tokens = tokens.after(block)
        if tokens.reached:
            reached.add(number)
    here = frozenset(map(id, layers.values()))
    ends = (stage.first, stage.last)
    chunk, sums, loss = work.loss_chunk, work.loss_sums, None
    beside = ask(
        (here, ends, tokens, bool(chunk)),
        partial(_beside, model, tokens, stage, bool(chunk)),
    )
    exit, further = 0.0, dict[int, Cost]()
    if stage.last:
        for sign, last in ((1, True), (-1, False)):  # without what stages between the ends keep, too
            part = Stage((), first=False, last=last)
            behind = partial(_beside, model, tokens, part, bool(chunk))
            exit += sign * ask((here, (False, last), tokens, bool(chunk)), behind).kept
        loss = ask(("loss", tokens, chunk, sums), lambda: _loss(work, model()))
        for name, (prediction, given) in zip(model().mtp, model().predictions(tokens), strict=True):
            block, joined = prediction.block, prediction.joined(given)
            cost = ask((id(block), joined), partial(cost_of, block, joined))
            further[int(name)] = with_weights(cost, prediction, joined)  # FSDP gathers all of it at once
    return StageCost(stage.first, blocks, beside, frozenset(reached), loss, exit, stage.last, further)


def _beside(model: Callable[[], CausalLM], tokens: Tokens, stage: Stage, head_in_loss: bool) -> Cost:
    return model().cost_beside_blocks(tokens, stage, head_in_loss=head_in_loss)


def _loss(work: Work, model: CausalLM) -> Cost:
    """Return the cost of the loss, with that of blocks of multi-token prediction."""
    tokens = replace(work.tokens, hidden=model.config.embedding_width)
    vocabulary, chunk, count = model.config.vocab_size, work.loss_chunk, 1 + len(model.mtp)
    cap = model.logit_cap
    if not chunk:  # one loss over the logits of all
        tokens = tokens.times(count)
        return cross_entropy_cost(tokens, vocabulary, logit_cap=cap, overwrite=True, state=model.state)
    weight = model.embed.weight if model.config.tie_word_embeddings else model.head.weight
    one = chunked_cross_entropy_cost(
        tokens, vocabulary, chunk, sums=work.loss_sums, trained=weight.requires_grad, logit_cap=cap,
        state=model.state,
    )  # fmt: skip
    return sum([one] * count, Cost())


def _of_module(work: Work, model: nn.Module, loss: Cost | None) -> StageCost:
    """Return the cost of the stage of a module that is not the zoo's; it is counted as a whole."""
    layout = work.layout
    if layout.virtual_stages > 1:
        expected = "1 for a module of your own, whose stages cannot be told apart"
        raise BadInput("plan", "virtual_stages", expected=expected, found=layout.virtual_stages)
    (number,) = layout.stages_of(work.at.pipeline)
    last = number == layout.stages - 1
    if last and loss is None:
        raise BadInput(
            "plan", "loss", expected="a Cost: the bytes that your loss keeps and sends", found="none",
            todo="Our loss's Cost is cross_entropy_cost(work.tokens, vocabulary, state=work.state)",
        )  # fmt: skip
    # In which order a module uses its parameters is not known: the backward may come to all.
    given = replace(work.tokens, reached=number > 0 or any(one.requires_grad for one in model.parameters()))
    return StageCost(number == 0, {}, cost_of(model, given), frozenset(), loss if last else None)
