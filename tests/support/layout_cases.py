"""Train each layout once, on ranks, and keep a record that answers four questions about the run.

Does it train as one device does? Does each rank send, and hold, what is planned? Does it go on from a
checkpoint, in its own layout and in another one, as if it had not stopped? A table of rows is asked by
binding the questions of its ``Layouts`` to the names of tests.

With ``TRILITH_TEST_DEVICE=cuda`` the layouts' ranks share this machine's first GPU and are compared with one
process on the CPU; the other questions are about the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trilith.checkpoints import load, save
from trilith.data import Batch
from trilith.parallel_state import BadInput, Layout, ParallelState, clip_gradients, initialize
from trilith.parallel_state import state as state_module
from trilith.parallel_state.engine import local_data
from trilith.parallel_state.process_groups import new_group
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import MemorySection
from trilith.simulation.rank import axes_of_groups
from trilith.testing import LiveBytes, RankError, run_fresh, run_parallel
from trilith.testing.layouts import Pieces, assemble, pieces, roughen
from trilith.testing.operators import Operators
from trilith.training import run_plan

from support.configs import config
from support.models_page import MEASURED
from support.plans import RankPlan, Totals, plans_of
from support.refusals import rows_of
from support.shared_gpu import share_gpu
from support.short_training import (
    Case,
    Outcome,
    Parts,
    balance_of,
    build_rank,
    outcomes,
    rank_batch,
    relative_differences,
)
from support.simulated_steps import write_peaks

DEVICE = os.environ.get("TRILITH_TEST_DEVICE", "cpu")
#: How far the least peak of a rank may be from its plan, as a part of it.
NEAR = 0.02
#: How far it may be from the peak of the same step on the simulated device with a CPU's operators.
EXACT = 0.001


@dataclass(frozen=True)
class Row:
    """State a layout to train, why, and which questions its run is to answer."""

    why: str
    case: Case
    slow: bool = False
    #: The largest relative difference to one device; ``None``: not compared.
    tolerance: float | None = 1e-10
    sends: bool = True
    #: The peak over the plan, of every rank or by rank; empty: not measured.
    holds: tuple[float, ...] = ()
    #: Whether the peak is compared with that of the simulated step; a slow row's always is, on every rank.
    simulates: bool = False
    #: What is planned for each rank, by number.
    plans: Sequence[RankPlan] = ()
    #: The peak of some ranks in bytes, as they are simulated.
    exact: Mapping[int, int] = field(default_factory=dict)
    #: Goes on from a checkpoint in its own layout, and in this one.
    resumes: Layout | None = None
    #: The family, and the columns of docs/models.md to which the difference to one device counts.
    measures: tuple[str, list[str]] | None = None


#: What a row asks that only compares, and one that only asks what is sent, or held.
COMPARED: dict[str, Any] = {"sends": False}
SENT: dict[str, Any] = {"tolerance": None}
HELD: dict[str, Any] = {"tolerance": None, "sends": False, "holds": (0.99,), "simulates": True}


#: The short names of axes; the other words are true or not.
_AXES = {
    **{"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "sp": "sequence"},
    **{"zero": "zero", "ring": "ring", "copies": "data_replicate", "loop": "virtual_stages", "v": "v_shape"},
}


def axes(text: str) -> dict[str, Any]:
    """Return what ``Layout.of`` takes for words like those of ``tp2-sp-pp2-zero3``; ``v``: a V of stages."""
    words = re.findall(r"([a-z]+)(\d*)", text.replace("v", "loop2 v"))
    return {_AXES[word]: int(size) if size else True for word, size in words}


def row(
    why: str,
    model: str | dict[str, Any],
    layout: Layout | str = "",
    checkpointing: str = "none",
    *,
    chunk: int = 0,
    offload: bool = False,
    rounds: int | None = None,
    asks: Mapping[str, Any] = MappingProxyType({}),
    **case: Any,
) -> Row:
    """Say a row in few words. ``rounds``: micro-batches of a data rank; ``case``: the rest of a ``Case``."""
    cut = layout if isinstance(layout, Layout) else Layout.of(**axes(layout))
    kept = {"checkpointing": checkpointing, "loss_chunk": chunk, "offload": offload}
    memory = MemorySection.model_validate(kept)
    if rounds is not None:
        case["samples"] = rounds * case.get("micro_batch", 1) * cut.data
    raw = config(model) if isinstance(model, str) else model
    return Row(why, Case(raw, cut, memory=memory, **case), **asks)


def refused(raw: dict[str, Any]) -> BadInput | None:
    """Return why no run begins with a recipe, or nothing."""
    try:
        run_plan.plan(parse_recipe(raw))
    except BadInput as error:
        return error
    return None


@dataclass
class RankRecord:
    """Hold what one rank trained, sent and held."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    gradients: Pieces = field(default_factory=dict)
    initial: Pieces = field(default_factory=dict)
    parameters: Pieces = field(default_factory=dict)
    sent: Totals = field(default_factory=dict)
    #: The elements of parameters, gradients and moments; the least peak over the plan.
    counted: tuple[int, int, int] = (0, 0, 0)
    ratio: float = 0.0
    peak: int = 0
    #: Names of parameters that differ in a bit after resuming, if it resumed; those in the other layout.
    resumed: list[str] | None = None
    elsewhere: Pieces = field(default_factory=dict)


