"""Define the layout seen from one rank: its coordinates, its device mesh, its process groups."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..system.errors import BadInput
from .layout import AXES, Coordinates, Layout
from .process_groups import (
    FILES_TIMEOUT,
    TIMEOUT,
    StandInGroup,
    agree,
    check_backends,
    identity,
    new_group,
    own_device,
    start_process_group,
)

# The mesh has no axis of its own for context: FSDP shards over data_shard and context as one, and where
# nothing is sharded the context ranks are replicas.
_MESH_AXES = ("pipeline", "data_replicate", "fsdp", "tensor")

# The same ranks, seen for experts.
_EXPERT_AXES = ("pipeline", "expert_replicate", "expert_shard", "expert", "tensor")


@dataclass(frozen=True, slots=True)
class Axis:
    """Describe an axis of a layout as a rank sees it: how many ranks lie along it, which of them it is."""

    size: int
    index: int
    _group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks along the axis, in order."""
        assert self._group is not None, "a stand-in has no process groups, and one rank no others"
        return self._group


class ParallelState:
    """Tell a parallel layer about the ranks around it; layers take it as their last, keyword-only argument.

    ``ParallelState.start(layout)`` joins the running process group. ``ParallelState.stand_in(layout, rank)``
    stands for any rank of any world without processes, for planning and for building on the meta device.
    ``ParallelState.alone()`` is one device, and the meaning of ``state=None``.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        device: torch.device | None = None,
        mesh: DeviceMesh | None = None,
        experts: DeviceMesh | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        files: dist.ProcessGroup | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        #: The state of the model around, where a part of it computes as in another layout of the same ranks.
        self.around: ParallelState | None = None
        self.at: Coordinates = layout.coordinates(rank)
        self.device = device or torch.device("cpu")
        self.mesh = mesh
        self._experts = experts
        #: The group of all ranks on the CPU, for checkpoints: a thread may use it beside computing.
        self.file_group = files
        groups = groups or {}
        # Once: cutting a mesh costs milliseconds. None has one tensor rank alone.
        both = (None if layout.tensor == 1 or whole is None else whole["tensor"] for whole in (mesh, experts))
        #: The meshes of tensor-parallel DTensor parameters, and of those that are also cut over ``expert``;
        #: ``None`` for one tensor rank or a stand-in.
        self.tensor_mesh, self.expert_tensor_mesh = both
        at = self.at
        self.tensor = Axis(layout.tensor, at.tensor, groups.get("tensor"))
        #: The ranks that have the other pieces of the same sequences.
        self.context = Axis(layout.context, at.context, groups.get("context"))
        #: The ranks that share out the experts and exchange tokens: a second view of data and context ranks.
        expert = layout.data_place(at, experts=True)[2]
        self.expert = Axis(layout.expert, expert, groups.get("expert"))
        self.pipeline = Axis(layout.pipeline, at.pipeline, groups.get("pipeline"))
        #: This rank and its counterpart at the pipeline's other end (tied embeddings); alone between them.
        last = layout.pipeline - 1
        ends = 2 if last and at.pipeline in (0, last) else 1
        self.ends = Axis(ends, int(ends == 2 and at.pipeline == last), groups.get("ends"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the state itself: a copy of a model, as of its averaged weights, lies on the same ranks."""
        return self

    @classmethod
    def start(
        cls,
        layout: Layout,
        *,
        device: str | torch.device = "cpu",
        timeout: timedelta = TIMEOUT,
        files_timeout: timedelta = FILES_TIMEOUT,
    ) -> Self:
        """Return this rank's state in the process group, whose world size must be that of the layout.

        Under torchrun the process group is started here, unless it runs already; it must then have a backend
        for the host and for the device. ``device``: what this rank computes on, which becomes the process's
        current one; "cuda" is the GPU of the rank's number on its host (LOCAL_RANK). ``timeout`` bounds every
        wait for a peer, ``files_timeout`` the waits in ``file_group``. Ranks whose torch seeds differ take
        rank 0's seed, because they draw parts of one tensor from it. Raises ``BadInput`` for another number
        of ranks, a missing device, and two ranks on one GPU. Collective: all ranks give the same layout.
        """
        device = own_device(device)
        if not dist.is_initialized():
            start_process_group(device, timeout)
        layout.check_world(dist.get_world_size())
        check_backends(device)
        rank = dist.get_rank()
        agree(identity(device))
        copies, shards, _ = layout.data_sizes()
        sizes = (layout.pipeline, copies, shards, layout.tensor)
        ranks = torch.arange(layout.world).view(sizes)
        # Groups of our own, not those of torch's mesh: these bear our timeout, and of a mesh of one axis
        # torch takes the world's group, in which sends between neighbours would count among all ranks'
        # collectives. A group has sockets and threads, so axes of one rank share one.
        alone = new_group([rank], timeout)

        def along(whole: torch.Tensor, axis: int) -> dist.ProcessGroup:
            return alone if whole.shape[axis] == 1 else new_group(_line(whole, rank, axis), timeout)

        of_mesh = [along(ranks, axis) for axis in range(len(sizes))]
        mesh = DeviceMesh.from_group(of_mesh, device.type, mesh=ranks, mesh_dim_names=_MESH_AXES)
        groups, experts = {"pipeline": of_mesh[0], "tensor": of_mesh[-1]}, None
        if layout.expert > 1:  # the second view shares the first and the last group, pipeline and tensor
            expert_ranks = ranks.view(layout.pipeline, *layout.data_sizes(experts=True), layout.tensor)
            inner = [along(expert_ranks, axis) for axis in (1, 2, 3)]
            experts = DeviceMesh.from_group(
                [of_mesh[0], *inner, of_mesh[-1]], device.type, mesh=expert_ranks, mesh_dim_names=_EXPERT_AXES
            )
            groups["expert"] = inner[-1]
        if layout.pipeline > 1:
            stages = _line(ranks, rank, 0)
            ends = [stages[0], stages[-1]] if rank in (stages[0], stages[-1]) else [rank]
            groups["ends"] = new_group(ends, timeout)
        if layout.context > 1:
            groups["context"] = along(ranks.view(layout.sizes), AXES.index("context"))
        return cls(
            layout,
            rank,
            device=device,
            mesh=mesh,
            experts=experts,
            groups=groups,
            files=new_group([*range(layout.world)], max(timeout, files_timeout), backend="gloo"),
        )

    @classmethod
    def stand_in(cls, layout: Layout, rank: int = 0) -> Self:
        """Return the state of any rank of any layout without processes; it has coordinates, and groups with
        which only tensors without numbers can be sent (``StandInGroup``).
        """
        bare = cls(layout, rank)
        axes = {"tensor": bare.tensor, "context": bare.context, "expert": bare.expert}
        groups = {name: StandInGroup(name, axis.size, axis.index) for name, axis in axes.items()}
        return cls(layout, rank, groups=cast(dict[str, dist.ProcessGroup], groups))

    @staticmethod
    @cache
    def alone() -> "ParallelState":
        """Return the state of one device, on which every collective is the identity."""
        return ParallelState(Layout(), 0)

    @property
    def counts_here(self) -> bool:
        """Tell whether this rank counts what its whole tensor group holds alike: the first one does."""
        return self.at.tensor == 0

    @property
    def sequence(self) -> bool:
        """Tell whether activations between the blocks are split along the sequence over the tensor axis."""
        return self.layout.sequence and self.layout.tensor > 1

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that hold the same weights and the other pieces of the batch, in
        order. It is made at its first use, which is collective over all ranks.
        """
        ranks = [
            self.layout.rank(replace(self.at, data_replicate=copy, data_shard=shard))
            for copy in range(self.layout.data_replicate)
            for shard in range(self.layout.data_shard)
        ]
        return new_group(ranks, TIMEOUT)

    @cached_property
    def data_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that share this rank's part of the model and see different tokens.

        For torch's ``fully_shard`` in a loop of one's own, or DDP without tensor ranks. With HSDP it has two
        axes, replicas and shards, which DDP does not take.
        """
        assert self.mesh is not None, "a stand-in has no process groups"
        return fsdp_mesh(self) if self.layout.zero else self.mesh["data_replicate"]

    def replica_group(self, *, experts: bool = False) -> dist.ProcessGroup | None:
        """Return the group of ranks that hold the same whole weights, if there are some; with ZeRO none does.
        ``experts``: for parameters that are cut over ``expert``.
        """
        if self.layout.zero or self.layout.data_sizes(experts)[0] == 1:
            return None
        mesh = self._experts if experts else self.mesh
        assert mesh is not None, "a stand-in has no process groups, and expert=1 no such"
        return mesh.get_group("expert_replicate" if experts else "data_replicate")

    @property
    def data_index(self) -> int:
        """Return which piece of the global batch this rank reads, of ``layout.data``."""
        return self.at.data_replicate * self.layout.data_shard + self.at.data_shard

    def __repr__(self) -> str:
        return f"ParallelState({self.layout}; rank {self.rank} of {self.layout.world})"


