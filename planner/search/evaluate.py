"""Compute the memory and the time of a choice, from parts that are computed once for many choices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from ...layers import Checkpointing
from ...models import AdaptedFamily
from ...parallel_state import Layout, ParallelState, dtype_named
from ...pipeline import ScheduleName
from ...recipes.recipe import Recipe
from ...training.run_plan import loss_chunk_of
from ...training.stage_cut import StageCut, cut_stages
from ..device_memory import reserved_bytes
from ..memory import MemoryPlan, memory_of
from ..rank_parameters import RankParameters
from ..sampled_model import SampledModel
from ..sampled_module import Asked, Traced, planned_model
from ..stage_costs import StageCost
from ..step_shape import Work, sizes_of
from ..time import StepTime, StepTimer
from .choice import Choice
from .request import Request


@dataclass(frozen=True)
class Answer:
    """Hold a choice with the time of its step and, for each pipeline rank, the memory of its first rank."""

    choice: Choice
    time: StepTime
    memory: tuple[MemoryPlan, ...]
    cut: StageCut
    loss_chunk: int
    runtime: int

    @property
    def heaviest(self) -> int:
        """Return the pipeline rank that needs most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @cached_property
    def bytes(self) -> int:
        """Return the bytes that the heaviest rank needs, including those of the runtime."""
        return self.allocated + self.runtime

    @property
    def allocated(self) -> int:
        """Return the bytes of tensors on the heaviest rank."""
        return self.memory[self.heaviest].total

    @property
    def reserved(self) -> int:
        """Return what torch's allocator reserves on the heaviest rank, with the bytes of the runtime."""
        return reserved_bytes(self.allocated) + self.runtime


