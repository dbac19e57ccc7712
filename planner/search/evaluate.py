"""Compute the memory and the time of a choice, and lower bounds, from parts that many choices share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...layers import Checkpointing
from ...models import AdaptedFamily
from ...parallel_state import Layout, ParallelState, dtype_named
from ...pipeline import ScheduleName
from ...recipes.recipe import Recipe
from ...training.run_plan import loss_chunk_of
from ...training.stage_cut import cut_stages
from ..memory import MemoryPlan, memory_of_walk, reserved_bytes
from ..planned_model import PlannedModel, of_own_module, planned_model
from ..rank_parameters import RankParameters
from ..rank_walk import RankWalk
from ..remembered import remembered
from ..sampled_model import Asked
from ..stage_costs import StageCost, alike_ranks
from ..step_shape import Work, sizes_of
from ..time import StepTime, StepTimer
from ..time.data_ranks import Exchange
from ..time.stage_timer import StageTimer
from ..time.step_time import ROUNDED
from .candidates import Cut, Flow, Store
from .choice import Choice
from .request import Request


@dataclass(frozen=True)
class Answer:
    """Hold a choice with the time of its step and, for each pipeline rank, the memory of its first rank."""

    choice: Choice
    time: StepTime
    memory: tuple[MemoryPlan, ...]
    runtime: int

    @cached_property
    def allocated(self) -> int:
        """Return the bytes of tensors on the heaviest rank."""
        return max(plan.total for plan in self.memory)

    @property
    def bytes(self) -> int:
        """Return the bytes that the heaviest rank needs, including those of the runtime."""
        return self.allocated + self.runtime

    @property
    def reserved(self) -> int:
        """Return what torch's allocator reserves on the heaviest rank, with the bytes of the runtime."""
        return reserved_bytes(self.allocated) + self.runtime