@dataclass
class Record:
    """Hold the answers of a row's run. Tensors are compared and dropped: those of all rows are gigabytes."""

    differences: list[tuple[str, float]]
    ranks: list[RankRecord]
    elsewhere: list[tuple[str, float]]
    #: What was planned, and what was simulated: see ``Row``.
    plans: Sequence[RankPlan] = ()
    exact: Mapping[int, int] = field(default_factory=dict)

    def assert_equal(self, tolerance: float) -> float:
        """Assert that the run is one device's; return the largest relative difference."""
        for what, difference in self.differences:
            if not difference <= tolerance:
                raise AssertionError(f"{what} differs by {difference:.2e}")
        return max(difference for _, difference in self.differences)


# On the ranks ----------------------------------------------------------------------------------------------


def observe(rows: Sequence[Row], folder: str) -> list[RankRecord]:
    """Train the rows, one after the other, on the ranks that call this together."""
    if any(row.case.device == "cuda" for row in rows):
        share_gpu()
    records = []
    with _shared_groups():
        for number, row in enumerate(rows):
            print(f"row {row.why!r}", file=sys.stderr)  # the error of a rank ends with what it wrote
            records.append(_Run(row, Path(folder) / str(number)).record)
    return records


@contextmanager
def _shared_groups() -> Iterator[None]:
    """Let layouts that cut the ranks alike have the same process groups. Until the call ends, each group has
    threads that wake a hundred times a second, and DTensor remembers an equal mesh of an earlier row.
    """
    groups: dict[object, list[dist.ProcessGroup]] = {}
    start, patch = vars(ParallelState)["start"].__func__, pytest.MonkeyPatch()

    def shared(cls: type[ParallelState], layout: Layout, /, **options: Any) -> ParallelState:
        sizes = layout.pipeline, layout.data_sizes(), layout.data_sizes(experts=True), layout.tensor
        # Every rank asks for as many groups, in the same order: also after the start, for the first time.
        alike = groups.setdefault((*sizes, layout.context), [])
        place = count()

        def next_group(ranks: Sequence[int], *args: Any, **options: Any) -> dist.ProcessGroup:
            if (number := next(place)) == len(alike):
                alike.append(new_group(ranks, *args, **options))
            assert dist.get_process_group_ranks(alike[number]) == [*ranks]
            return alike[number]

        patch.setattr(state_module, "new_group", next_group)
        state: ParallelState = start(cls, layout, **options)
        return state

    patch.setattr(ParallelState, "start", classmethod(shared))
    try:
        yield
    finally:
        patch.undo()


