"""Define the pipeline schedules by name, and check that a layout has what its schedule needs.

``schedule_actions.py`` has what each of them computes, in order.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from ..parallel_state import BadInput, Layout, nearest, require

#: Values of ``layout.schedule``.
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]

#: Names of all schedules.
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """State what a schedule requires, and its name in torch.

    A rank has one stage; if ``interleaved`` several, every pipeline-th of the model; in a ``v_shape`` two,
    down and up again. ``two_backwards``: the gradient of a stage's input is computed first, so that the
    previous stage can continue, and the gradient of its weights later, when the rank would wait.
    """

    name: ScheduleName
    torch_name: str
    interleaved: bool = False
    v_shape: bool = False
    two_backwards: bool = False

    @property
    def virtual_stages(self) -> int:
        """Return the number of stages on a rank, unless the recipe sets another one."""
        return 2 if self.interleaved or self.v_shape else 1

    def least_micro_batches(self, pipeline: int) -> int:
        """Return the smallest number of micro-batches; with fewer, torch has no such schedule or the
        pipeline never fills.
        """
        return 2 * pipeline if self.name == "dualpipev" else pipeline

    def runs(self, pipeline: int, micro_batches: int) -> bool:
        """Tell whether torch can run this schedule; interleaved ones need rounds of equally many
        micro-batches.
        """
        if micro_batches < self.least_micro_batches(pipeline):
            return False
        return not self.interleaved or micro_batches % (micro_batches // pipeline) == 0


_KINDS: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", "GPipe"),  # Huang et al. 2019
        ScheduleKind("1f1b", "1F1B"),  # Narayanan et al. 2019
        ScheduleKind("interleaved", "Interleaved1F1B", interleaved=True),  # Narayanan et al. 2021
        # ZB1P of Qi et al. 2023, interleaved.
        ScheduleKind("interleaved-zero-bubble", "InterleavedZeroBubble", True, two_backwards=True),
        ScheduleKind("zbv", "ZBVZeroBubble", v_shape=True, two_backwards=True),  # the same, section 6
        ScheduleKind("dualpipev", "DualPipeV", v_shape=True, two_backwards=True),  # DeepSeek-AI 2024, cut
    )
}


def schedule_kind(name: str, where: str = "layout") -> ScheduleKind:
    """Return the schedule of this name; raise ``BadInput`` if there is none."""
    require(name in _KINDS, where, "schedule", f"one of {', '.join(_KINDS)}", repr(name))
    return _KINDS[name]


def check_schedule(name: str, layout: Layout, micro_batches: int, where: str = "layout") -> None:
    """Refuse stages or micro-batches that the schedule cannot run; without a pipeline all goes."""
    if layout.pipeline == 1:
        return
    kind, virtual = schedule_kind(name, where), layout.virtual_stages
    fits = virtual >= 2 if kind.interleaved else virtual == kind.virtual_stages
    if not fits or layout.v_shape != kind.v_shape:
        expected = f"{'at least ' * kind.interleaved}{kind.virtual_stages} with {name}"
        todo = nearest("virtual_stages", [kind.virtual_stages], virtual)
        todo += "" if kind.interleaved else "; only interleaved schedules take others"
        raise BadInput(where, "virtual_stages", expected=expected, found=virtual, todo=todo)
    if kind.runs(layout.pipeline, micro_batches):
        return
    least = kind.least_micro_batches(layout.pipeline)
    expected = f"at least {least} with {name} over pipeline={layout.pipeline}"
    if micro_batches >= least:
        rounds = micro_batches // layout.pipeline
        expected = f"a multiple of {rounds}, its rounds of at least pipeline={layout.pipeline}, with {name}"
    around = range(max(1, micro_batches - layout.pipeline), micro_batches + layout.pipeline + 1)
    numbers = [n for n in around if kind.runs(layout.pipeline, n)]  # its multiples run, so two are among them
    key = "micro-batches a step"
    near = nearest(key, numbers if micro_batches > least else [least], micro_batches)
    todo = f"{near}; change micro_batch or global_batch"
    raise BadInput(where, key, expected=expected, found=micro_batches, todo=todo)


def check_recomputation(name: str, mode: str, where: str = "step") -> None:
    """Refuse activation checkpointing where a backward has two parts: torch cannot compute some operators of
    a block again for both, and the others would be computed twice.
    """
    require(
        not schedule_kind(name).two_backwards, where, "memory.checkpointing",
        f"none with layout.schedule={name}, or 1f1b or interleaved", mode,
        "Its backward comes in two parts, and each would compute a block's forward again",
    )  # fmt: skip


def bubble(name: str, layout: Layout, micro_batches: int) -> float:
    """Return the share of a step in which a rank of this layout waits, by formula.

    The formula assumes that a stage's forward and each half of its backward take equally long everywhere, and
    that rounds are full. With p ranks of v stages it is ``(p - 1) / (v m + p - 1)``. If the backward is
    split, and the half that nobody waits for fills the gaps, it is ``(p - 1) / (3 v m + p - 1)``. DualPipeV
    has ``2 (p - 1)`` for ``p - 1``, because torch runs a forward and a backward of a pair one after the other
    and sends both results afterwards. Sources: Narayanan et al. 2021; Qi et al. 2023.
    """
    waits = (layout.pipeline - 1) * (2 if name == "dualpipev" else 1)
    thirds = 3 if schedule_kind(name).two_backwards else 1
    return waits / (thirds * layout.virtual_stages * micro_batches + waits)