class Evaluator:
    """Evaluate choices for one request, and bound the time of several at once.

    A test holds that no layout takes less than its bounds. They need no timetable of a pipeline.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.recipe = request, request.recipe
        self._sizes = sizes_of(request.recipe)

    def work(self, choice: Choice, pipeline: int = 0) -> Work:
        """Describe a step of a choice on the first rank of a pipeline rank."""
        layout, data, several = choice.layout, self.recipe.data, choice.layout.pipeline > 1
        cut = layout.tensor, layout.context, layout.sequence
        work = Work(
            self._state(layout, pipeline),
            self.request.config.hidden_size,
            data.sequence_length,
            choice.micro_batch,
            choice.micro_batches(data.global_batch),
            schedule=choice.schedule,
            checkpointing=choice.checkpointing,
            loss_chunk=self._chunk(*cut, several, choice.schedule, choice.micro_batch),
            offload=choice.offload,
            **self._sizes,
        )
        return of_own_module(work, self._model(layout.block_cut), self._split(layout))

    @remembered
    def memory(self, choice: Choice, pipeline: int) -> MemoryPlan:
        """Return the memory of the first rank of a pipeline rank."""
        return memory_of_walk(self._walk(choice, self._alike(_plain(choice.layout))[pipeline]), pipeline)

    @remembered
    def _walk(self, choice: Choice, pipeline: int) -> RankWalk:
        work = self.work(choice, pipeline)
        costs = self._costs(_plain(choice.layout), choice.micro_batch, work.loss_chunk, pipeline)
        return RankWalk(work, self._parameters(choice.layout, pipeline), costs)

    def answer(self, choice: Choice) -> Answer:
        """Evaluate a choice as a whole."""
        memory = tuple(self.memory(choice, rank) for rank in range(choice.layout.pipeline))
        return Answer(choice, self._timer(choice).time(), memory, self.request.runtime)

    def least_of_rows(self, cut: Cut, flow: Flow) -> float:
        """Return a lower bound, in seconds, for every layout with this cut and a flow of these micro-batches:
        as if no pipeline rank waited.
        """
        pipeline = cut.layout.pipeline
        seconds = self._whole_model(_plain(cut.layout, 1), pipeline > 1, flow.micro_batch, flow.count == 1)
        return seconds * flow.count / pipeline

    def least_of_flow(self, cut: Cut, flow: Flow) -> float:
        """Return a lower bound, in seconds, for every layout with this cut and flow: none computes less."""
        compiled = any(self._compiles(mode, flow.schedule, cut.layout.pipeline > 1) for mode in flow.modes)
        return self._least_of_stages(_without_store(cut.choice(flow, "none")), compiled)[0]

    def least_of_stores(self, cut: Cut, flow: Flow, mode: Checkpointing, stores: Sequence[Store]) -> float:
        """Return a lower bound, in seconds, for every one of these stores of a cut, flow and mode.

        Some pipeline rank exchanges at least its share of what all do. ZeRO 2 and 3 hide that behind all that
        it computes, the others behind one micro-batch.
        """
        of_stages, of_micro_batch = self._least_alone(cut.choice(flow, mode))
        exchanges, bounds = self._exchanges(cut), list[float]()
        for store in stores:
            gather, scatter, replicas, *_ = exchanges[store]
            if store.zero > 1:
                seconds = scatter + gather * (store.zero == 3)
                bounds.append(max(of_stages, flow.count * seconds + replicas))
            else:
                exchanged = scatter + replicas + gather * store.zero
                bounds.append(of_stages + max(0.0, exchanged - of_micro_batch))
        return min(bounds) * ROUNDED

    def least(self, choice: Choice) -> float:
        """Return a lower bound, in seconds, for one layout, including the traffic of its data ranks."""
        timer = self._timer(choice)
        # Up to ZeRO 1 layouts that differ in their data ranks compute alike.
        return timer.least(None if choice.layout.zero > 1 else self._least_alone(choice)[0])

    def _least_alone(self, choice: Choice) -> tuple[float, float]:
        """Return what ``StepTimer.least_of_stages`` does, without the traffic of the data ranks."""
        compiled = self._compiles(choice.checkpointing, choice.schedule, choice.layout.pipeline > 1)
        return self._least_of_stages(_without_store(choice), compiled)

    @remembered
    def _least_of_stages(self, choice: Choice, compiled: bool) -> tuple[float, float]:
        return self._timer_of(choice, self.work(choice), compiled).least_of_stages()

    @remembered
    def _exchanges(self, cut: Cut) -> dict[Store, Exchange]:
        """Return, for each store of a cut, the seconds in which a rank exchanges its share of the blocks."""
        exchanges, flow = dict[Store, Exchange](), cut.flows[0]
        for store in cut.stores:
            choice = cut.choice(flow, "none", store)
            ranks, pipeline = self._timer(choice).data_ranks, choice.layout.pipeline
            whole = self._parameters(replace(choice.layout, pipeline=1, virtual_stages=1, v_shape=False), 0)
            blocks = whole.stages[0][: len(whole.stages[0]) - self.request.config.mtp_blocks]
            of_blocks = [(ranks.exchange(group), number / pipeline) for group, number in blocks]
            shares = [[seconds * share for seconds in times] for times, share in of_blocks]
            none = [0.0] * len(Exchange._fields)  # of a model whose blocks are not known
            exchanges[store] = Exchange(*map(sum, zip(none, *shares, strict=True)))
        return exchanges

    @remembered
    def _whole_model(self, layout: Layout, several: bool, micro_batch: int, once: bool) -> float:
        """Return a lower bound of the seconds in which one rank computes a micro-batch through the whole
        model, with any schedule and mode of activation checkpointing.

        The seconds include the traffic of the blocks, but not the traffic of the data ranks. ``several``:
        whether there are pipeline ranks; ``once``: whether a step has one micro-batch only.
        """
        choice, count = Choice(layout, "1f1b", micro_batch), 1 if once else 2
        cut = layout.tensor, layout.context, layout.sequence
        chunks = {self._chunk(*cut, several, "1f1b", micro_batch), *((0,) if several else ())}
        compiled = self._compiles("none", "1f1b", several)
        works = [replace(self.work(choice), micro_batches=count, loss_chunk=chunk) for chunk in chunks]
        return min(self._timer_of(choice, work, compiled).least_of_stages()[0] / count for work in works)

    def _timer(self, choice: Choice) -> StepTimer:
        compiled = self._compiles(choice.checkpointing, choice.schedule, choice.layout.pipeline > 1)
        return self._timer_of(choice, self.work(choice), compiled)

    def _timer_of(self, choice: Choice, work: Work, compiled: bool) -> StepTimer:
        layout, plain = choice.layout, _plain(choice.layout)
        return StepTimer(
            self._model(layout.block_cut),
            work,
            self.request.machine,
            timer=self._stage_timer(layout.block_cut, layout.world, compiled),
            parameters=lambda rank: self._parameters(layout, rank),
            costs=lambda rank: self._costs(plain, choice.micro_batch, work.loss_chunk, rank),
            alike=self._alike(plain),
        )

    @remembered
    def _stage_timer(self, cut: tuple[int, int, int, bool, bool], world: int, compiled: bool) -> StageTimer:
        """Return the timer of stages of layouts with ``world`` ranks and this cut of a block."""
        layout = Layout.of_block_cut(cut, world // (cut[0] * cut[1]))
        return StageTimer(self.work(Choice(layout)), self.request.machine, compiled=compiled)

    @remembered
    def _state(self, layout: Layout, pipeline: int) -> ParallelState:
        return ParallelState.stand_in(layout, layout.first_rank(pipeline))

    @remembered
    def _model(self, cut: tuple[int, int, int, bool, bool]) -> PlannedModel:
        """Return what plans the model in layouts that cut its layers so; ``BadInput`` if it forbids that."""
        request, adapted = self.request, isinstance(self.request.family, AdaptedFamily)
        frozen = dtype_named(self.recipe.compute_dtype) if adapted else None
        layout = Layout.of_block_cut(cut)
        return planned_model(request.family, request.config, layout, Asked(frozen=frozen))

    @remembered
    def _costs(self, layout: Layout, micro_batch: int, loss_chunk: int, pipeline: int) -> list[StageCost]:
        """Return the costs of a rank's stages, in which schedule and checkpointing have no part."""
        work = replace(self.work(Choice(layout, "1f1b", micro_batch), pipeline), loss_chunk=loss_chunk)
        return self._model(layout.block_cut).costs(work, self._split(layout))

    @remembered
    def _alike(self, layout: Layout) -> list[int]:
        """Return, for each pipeline rank, the first one that is like it, which is so in any micro-batch."""
        return alike_ranks(layout, lambda rank: self._costs(layout, 1, 0, rank))

    @remembered
    def _parameters(self, layout: Layout, pipeline: int) -> RankParameters:
        model = self._model(layout.block_cut)
        return model.parameters(self._state(layout, pipeline), self._split(layout))

    def _split(self, layout: Layout) -> Sequence[int] | None:
        """Return the number of blocks of each stage, if there are several."""
        if layout.pipeline == 1:
            return None
        return self._counts(layout.pipeline, layout.virtual_stages, layout.v_shape)

    @remembered
    def _counts(self, pipeline: int, virtual: int, v_shape: bool) -> Sequence[int]:
        layout = Layout(pipeline=pipeline, virtual_stages=virtual, v_shape=v_shape)
        split, length = self.recipe.layout_section.split, self.recipe.data.sequence_length
        return cut_stages(self.request.family, self.request.config, layout, length, split=split).counts

    @remembered
    def _chunk(
        self, tensor: int, context: int, sequence: bool, several: bool, name: ScheduleName, micro_batch: int
    ) -> int:
        """Return the number of tokens whose logits exist at once, as a run would choose it; ``several``:
        whether there are pipeline ranks.
        """
        layout = Layout(tensor=tensor, context=context, sequence=sequence, pipeline=1 + several)
        return loss_chunk_of(self._changed(Choice(layout, name, micro_batch)), self.request.config)

    @remembered
    def _compiles(self, mode: Checkpointing, schedule: ScheduleName, several: bool) -> bool:
        """Return whether blocks are compiled; ``several``: whether there are pipeline ranks."""
        return self._changed(Choice(Layout(pipeline=1 + several), schedule, 1, mode)).compiles

    def _changed(self, choice: Choice) -> Recipe:
        """Return the recipe with a choice's keys, unchecked: for questions whose answer is in the recipe."""
        recipe, keys = self.recipe, choice.keys
        section = type(recipe.layout_section).model_validate(keys["layout"])
        parts = {name: getattr(recipe, name).model_copy(update=keys[name]) for name in ("memory", "data")}
        return recipe.model_copy(update={"layout_section": section, **parts})


@lru_cache(maxsize=2**14)
def _plain(layout: Layout, pipeline: int = 0) -> Layout:
    """Return the layout without ZeRO; with ``pipeline`` also with that many ranks, of one stage each."""
    plain = replace(layout, zero=0, data_shard=1, data_replicate=layout.data)
    if not pipeline:
        return plain
    data = layout.data * layout.pipeline // pipeline
    return replace(plain, pipeline=pipeline, data_replicate=data, virtual_stages=1, v_shape=False)


def _without_store(choice: Choice) -> Choice:
    return replace(choice, layout=_plain(choice.layout), offload=False)
