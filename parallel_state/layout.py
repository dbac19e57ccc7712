"""Define the layout: the number of ranks along each axis, and the place of each rank. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import lcm
from typing import Any, NoReturn, Self, cast

from ..system import counted, literal
from ..system.errors import BadInput, nearest, nearest_divisors, nearest_multiples

#: Mesh axes from the slowest to the fastest (Megatron's order: neighbours in rank are neighbours in tensor).
AXES = ("pipeline", "data_replicate", "data_shard", "context", "tensor")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """State the position of a rank on each axis."""

    pipeline: int = 0
    data_replicate: int = 0
    data_shard: int = 0
    context: int = 0
    tensor: int = 0


def refuse_layout(key: str, expected: str, actual: object, todo: str = "") -> NoReturn:
    """Raise ``BadInput`` for a number of a layout."""
    raise BadInput("layout", key, expected=expected, found=actual, todo=todo)


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold the numbers that say how one model is cut over many ranks.

    ``world = tensor * context * data_shard * data_replicate * pipeline``. ``expert`` divides ``context *
    data_shard`` (``context`` times all data ranks at ``zero=0``) and is a second view of the same ranks:
    neighbours in it hold different experts. ``zero``: the ZeRO stage of the data axes; 0 keeps every rank
    whole (all data ranks are in ``data_replicate``), 1 to 3 shard over ``data_shard`` and ``context``.
    ``sequence`` turns on Megatron's sequence parallelism along the tensor axis. ``ring`` passes keys and
    values around the context ranks, one piece at a time, instead of gathering them.

    A pipeline rank holds ``virtual_stages`` stages of the model: every ``pipeline``-th one, or with
    ``v_shape`` two, one on the way down and one on the way up, so that the first rank holds both ends.
    """

    tensor: int = 1
    context: int = 1
    data_shard: int = 1
    data_replicate: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int = 0
    sequence: bool = False
    ring: bool = False
    virtual_stages: int = 1
    v_shape: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            number, switch = getattr(self, name), isinstance(least, bool)
            if not isinstance(number, int) or isinstance(number, bool) != switch or number < least:
                expected = "true or false" if switch else f"a whole number from {least} up"
                refuse_layout(name, expected, literal(number))
        if self.zero > 3:
            refuse_layout("zero", "0, 1, 2 or 3", self.zero)
        if self.zero == 0 and self.data_shard > 1:
            todo = "Set zero, or move the data ranks to data_replicate"
            refuse_layout("zero", f"a stage from 1 to 3 with data_shard={self.data_shard}", 0, todo)
        if self.expert_pool % self.expert:
            axes = "context * data" + " / data_replicate" * self.copies_shards
            todo = nearest_divisors("expert", self.expert_pool, self.expert)
            refuse_layout("expert", f"a divisor of {axes} = {self.expert_pool}", self.expert, todo)
        stages = self.virtual_stages
        if stages > 1 and self.pipeline == 1:
            todo = nearest("virtual_stages", [1], stages)
            refuse_layout("virtual_stages", "1 with pipeline=1", stages, todo)
        if self.v_shape and stages != 2:
            expected = "2, one on the way down and one on the way up"
            refuse_layout("virtual_stages", expected, stages, nearest("virtual_stages", [2], stages))

    @classmethod
    def of(cls, *, data: int = 1, zero: int = 0, data_replicate: int = 1, **others: Any) -> Self:
        """Return a layout from one number of data ranks: replicas at ``zero=0``, shards from ``zero=1`` on.

        ``data_replicate`` (with ``zero >= 1``): number of replicas of the shards (HSDP). ``others``: the
        other numbers of a layout, such as ``tensor``.
        """
        if zero == 0:
            shard, replicate = 1, data
            if data_replicate not in (1, data):
                todo = f"{nearest('data_replicate', [data], data_replicate)}, or leave it out"
                refuse_layout("data_replicate", f"{data}, the data ranks", data_replicate, todo)
        else:
            if data_replicate < 1 or data % data_replicate:
                todo = nearest_divisors("data_replicate", data, data_replicate)
                refuse_layout("data_replicate", f"a divisor of {data}", data_replicate, todo)
            shard, replicate = data // data_replicate, data_replicate
        return cls(data_shard=shard, data_replicate=replicate, zero=zero, **others)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tensor * self.context * self.data_shard * self.data_replicate * self.pipeline

    @property
    def data(self) -> int:
        """Return the number of data ranks, which see different samples."""
        return self.data_shard * self.data_replicate

    @property
    def block_cut(self) -> tuple[int, int, int, bool, bool]:
        """Return all that decides what a rank has of a block: tensor, context, expert, sequence, ring."""
        return self.tensor, self.context, self.expert, self.sequence, self.ring

    @classmethod
    def of_block_cut(cls, cut: tuple[int, int, int, bool, bool], data: int = 0) -> Self:
        """Return a layout that cuts a block so, over ``data`` ranks; by default the fewest."""
        tensor, context, expert, sequence, ring = cut
        return cls(tensor, context, 1, data or expert, expert=expert, sequence=sequence, ring=ring)

    @property
    def stages(self) -> int:
        """Return the number of stages that the model's blocks are cut into."""
        return self.pipeline * self.virtual_stages

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """Return the numbers of the stages that a pipeline rank holds, in the model's order."""
        if self.v_shape:
            return (pipeline, 2 * self.pipeline - 1 - pipeline)
        return tuple(range(pipeline, self.stages, self.pipeline))

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        assert 0 <= stage < self.stages, (stage, self.stages)
        if self.v_shape:
            return min(stage, 2 * self.pipeline - 1 - stage)
        return stage % self.pipeline

    @property
    def expert_pool(self) -> int:
        """Return the number of ranks that ``expert`` must divide: those that share one copy of the weights.

        Without ZeRO these are all data ranks.
        """
        return self.context * (self.data_shard if self.zero else self.data)

    def data_sizes(self, experts: bool = False) -> tuple[int, int, int]:
        """Return (replicas, ZeRO shards, expert shards) of a weight over the data and context ranks.

        Expert shards are never whole on one rank; there is 1 except in the second view (``experts``).
        """
        expert = self.expert if experts else 1
        rest = self.expert_pool // expert
        return (self.data_replicate, rest, expert) if self.zero else (rest, 1, expert)

    @property
    def holds_alone(self) -> bool:
        """Tell whether no other rank of the data axes holds, or shares, a rank's parameters."""
        return self.data * self.context == 1

    @property
    def copies_shards(self) -> bool:
        """Tell whether several ranks hold the same shard of ZeRO's (HSDP)."""
        return self.zero > 0 and self.data_replicate > 1

    def data_place(self, at: Coordinates, experts: bool = False) -> tuple[int, int, int]:
        """Return a rank's position in each of ``data_sizes``."""
        _, shards, expert = self.data_sizes(experts)
        index = (at.data_replicate * self.data_shard + at.data_shard) * self.context + at.context
        rest, part = divmod(index, expert)
        return *divmod(rest, shards), part

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of ranks along each of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    def check_world(self, world: int) -> None:
        """Refuse a launch whose number of ranks is not the product of the axes."""
        if world != self.world:
            axes = {axis: getattr(self, axis) for axis in ("tensor", "context", "pipeline", "data")}
            product = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
            data, rest = divmod(world * self.data, self.world)
            ranks = counted(self.world, "rank")
            change = "Change an axis" if rest else f"Say layout.data={data}"
            expected = ranks + (f" = {product}" if product else ", the default")
            todo = f"{change}, or start {ranks} (torchrun --nproc-per-node {self.world})"
            raise BadInput("layout", expected=expected, found=f"{world:,} started", todo=todo)

    def check_blocks(self, blocks: int) -> None:
        """Refuse more stages than there are blocks."""
        if self.stages > blocks:
            virtual = self.virtual_stages
            most = max(blocks // virtual, 1)
            several = f"{virtual} stages a rank, " * (virtual > 1)
            todo = nearest("pipeline", [most], self.pipeline)
            refuse_layout("pipeline", f"at most {most}, {several}one block a stage", self.pipeline, todo)

    def check_length(self, length: int, where: str, key: str) -> None:
        """Refuse a sequence length that cannot be cut into the layout's equal pieces."""
        unit = 2 * self.context if self.context > 1 else 1
        unit = lcm(unit, self.context * self.tensor) if self.sequence else unit
        if length % unit == 0:
            return
        reasons = [f"2 x context={self.context}"] if self.context > 1 else []
        reasons += [f"tensor={self.tensor} under sequence parallelism"] if self.sequence else []
        expected, todo = f"a multiple of {' and '.join(reasons)}", nearest_multiples(key, unit, length)
        raise BadInput(where, key, expected=expected, found=length, todo=todo)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``."""
        if not 0 <= rank < self.world:
            refuse_layout("rank", f"0 to {self.world - 1}", rank)
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**place)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        rank = 0
        for axis in AXES:
            size, index = getattr(self, axis), getattr(at, axis)
            assert 0 <= index < size, (axis, index, size)
            rank = rank * size + index
        return rank

    def first_rank(self, pipeline: int) -> int:
        """Return the first of the ranks that are ``pipeline`` on the pipeline axis, the slowest one."""
        return pipeline * (self.world // self.pipeline)

    def places(self) -> Iterator[Coordinates]:
        """Yield the coordinates of every rank, in rank order."""
        return (self.coordinates(rank) for rank in range(self.world))

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["data_shard"] = self.data  # a recipe's keys: data, and data_replicate with a ZeRO stage
        if self.zero == 0:
            values["data_replicate"] = 1
        words = [
            f"{'data' if field.name == 'data_shard' else field.name} {str(values[field.name]).lower()}"
            for field in fields(self)
            if values[field.name] != field.default
        ]
        return ", ".join(words) or "one rank"


#: The least of each number, which is that of one rank, the default.
_LEAST = {field.name: cast(int, field.default) for field in fields(Layout)}
