"""List the legal layouts of a model on a given number of GPUs; a layout is legal if a recipe may have it.

A candidate has four parts: a *cut* (the tensor, context, expert and pipeline axes), a *flow* (schedule,
stages on a rank, rows of a micro-batch), a mode of activation checkpointing, and a *store* (ZeRO stage,
replicas, offload). If one part is refused, all layouts with this part are left out at once, and counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import gcd
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from ...layers import Checkpointing, routers
from ...parallel_state import BadInput, Layout
from ...pipeline import SCHEDULE_NAMES, ScheduleName, schedule_kind
from ...pipeline.schedule_kinds import check_schedule
from ...recipes.checks import (
    check_batch,
    check_memory_of_pipeline,
    check_rules,
    compile_rules,
    float8_rules,
)
from ...recipes.recipe import Recipe
from ...recipes.sections import MemorySection
from ...training.own_module import OwnFamily
from ..remembered import remembered
from .choice import Choice, Reason, Tally
from .request import Request

#: The numbers of stages on a pipeline rank, and the most rows of a micro-batch, that are tried.
VIRTUAL, MOST_ROWS = (2, 3, 4, 6, 8), 64
#: Nodes over which tensor ranks are tried, and tokens of a row that a context rank must have: with more and
#: with fewer, products are so small that no device reaches the share of its peak that a plan assumes.
MOST_NODES, LEAST_TOKENS = 2, 2048
MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)


@dataclass(frozen=True, slots=True)
class Flow:
    """State how micro-batches go through the pipeline. ``count``: number of micro-batches of a rank in a
    step.

    ``micro_batch`` is in rows. ``modes``: the modes of activation checkpointing that are legal with it.
    """

    schedule: ScheduleName
    virtual_stages: int
    micro_batch: int
    count: int
    modes: tuple[Checkpointing, ...]

    @property
    def v_shape(self) -> bool:
        return self.virtual_stages == 2 and schedule_kind(self.schedule).v_shape


class Store(NamedTuple):
    """State the ZeRO stage, and the number of replicas of the shards."""

    zero: int
    replicas: int


@dataclass(frozen=True, eq=False)
class Cut:
    """Hold the axes that cut the model, with the data ranks that remain, and the legal flows. ``offload``:
    whether the host holds weights, gradients and moments.
    """

    layout: Layout
    flows: list[Flow]
    offload: bool

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """Return every legal store: the highest ZeRO stage and the fewest replicas first."""
        return _stores(self.layout.data, self.layout.context, self.layout.expert)

    @cached_property
    def shown(self) -> tuple[object, ...]:
        """Return the axes of which one layout is shown: a ring and gathered keys are not told apart."""
        return Choice(self.layout).cut

    @property
    def layouts(self) -> int:
        """Return the number of legal layouts with this cut."""
        return sum(map(self.layouts_of, self.flows))

    def layouts_of(self, flow: Flow) -> int:
        """Return the number of those with a flow."""
        return len(flow.modes) * len(self.stores)

    def choice(self, flow: Flow, mode: Checkpointing, store: Store | None = None) -> Choice:
        """Return one layout of this cut; without ``store``, one with the first store."""
        store = store or self.stores[0]
        layout = self._layout(flow.virtual_stages, flow.v_shape, store)
        return Choice(layout, flow.schedule, flow.micro_batch, mode, self.offload)

    @remembered
    def _layout(self, virtual_stages: int, v_shape: bool, store: Store) -> Layout:
        """Return the layout with such stages, whose data ranks share as ``store`` says."""
        shards = self.layout.data // store.replicas if store.zero else 1
        return replace(
            self.layout,
            data_shard=shards,
            data_replicate=self.layout.data // shards,
            zero=store.zero,
            virtual_stages=virtual_stages,
            v_shape=v_shape,
        )

    @cached_property
    def stores_by_zero(self) -> tuple[tuple[Store, ...], ...]:
        """Return the stores of each ZeRO stage: the one with the fewest replicas, which needs least memory,
        first.
        """
        return tuple(tuple(same_zero) for _, same_zero in groupby(self.stores, key=attrgetter("zero")))


@lru_cache(maxsize=1024)
def _stores(data: int, context: int, expert: int) -> tuple[Store, ...]:
    stores = []
    for zero in range(4) if data * context > 1 else (0,):
        for replicas in divisors(data) if zero else (1,):
            if zero and replicas == data * context:
                continue  # shards of one rank: nothing is cut
            try:
                Layout.of(data=data, context=context, expert=expert, zero=zero, data_replicate=replicas)
            except BadInput:
                continue  # the experts' ranks share one copy of the weights
            stores.append(Store(zero, replicas))
    return tuple(sorted(stores, key=lambda store: (-store.zero, store.replicas)))


@lru_cache(maxsize=1024)
def divisors(number: int) -> list[int]:
    """Return the divisors of a number, from 1 up."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def candidates(request: Request, tally: Tally, *, offload: bool = False) -> Iterator[Cut]:
    """Yield every legal cut with its legal flows; count the refused layouts in ``tally``.

    ``offload``: whether the host holds weights, gradients and moments.
    """
    legal, experts = _Legal(request, tally), _experts(request)
    for tensor in divisors(request.gpus):
        for context in divisors(request.gpus // tensor):
            for pipeline in divisors(request.gpus // tensor // context):
                axes: dict[str, Any] = {"tensor": tensor, "context": context, "pipeline": pipeline}
                axes["data"] = request.gpus // tensor // context // pipeline
                # The cheapest checks first: whole subtrees end here.
                if not legal.worth_trying(tensor, context) or not legal.shape(Layout.of(**axes)):
                    continue
                if not (flows := legal.flows(pipeline, axes["data"])):
                    continue
                for ring in (False, True) if context > 1 else (False,):
                    for expert in divisors(gcd(experts, context * axes["data"])) if experts else (1,):
                        layout = legal.layout(**axes, ring=ring, expert=expert)
                        if layout is not None:
                            yield Cut(layout, flows, offload)


class _Legal:
    """Ask the checks of a recipe and of the model, and count refusals."""

    def __init__(self, request: Request, tally: Tally) -> None:
        self.recipe: Recipe = request.recipe
        self.machine, self.config, self.family = request.machine, request.config, request.base
        self.tally = tally

    def worth_trying(self, tensor: int, context: int) -> bool:
        """Tell whether a rank has work enough that its products reach what a plan assumes of them."""
        if tensor > MOST_NODES * self.machine.gpus:
            text, example = f"tensor ranks on more than {MOST_NODES} nodes", f"tensor {tensor}"
        elif context > 1 and self.recipe.data.sequence_length // context < LEAST_TOKENS:
            text = f"context ranks with fewer than {LEAST_TOKENS:,} tokens of a row"
            example = f"context {context}"
        else:
            return True
        self.tally.add(Reason("not tried", text, 1, example))
        return False

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count a layout that is refused inside this context, which then ends."""
        try:
            yield
        except BadInput as error:
            self.tally.illegal(error, 1)

    def shape(self, layout: Layout) -> bool:
        """Tell whether the model can be cut over these axes, and the batch over the data ranks."""
        rows, legal = self.recipe.data.model_copy(update={"micro_batch": 1}), False
        with self._counting():
            self.config.check_layout(layout)
            check_batch(rows, layout, "plan")
            layout.check_length(rows.sequence_length, "plan", "data.sequence_length")
            legal = True
        return legal

    def layout(self, *, tensor: int, **numbers: Any) -> Layout | None:
        """Return the layout, unless the model or the length of a row forbids it.

        Wherever sequence parallelism is legal it is on: it sends as much as without and keeps less
        (Korthikanti et al. 2022, section 4.2.2).
        """
        for sequence in (True, False) if tensor > 1 else (False,):
            with self._counting():
                layout = Layout.of(tensor=tensor, sequence=sequence, **numbers)
                layout.check_length(self.recipe.data.sequence_length, "plan", "data.sequence_length")
                self.family.check_layout(self.config, layout)
                return layout
        return None

    def flows(self, pipeline: int, data: int) -> list[Flow]:
        """Return the legal schedules with their virtual stages and micro-batches."""
        rows, flows = 1, list[Flow]()
        while rows * data <= min(self.recipe.data.global_batch, MOST_ROWS * data):
            section = self.recipe.data.model_copy(update={"micro_batch": rows})
            for name, virtual in self._schedules(pipeline):
                v_shape = pipeline > 1 and schedule_kind(name).v_shape
                with self._counting():
                    layout = Layout.of(pipeline=pipeline, data=data, virtual_stages=virtual, v_shape=v_shape)
                    self.config.check_layout(layout)
                    count = check_batch(section, layout, "plan")
                    check_schedule(name, layout, count, "plan")
                    if modes := self._modes(name, pipeline > 1):
                        flows.append(Flow(name, virtual, rows, count, modes))
            rows *= 2
        return flows

    def _schedules(self, pipeline: int) -> Iterator[tuple[ScheduleName, int]]:
        if pipeline == 1:
            yield "1f1b", 1
            return
        for name in SCHEDULE_NAMES:
            if name == "gpipe":  # 1f1b waits as long and holds fewer activations
                continue
            kind = schedule_kind(name)
            for virtual in VIRTUAL if kind.interleaved else (kind.virtual_stages,):
                if virtual <= max(2, self.config.num_hidden_layers // pipeline):
                    yield name, virtual

    @remembered
    def _modes(self, name: ScheduleName, several: bool) -> tuple[Checkpointing, ...]:
        # What is traced whole is timed as it is, each stage in one piece.
        modes = MODES[:1] if isinstance(self.family, OwnFamily) or self.family.adopted else MODES
        recipe, layout, legal = self.recipe, Layout(pipeline=1 + several), list[Checkpointing]()
        for mode in modes:
            memory: MemorySection = recipe.memory.model_copy(update={"checkpointing": mode})
            with self._counting():
                check_memory_of_pipeline(memory, layout, name, "plan")
                check_rules(float8_rules(recipe, layout, name), "plan")
                if recipe.compile is True:
                    check_rules(compile_rules(recipe, memory, layout, name), "plan")
                legal.append(mode)
        return tuple(legal)


def _experts(request: Request) -> int:
    """Return the number that an expert axis must divide; 0 without experts."""
    return gcd(*(router.num_experts for _, router in routers(request.base.on_meta(request.config))))