class Evaluator:
    """Evaluate choices for one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        recipe = request.recipe
        self.rows = recipe.data.global_batch
        self._length = recipe.data.sequence_length
        self._frozen = (
            dtype_named(recipe.compute_dtype) if isinstance(request.family, AdaptedFamily) else None
        )
        self.sizes = sizes_of(recipe)
        # One object holds a cache for its own lifetime, not for that of the process.
        self.cut = cache(self._cut)
        self._state = cache(_first_rank)
        self._model = cache(self._sampled)
        self._chunk = cache(self._loss_chunk)
        self._compiled = cache(self._compiles)
        self._stage_costs = cache(self._costs_of)
        self._held = cache(self._held_by)
        self._whole = cache(self._whole_model)
        self._known: dict[Any, Any] = {}
        self._parts: dict[Any, Any] = {}

    def model(self, layout: Layout) -> SampledModel | Traced:
        """Return one block of each kind, cut as the layout says; ``BadInput`` if the model forbids it."""
        return self._model(_bare(layout))

    def work(self, choice: Choice, pipeline: int = 0) -> Work:
        """Describe a step of a choice on the first rank of a pipeline rank."""
        layout = choice.layout
        work = Work(
            self._state(layout, pipeline),
            self.request.config.hidden_size,
            self._length,
            choice.micro_batch,
            choice.micro_batches(self.rows),
            schedule=choice.schedule,
            checkpointing=choice.checkpointing,
            loss_chunk=self.loss_chunk(choice),
            offload=choice.offload,
            **self.sizes,
        )
        return self.model(layout).informed(work, self._split(layout))

    def memory(self, choice: Choice, pipeline: int) -> MemoryPlan:
        """Return the memory of the first rank of a pipeline rank."""
        work = self.work(choice, pipeline)
        layout = _without_data(choice.layout)
        costs = self._stage_costs(layout, choice.micro_batch, work.loss_chunk, pipeline)
        return memory_of(work, self._held(choice.layout, pipeline), costs, known=self._parts)

    def memory_of_ranks(self, choice: Choice) -> list[MemoryPlan]:
        """Return the memory of the first rank of each pipeline rank."""
        return [self.memory(choice, rank) for rank in range(choice.layout.pipeline)]

    def answer(self, choice: Choice, memory: Sequence[MemoryPlan] | None = None) -> Answer:
        """Evaluate a choice as a whole. ``memory``: that of its pipeline ranks, if it is known."""
        layout = choice.layout
        memory = tuple(self.memory_of_ranks(choice) if memory is None else memory)
        cut = self.cut(layout.pipeline, layout.virtual_stages, layout.v_shape)
        return Answer(
            choice, self._timer(choice).time(), memory, cut, self.loss_chunk(choice), self.request.runtime
        )

    def least(self, choice: Choice) -> float:
        """Return a lower bound of the seconds of a choice, without its timetable."""
        return self._timer(choice).least()

    def least_of_stages(self, choice: Choice, compiled: bool) -> float:
        """Return a lower bound of the seconds of a choice with any ZeRO stage and any replicas.

        ``compiled``: whether blocks are compiled.
        """
        return self._without_store(choice, compiled).least_of_stages()

    def _without_store(self, choice: Choice, compiled: bool) -> StepTimer:
        """Return the timer of a choice as if its data ranks shared nothing."""
        bare = replace(choice, layout=_without_data(choice.layout))
        work = replace(self.work(bare), micro_batches=choice.micro_batches(self.rows))
        return self._timer_of(bare, work, compiled)

    def whole_model(self, layout: Layout, micro_batch: int, *, once: bool) -> float:
        """Return a lower bound of the seconds in which one rank computes a micro-batch through the whole
        model, with any schedule and mode of activation checkpointing.

        The seconds include the traffic of the blocks, but not the traffic of the data ranks. ``once``:
        whether a step has one micro-batch only.
        """
        return self._whole(_bare(layout), layout.pipeline > 1, micro_batch, once)

    def loss_chunk(self, choice: Choice) -> int:
        """Return the number of tokens whose logits exist at once, as a run would choose it."""
        return self._chunk_of(choice, choice.layout.pipeline > 1)

    def _chunk_of(self, choice: Choice, several: bool) -> int:
        layout = choice.layout
        return self._chunk(
            (layout.tensor, layout.context, layout.sequence, several), choice.schedule, choice.micro_batch
        )

    def compiles(self, mode: Checkpointing, schedule: ScheduleName, pipeline: int) -> bool:
        """Return whether blocks are compiled."""
        return self._compiled(mode, schedule, pipeline > 1)

    def _timer(self, choice: Choice) -> StepTimer:
        layout = choice.layout
        compiled = self.compiles(choice.checkpointing, choice.schedule, layout.pipeline)
        return self._timer_of(choice, self.work(choice), compiled)

    def _timer_of(self, choice: Choice, work: Work, compiled: bool) -> StepTimer:
        layout, bare = choice.layout, _without_data(choice.layout)
        return StepTimer(
            self.model(layout),
            work,
            self.request.machine,
            split=self._split(layout),
            compiled=compiled,
            dtype="float8" if self.request.recipe.compute == "float8" else "",
            parameters=lambda rank: self._held(layout, rank),
            costs=lambda rank: self._stage_costs(bare, choice.micro_batch, work.loss_chunk, rank),
            known=self._known,
        )

    def _whole_model(self, bare: Layout, several: bool, micro_batch: int, once: bool) -> float:
        choice = Choice(bare, "1f1b", micro_batch)
        chunks = {self._chunk_of(choice, several), *((0,) if several else ())}
        compiled = self._compiled("none", "1f1b", several)
        works = [replace(self.work(choice), micro_batches=2 - once, loss_chunk=chunk) for chunk in chunks]
        return min(self._timer_of(choice, work, compiled).least_of_stages() / (2 - once) for work in works)

    def _sampled(self, bare: Layout) -> SampledModel | Traced:
        request, recipe = self.request, self.request.recipe
        asked = Asked(float8=recipe.scaling, frozen=self._frozen)
        return planned_model(request.family, request.config, bare, asked)

    def _cut(self, pipeline: int, virtual: int, v_shape: bool) -> StageCut:
        layout = Layout.of(pipeline=pipeline, virtual_stages=virtual, v_shape=v_shape)
        return cut_stages(
            self.request.family, self.request.config, layout, self._length, split=self.request.recipe.split
        )

    def _split(self, layout: Layout) -> Sequence[int] | None:
        """Return the number of blocks of each stage, if there are several."""
        cut = self.cut(layout.pipeline, layout.virtual_stages, layout.v_shape)
        return cut.counts if layout.pipeline > 1 else None

    def _changed(self, choice: Choice) -> Recipe:
        """Return the recipe with a choice's keys, unchecked: for questions whose answer is in the recipe."""
        recipe, keys = self.request.recipe, choice.keys
        section = type(recipe.layout_section).model_validate(keys["layout"])
        return recipe.model_copy(
            update={
                "layout_section": section,
                "memory": recipe.memory.model_copy(update=keys["memory"]),
                "data": recipe.data.model_copy(update=keys["data"]),
            }
        )

    def _loss_chunk(
        self, place: tuple[int, int, bool, bool], schedule: ScheduleName, micro_batch: int
    ) -> int:
        tensor, context, sequence, several = place
        layout = Layout(tensor=tensor, context=context, sequence=sequence, pipeline=2 if several else 1)
        return loss_chunk_of(self._changed(Choice(layout, schedule, micro_batch)), self.request.config)

    def _compiles(self, mode: Checkpointing, schedule: ScheduleName, pipeline: bool) -> bool:
        layout = Layout(pipeline=2 if pipeline else 1)
        return self._changed(Choice(layout, schedule, 1, mode)).compiles

    def _costs_of(self, layout: Layout, micro_batch: int, loss_chunk: int, pipeline: int) -> list[StageCost]:
        """Return the costs of a rank's stages, in which schedule and checkpointing have no part."""
        work = replace(self.work(Choice(layout, "1f1b", micro_batch), pipeline), loss_chunk=loss_chunk)
        return self.model(layout).costs(work, self._split(layout))

    def _held_by(self, layout: Layout, pipeline: int) -> RankParameters:
        state = self._state(layout, pipeline)
        return self.model(layout).parameters(state, self._split(layout))


def _first_rank(layout: Layout, pipeline: int) -> ParallelState:
    """Return a stand-in for the first rank of a pipeline rank."""
    return ParallelState.stand_in(layout, layout.first_rank(pipeline))


def _without_data(layout: Layout) -> Layout:
    """Return the layout with as few data ranks as its experts allow, which share nothing."""
    return _made(*layout.block_cut, layout.pipeline, layout.virtual_stages, layout.v_shape)


def _bare(layout: Layout) -> Layout:
    """Return the layout with one pipeline rank, and with as few data ranks as its experts allow."""
    return _made(*layout.block_cut, 1, 1, False)


@lru_cache(maxsize=8192)
def _made(
    tensor: int, context: int, expert: int, sequence: bool, ring: bool,
    pipeline: int, virtual: int, v_shape: bool,
) -> Layout:  # fmt: skip
    return Layout(
        tensor=tensor, context=context, data_replicate=expert, pipeline=pipeline, expert=expert,
        sequence=sequence, ring=ring, virtual_stages=virtual, v_shape=v_shape,
    )  # fmt: skip