class _Run:
    """Run a row on this rank, for two steps: a pipeline's stages also tell each other shapes in the first.

    So a row without stages that only asks what a step sends takes one.
    """

    def __init__(self, row: Row, folder: Path) -> None:
        self.row, self.case, self.record = row, row.case, RankRecord()
        #: What a step sends does not depend on the numbers: weights need not change.
        self.trains = row.tolerance is not None or bool(row.holds) or row.resumes is not None
        self.state = ParallelState.start(self.case.layout, device=self.case.device)
        if row.holds:
            gc.collect()
        # From before there is a weight: FSDP keeps some where no parameter shows them. It is left while
        # pieces are cloned, which are not the run's.
        self.live = LiveBytes()
        with self._holding():
            self.parts = _started(self.case, self.state)
        self.record.initial = self._pieces()
        batches = [rank_batch(self.case, number, self.state) for number in range(4)]
        if self.trains or self.case.layout.pipeline > 1:
            self._first_step(batches[0])
        if row.resumes is not None:
            save(folder, self.parts.model, self.parts.optimizer, step=1)
        operators = Operators()
        with operators if row.sends else nullcontext(), self._holding():
            self.live.peak = self.live.now
            result = self.parts.step.launch(batches[1])
            if row.holds:
                self._count()
            self._update(result.loss)
        self.record.sent = sent_in(operators, self.state)
        self.record.parameters = self._pieces()
        if row.tolerance is not None:
            self.record.balance = balance_of(self.parts.model, self.state)
        if row.holds:
            self._measure(batches[2:])
        if row.resumes is not None:
            self._resume(folder, row.resumes)

    def _first_step(self, batch: Batch) -> None:
        with self._holding():
            result = self.parts.step.launch(batch)
        if self.trains:
            self.parts.step.refuse(result)  # sends for itself; a run leaves it to its next step
        self.record.gradients = self._pieces(gradients=True)
        with self._holding():
            self._update(result.loss)

    def _holding(self) -> Any:
        return self.live if self.row.holds else nullcontext()

    def _pieces(self, *, gradients: bool = False) -> Pieces:
        if self.row.tolerance is None and self.row.resumes is None:
            return {}
        return pieces(self.parts.model, self.state, gradients=gradients)

    def _update(self, loss: Tensor) -> None:
        model, record = self.parts.model, self.record
        norm = clip_gradients(model, self.case.clip, state=self.state)
        if self.trains:
            record.losses.append(float(loss))
            record.norms.append(float(norm))
            self.parts.optimizer.step()
        self.parts.optimizer.zero_grad()

    def _count(self) -> None:
        parameters = [*self.parts.model.parameters()]
        states = self.parts.optimizer.state.values()
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        self.record.counted = (
            sum(local_data(one).numel() for one in parameters),
            sum(local_data(one.grad).numel() for one in parameters if one.grad is not None),
            sum(local_data(one).numel() for one in moments),
        )

    def _measure(self, batches: Sequence[Batch]) -> None:
        """Note the least peak of three steps, of two more if the first is far from its plan, or from the
        simulated one, on any rank.

        The threads of gloo may hold what was sent a little longer, at one time and not at another.
        """
        expected = self.row.holds[self.state.rank % len(self.row.holds)]
        peaks = [self.live.peak]
        exact = self.row.exact.get(self.state.rank, peaks[0])
        planned = self.row.plans[self.state.rank].peak
        far = abs(peaks[0] / planned - expected) >= NEAR or abs(peaks[0] / exact - 1) > EXACT
        missed = torch.tensor(float(far))
        dist.all_reduce(missed)
        for batch in batches if missed else ():
            self.live.peak = self.live.now
            with self._holding():
                self._update(self.parts.step.launch(batch).loss)
            peaks.append(self.live.peak)
        self.record.peak = min(peaks)
        self.record.ratio = min(peaks) / planned

    def _resume(self, folder: Path, layout: Layout) -> None:
        """Take the second step from the checkpoint that was written after the first."""
        before = pieces(self.parts.model, self.state)
        after = _second_step(self.case, folder)
        assert before.keys() == after.keys()
        self.record.resumed = [name for name in before if not torch.equal(before[name][2], after[name][2])]
        other = replace(self.case, layout=layout, split=None, schedule="1f1b")
        self.record.elsewhere = _second_step(other, folder)


