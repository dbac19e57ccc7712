"""Plan the memory of one rank in a step, by kind, at its worst instant, and compare it with that of a device.

FSDP2's own bytes a parameter, measured (bf16 compute, fp32 weights, moments and sums, between micro-batches,
2 data ranks): 18, 12, 10, 8 at ZeRO 0 to 3. The textbook's (Rajbhandari et al. 2020): 16, 10, 9, 8, since it
has sums in bf16 and keeps no gathered weights beside sharded ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from .own_module import Loss
from .planned_model import planned_rank
from .rank_parameters import RankParameters
from .rank_walk import RankWalk
from .stage_costs import StageCost
from .step_shape import Work

#: Bytes of a GPU for its context, its libraries' workspaces and NCCL. Assumed, not measured.
RUNTIME = 3_000_000_000

#: Share of what torch's caching allocator reserves on a GPU that no tensor has at the peak: what GMLake saves
#: of it in the mean of eight language models on A100s (Guo et al., ASPLOS 2024, arXiv 2401.08156: 15 %, at
#: most 33 %). Steps of one H100 left 0 to 6 % unused (docs/performance.md). With
#: ``PYTORCH_ALLOC_CONF=expandable_segments:True`` torch leaves less unused.
FRAGMENTATION = 0.15
#: The variable with which torch's allocator leaves less unused.
LESS_UNUSED = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def unit_of(largest: float) -> tuple[str, float]:
    """Return the unit in which to print bytes of which ``largest`` are the most, and its size in bytes."""
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)


def runtime_of(device: str) -> int:
    """Return the bytes of a device that are no tensors': 0 on a CPU."""
    return RUNTIME if device == "cuda" else 0


def usable(memory: float, headroom: float) -> int:
    """Return the bytes of a device that a rank may use, the same in a search and in a dry run."""
    return int(memory * (1 - headroom))


def reserved_bytes(allocated: int) -> int:
    """Return the bytes that torch's allocator reserves for ``allocated`` ones, by ``FRAGMENTATION``."""
    return int(allocated / (1 - FRAGMENTATION))


def reserved_words(reserved: int, memory: float | None) -> str:
    """Return one line about the bytes reserved of a GPU's ``memory``, and what the figure rests on."""
    line = f"about {reserved / 1e9:,.1f} GB, if {FRAGMENTATION:.0%} of what torch's allocator takes is unused"
    if memory is None or reserved <= memory:
        return line
    excess = f"more than the GPU's {memory / 1e9:,.0f} GB: set {LESS_UNUSED}"
    return f"{line}; {excess}"


@dataclass(frozen=True)
class MemoryPlan:
    """Hold the bytes on the device by kind. ``logits`` and ``block`` are two instants; the worse one counts.

    ``gathered``: weights that are whole beside the stored shards. ``gradients``: those that last and exist at
    the worst instant; in the first backward of a step some do not yet. ``activations``: kept for backward, of
    all micro-batches in flight. ``logits``: in the loss of the last stage. ``block``: during one block's
    backward, what it computes again, its gradients, and what is gathered and summed over the data ranks.
    ``pipeline``: what stages exchange. ``host``: what offload puts into the host's memory.
    """

    weights: int = 0
    gathered: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    pipeline: int = 0
    logits: int = 0
    block: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Return the bytes on the device at the worst instant."""
        return sum(self.parts(0).values())

    def parts(self, runtime: int) -> dict[str, int]:
        """Return the bytes at the worst instant by kind, in words, with those of the runtime."""
        in_loss = self.logits > self.block
        return {
            "weights": self.weights,
            "gathered weights": self.gathered,
            "gradients": self.gradients,
            "moments": self.moments,
            "activations": self.activations,
            "exchange of stages": self.pipeline,
            "logits" if in_loss else "one block's backward": max(self.logits, self.block),
            "runtime": runtime,
        }


def plan_memory(
    work: Work, model: nn.Module, *, samples: Mapping[str, Tensor] | None = None, loss: Loss | None = None
) -> MemoryPlan:
    """Return the memory of the rank of ``work``, whose stages ``model`` holds; it may be on the meta device.

    Parameters that require no gradient have no moments, and nothing is kept for them. ``samples``, ``loss``:
    what ``Step`` takes, for a module that is not the zoo's. Raises ``BadInput`` for one that cannot be
    traced.
    """
    return memory_of(work, *planned_rank(work, model, samples, loss))


def memory_of(work: Work, parameters: RankParameters, stages: Sequence[StageCost]) -> MemoryPlan:
    """Return the memory of the rank of ``work``, from its parameters and the costs of its stages."""
    return memory_of_walk(RankWalk(work, parameters, stages), work.at.pipeline)


def memory_of_walk(walk: RankWalk, pipeline: int) -> MemoryPlan:
    """Return the memory of a pipeline rank that is like the one of ``walk``."""
    walk.walk(pipeline)
    worst, work, total = max(walk.peaks.values()), walk.work, walk.parameters.every
    gathered, gradients = walk.gathered - worst.dropped, walk.gradients.persistent - worst.missing
    # At the end of a first backward the activations of its micro-batch have been given back.
    resident = min(worst.resident, worst.bytes + worst.dropped + worst.missing)
    resting = total.trained_sharded * work.master + total.fixed_bytes
    moments = 2 * total.trained_sharded * work.master
    at_rest = 0 if work.offload else resting + moments
    plan = MemoryPlan(
        weights=0 if work.offload else resting,
        gathered=int(gathered),
        gradients=int(gradients),
        moments=0 if work.offload else moments,
        activations=int(resident - worst.messages),
        pipeline=int(worst.messages),
        host=resting + moments + int(total.trained_sharded * work.master) if work.offload else 0,
    )
    other_bytes = plan.total - at_rest
    at = {
        loss: int(max(peak.bytes + walk.gathered + walk.gradients.persistent - other_bytes, 0))
        for loss, peak in walk.peaks.items()
    }
    return replace(plan, logits=at.get(True, 0), block=at.get(False, 0))
