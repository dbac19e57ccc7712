"""Say in one line why a layout does not fit, and what to change if no layout fits."""

from dataclasses import replace

from ...parallel_state import BadInput
from ..memory import MemoryPlan
from ..time import MACHINES
from .candidates import Cut, candidates
from .choice import Choice, Tally
from .evaluate import Evaluator
from .request import Request

#: How often the number of GPUs is doubled to find one that is enough.
_DOUBLINGS = 10


def shortage(plan: MemoryPlan, choice: Choice, rank: int, request: Request) -> tuple[str, str]:
    """Return the kind that needs the most bytes on a rank that does not fit, and a line with the figures."""
    parts = sorted(plan.parts(request.runtime).items(), key=lambda part: -part[1])
    largest = ", ".join(f"{words} {size / 1e9:.1f}" for words, size in parts[:3])
    for digits in range(1, 9):  # so many that both differ
        needs, has = (f"{size / 1e9:.{digits}f}" for size in (plan.total + request.runtime, request.room))
        if needs != has:
            break
    line = f"pipeline rank {rank} needs {needs} of {has} GB: {largest} ({choice})"
    return parts[0][0], line


def none_legal(request: Request, tally: Tally) -> BadInput:
    """Return the error for a number of GPUs over which no layout is legal."""
    most = next((reason for reason in tally if reason.kind == "not legal"), None)
    return BadInput(
        f"plan {request.name}",
        "--gpus",
        expected="a number over which the model and the batch can be cut",
        found=request.gpus,
        todo="" if most is None else f"Most often: {most.example}",
    )


def none_fits(request: Request, tally: Tally) -> BadInput:
    """Return the error for a request of which no layout fits; it names changes that would fit, with
    figures.
    """
    reasons = [reason for reason in tally if reason.kind == "memory"]
    nearest = min(reasons, key=lambda reason: reason.excess, default=None)
    ways, memory = _numbers_of_gpus(request), request.machine.memory
    gpus = () if request.recipe.device == "cpu" else MACHINES.values()
    larger = [machine for machine in gpus if machine.memory > memory]
    if larger and (least := _least(request)) is not None:
        enough = [machine for machine in larger if least <= request.room / memory * machine.memory]
        for machine in sorted(enough, key=lambda machine: machine.memory)[:1]:
            ways.append(f"--gpu-type {machine.name} ({machine.memory / 1e9:.0f} GB)")
    fits = f"What would fit: {'; or '.join(ways)}"
    return BadInput(
        f"plan {request.name}",
        "memory",
        expected=f"at most {request.room / 1e9:.1f} GB of a GPU's {memory / 1e9:.3g} GB",
        found="more with every layout" if nearest is None else nearest.example,
        todo=fits if ways else "Take a shorter --sequence-length, or --lora",
    )


def _numbers_of_gpus(request: Request) -> list[str]:
    """Return the first double of the GPUs that is enough, and the first one with offload if it is smaller."""
    ways: list[str] = []
    offloads = request.offloads
    for number in (request.gpus << doubling for doubling in range(1, _DOUBLINGS + 1)):
        for offload in offloads:
            least = _least(replace(request, gpus=number), offload=offload)
            if least is None or least > request.room:
                continue
            if not offload:
                return [*ways, f"--gpus {number} ({least / 1e9:.1f} GB)"]
            ways.append(f"--gpus {number} with memory.offload ({least / 1e9:.1f} GB)")
            offloads = (False,)
    return ways


def _least(request: Request, *, offload: bool = True) -> int | None:
    """Return the fewest bytes that the heaviest rank of a layout needs; ``None`` if no layout is legal."""
    evaluator, best = Evaluator(request), None
    for cut in candidates(request, Tally(), offload=offload):
        if cut.layout.sequence != (cut.layout.tensor > 1) or cut.layout.ring:
            continue
        try:
            total = _least_of(cut, evaluator, best)
        except BadInput:  # building a layer may refuse what the config allows
            continue
        best = total if best is None else min(best, total)
    return best


def _least_of(cut: Cut, evaluator: Evaluator, best: int | None) -> int:
    """Return the fewest bytes of a cut: blocks forget all they can, and the data ranks share all they can."""
    least = None
    for flow in cut.flows:
        if flow.micro_batch > 1 or flow.schedule not in ("1f1b", "interleaved"):
            continue
        choice, total = cut.choice(flow, flow.modes[-1]), 0
        for rank in range(choice.layout.pipeline):
            total = max(total, evaluator.memory(choice, rank).total + evaluator.request.runtime)
            if best is not None and total >= best:
                break
        least = total if least is None else min(least, total)
    return least if least is not None else (best or 2**62)