def _started(case: Case, state: ParallelState, *, filled: bool = True) -> Parts:
    """Build this rank's part, with its first weights unless a checkpoint will give them."""
    parts = build_rank(case, state)
    if filled:
        initialize(parts.model, case.seed, state=state)
        roughen(parts.model, case.seed, state)
    return parts


def _second_step(case: Case, folder: Path) -> Pieces:
    state = ParallelState.start(case.layout, device=case.device)
    parts = _started(case, state, filled=False)
    load(folder, parts.model, parts.optimizer)
    parts.step.launch(rank_batch(case, 1, state))
    clip_gradients(parts.model, case.clip, state=state)
    parts.optimizer.step()
    return pieces(parts.model, state)


def sent_in(operators: Operators, state: ParallelState) -> Totals:
    """Return what was sent while ``operators`` was entered. Tokens on their way to experts do not count: a
    plan cannot know them.
    """
    names, every = axes_of_groups(state), operators.in_groups.items()
    totals = {(names.get(group, group), kind): counted for (group, kind), counted in every}
    return {key: counted for key, counted in totals.items() if key[0] != "expert"}


# In the tests' process -------------------------------------------------------------------------------------


def alone(case: Case) -> Case:
    """Return the same training on one device, as plain as can be."""
    plain: dict[str, Any] = {"split": None, "schedule": "1f1b", "compiled": "", "device": "cpu"}
    return replace(case, layout=Layout(), micro_batch=case.samples, memory=MemorySection(), **plain)


_ONE_DEVICE: dict[str, Outcome] = {}


def one_device(cases: Sequence[Case]) -> list[Outcome]:
    """Return the outcomes of the cases' training on one device, each made once for all layouts."""
    missing = {repr(alone(case)): alone(case) for case in cases if repr(alone(case)) not in _ONE_DEVICE}
    if missing:
        _ONE_DEVICE.update(zip(missing, outcomes([*missing.values()]), strict=True))
    return [_ONE_DEVICE[repr(alone(case))] for case in cases]


def _seconds(rows: Sequence[Row]) -> float:
    """Return the limit of a call. Two such calls, of many rows and of one, fit into the limit of a test."""
    return 60 + 10 * len(rows)


@dataclass
class _Call:
    """Hold a call that failed, and its rows that have not yet passed alone."""

    error: RankError
    left: set[str]

    @property
    def row(self) -> str:
        """Return the row at which the rank to blame was, which prints each one that it begins."""
        begun = re.findall(r"^row (.*)$", self.error.failures[0].output, re.MULTILINE)
        return begun[-1] if begun else "none"