def alone_or(state: object) -> ParallelState:
    """Return this state, or one device for ``None``; ``BadInput`` for anything else, as a layout."""
    if state is None:
        return ParallelState.alone()
    if not isinstance(state, ParallelState):
        raise BadInput(
            "layer", "state", expected="a ParallelState or None", found=type(state).__name__,
            todo="ParallelState.start(layout) makes one on each rank",
        )  # fmt: skip
    return state


def state_of(model: object, state: ParallelState | None = None) -> ParallelState:
    """Return ``state``, else the one that the model keeps as ``model.state``, else one device."""
    own = getattr(model, "state", None)
    return alone_or(own if state is None and isinstance(own, ParallelState) else state)


def fsdp_mesh(state: ParallelState, *, experts: bool = False) -> DeviceMesh:
    """Return the mesh over which ``shard_over_data`` lets FSDP cut weights (last axis) and, with HSDP,
    replicate shards (first axis). At ``zero=0`` it has one rank: ``ReplicaSums`` sums the gradients.

    ``experts``: for parameters that are cut over ``expert``.
    """
    mesh = state._experts if experts else state.mesh
    assert mesh is not None, "a stand-in has no process groups, and expert=1 no experts'"
    copies, shards = ("expert_replicate", "expert_shard") if experts else ("data_replicate", "fsdp")
    # Without replicas FSDP is not told of the axis: it would all-reduce over one rank all the same.
    return mesh[(copies, shards) if state.layout.copies_shards else (shards,)]


def _line(ranks: torch.Tensor, rank: int, axis: int) -> list[int]:
    """Return the ranks that differ from this one only along ``axis``, in order."""
    at = (ranks == rank).nonzero()[0].tolist()
    at[axis] = slice(None)
    line: list[int] = ranks[tuple(at)].tolist()
    return line