class Layouts:
    """Ask the rows of a table; a row is run when its record is first asked for.

    Several rows that have as many ranks are run in one call, of those that the session has chosen. If a rank
    of a call fails, each of the call's rows is run again in a call of its own when it is asked for: the one
    to blame fails with its own error, and its neighbours do not. If all of them pass alone, the last one
    fails, because then they disturb one another. No question runs a row again.
    """

    def __init__(self, *table: Row | Iterable[Row], at_once: int = 16) -> None:
        self.rows, self.at_once = rows_of(table), at_once
        assert len({row.why for row in self.rows}) == len(self.rows), "two rows have the same name"
        self._records: dict[str, Record | Exception] = {}
        self._failed: dict[str, _Call] = {}
        self._peaks: dict[str, dict[int, int]] = {}

    def record(self, row: Row, request: pytest.FixtureRequest | None = None) -> Record:
        """Return the record of a row, which need not be in the table."""
        if row.why not in self._records:
            chosen = [] if request is None else _chosen(request)
            self._run([row] if row.why in self._failed else [row, *self._beside(row, chosen)], chosen)
        if row.why not in self._records:  # the call failed: this row alone, the others when they are asked
            self._run([row])
        record = self._records[row.why]
        if isinstance(record, Exception):
            raise record
        return record

    def _beside(self, row: Row, chosen: Iterable[Row]) -> list[Row]:
        """Return further rows of this table: those of another table of the file are that one's to run."""
        names = {one.why for one in self.rows} - {row.why, *self._records, *self._failed}
        world = row.case.layout.world
        waiting = [one for one in chosen if one.case.layout.world == world and one.why in names]
        return waiting[: self.at_once - 1]

    def _run(self, rows: Sequence[Row], chosen: Sequence[Row] = ()) -> None:
        alone = len(rows) == 1
        try:
            wholes = one_device([row.case for row in rows if row.tolerance is not None])
            todo: Sequence[Row] = [_planned(row if DEVICE == "cpu" else _on_device(row)) for row in rows]
            with tempfile.TemporaryDirectory() as folder:
                if DEVICE == "cpu":
                    todo = self._simulated(todo, chosen, Path(folder) / "peaks.json")
                ranks = run_parallel(observe, rows[0].case.layout.world, todo, folder, timeout=_seconds(rows))
        except RankError as error:
            if alone:
                self._records[rows[0].why] = error
                return
            call = _Call(error, {row.why for row in rows})
            self._failed |= {row.why: call for row in rows}
            return
        whole = iter(wholes)
        for row, records in zip(todo, zip(*ranks, strict=True), strict=True):
            expected = next(whole) if row.tolerance is not None else None
            try:
                self._records[row.why] = replace(
                    compared(row, expected, [*records]), plans=row.plans, exact=row.exact
                )
            except AssertionError as error:  # copies differ, an element has no owner
                self._records[row.why] = error
        if alone and (call_before := self._failed.get(rows[0].why)):
            call_before.left.discard(rows[0].why)
            if not call_before.left:
                message = "each row passes alone, but not in one call"
                message += f", which failed at row {call_before.row}: {call_before.error}"
                self._records[rows[0].why] = AssertionError(message)

    def _simulated(self, rows: Sequence[Row], chosen: Iterable[Row], file: Path) -> Sequence[Row]:
        """Return the rows with simulated peaks. The device cannot be taken back, so another process has it:
        one for all quick rows that the session has chosen.
        """
        names, asked = {row.why for row in self.rows}, [row for row in rows if _is_simulated(row)]
        if any(row.why not in self._peaks for row in asked):
            asked += [row for row in chosen if _is_simulated(row) and not row.slow and row.why in names]
            waiting = {row.why: row for row in asked if row.why not in self._peaks}.values()
            cases = [(row.case, range(row.case.layout.world)[0 if row.slow else -1 :]) for row in waiting]
            (code,) = run_fresh(write_peaks, 1, cases, file, process_group=False, timeout=200)
            assert code == 0, code.output
            for row, peaks in zip(waiting, json.loads(file.read_text()), strict=True):
                self._peaks[row.why] = {int(rank): peak for rank, peak in peaks.items()}
        return [replace(row, exact=self._peaks.get(row.why, {})) for row in rows]

    def equal_one_device(self) -> Any:
        """Return the test that each row trains as one device does: losses, norms, gradients, weights."""

        def check(row: Row, record: Record, note: Callable[[str, object], None]) -> None:
            worst = record.assert_equal(row.tolerance or 0.0)
            if row.measures is not None:
                note(MEASURED, [*row.measures, worst])

        return self._asked(check, lambda row: row.tolerance is not None, anywhere=True)

    def send_what_is_planned(self) -> Any:
        """Return the test of every collective in a step: its axis, its kind, number and bytes."""

        def check(row: Row, record: Record, note: object) -> None:
            for number, (rank, plan) in enumerate(zip(record.ranks, record.plans, strict=True)):
                both = {key: (rank.sent.get(key), plan.sends.get(key)) for key in rank.sent | plan.sends}
                wrong = {key: (sent, planned) for key, (sent, planned) in both.items() if sent != planned}
                assert not wrong, f"rank {number}: sent and planned {wrong}"

        return self._asked(check, lambda row: row.sends)

    def hold_what_is_planned(self) -> Any:
        """Return the test of a step's peak, and of parameters, gradients and moments to the element."""

        def check(row: Row, record: Record, note: object) -> None:
            for number, (rank, plan) in enumerate(zip(record.ranks, record.plans, strict=True)):
                assert rank.counted == plan.elements, f"rank {number}: counted, planned"
                expected = row.holds[number % len(row.holds)]
                assert abs(rank.ratio - expected) < NEAR, (number, [one.ratio for one in record.ranks])
            ratios = {number: record.ranks[number].peak / peak for number, peak in record.exact.items()}
            assert all(abs(ratio - 1) <= EXACT for ratio in ratios.values()), f"measured, simulated: {ratios}"

        return self._asked(check, lambda row: bool(row.holds))

    def resume_bitwise(self) -> Any:
        """Return the test that going on from a checkpoint in the same layout changes no bit."""

        def check(row: Row, record: Record, note: object) -> None:
            assert [rank.resumed for rank in record.ranks] == [[]] * len(record.ranks)

        return self._asked(check, lambda row: row.resumes is not None)

    def resume_in_another_layout(self) -> Any:
        """Return the test that going on in another layout is as if the run had not stopped."""

        def check(row: Row, record: Record, note: object) -> None:
            assert record.elsewhere
            assert [one for one in record.elsewhere if not one[1] <= 1e-10] == []

        return self._asked(check, lambda row: row.resumes is not None)

    def _asked(
        self, check: Callable[[Row, Record, Any], None], asks: Callable[[Row], bool], anywhere: bool = False
    ) -> Any:
        rows = [row for row in self.rows if asks(row) and (anywhere or DEVICE == "cpu")]
        marks = {True: [pytest.mark.slow], False: []}
        every = [pytest.param(row, id=row.why.replace(" ", "_"), marks=marks[row.slow]) for row in rows]

        @pytest.mark.parametrize("row", every)
        def test(row: Row, request: pytest.FixtureRequest, record_property: Callable[..., None]) -> None:
            check(row, self.record(row, request), record_property)

        return test


def _chosen(request: pytest.FixtureRequest) -> list[Row]:
    """Return the rows of the asking test's file that this session has chosen: no other row is run."""
    rows: dict[str, Row] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            row = getattr(item, "callspec", None) and item.callspec.params.get("row")
            if isinstance(row, Row):
                rows[row.why] = row
    return [*rows.values()]


def _is_simulated(row: Row) -> bool:
    return bool(row.holds) and (row.slow or row.simulates)


def _planned(row: Row) -> Row:
    asked = {"sends": row.sends, "holds": bool(row.holds)}
    return replace(row, plans=plans_of(row.case, **asked)) if any(asked.values()) else row


def _on_device(row: Row) -> Row:
    return replace(row, case=replace(row.case, device=DEVICE), sends=False, holds=(), resumes=None)


def compared(row: Row, whole: Outcome | None, ranks: list[RankRecord]) -> Record:
    """Compare what the ranks trained with one device, and drop the tensors."""
    differences: list[tuple[str, float]] = []
    parameters = assemble([rank.parameters for rank in ranks])
    if whole is not None:
        assert min(whole.norms) > 2 * row.case.clip, "the clipping does not bite, so it is not tested"
        for rank in ranks:
            numbers = [(each.losses, each.norms, each.balance) for each in (rank, ranks[0])]
            assert numbers[0] == numbers[1], "ranks disagree"
            for name, (box, _, initial) in rank.initial.items():
                assert name in whole.initial, f"{name}: one device does not have it"
                assert torch.equal(whole.initial[name][box.slices], initial), f"initial {name} differs"
        gradients = assemble([rank.gradients for rank in ranks])
        trained = Outcome(ranks[0].losses, ranks[0].norms, ranks[0].balance, gradients, {}, parameters)
        differences = [*relative_differences(replace(whole, initial={}), trained)]
    elsewhere = assemble([rank.elsewhere for rank in ranks])
    record = Record(differences, ranks, [])
    for name, tensor in elsewhere.items():
        difference = float((tensor - parameters[name]).abs().max()) / float(tensor.abs().max())
        record.elsewhere.append((name, difference))
    for rank in ranks:
        rank.initial, rank.gradients, rank.parameters, rank.elsewhere = {}, {}, {}, {}
    return record
