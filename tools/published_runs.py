"""Predict training runs that others published, and write docs/published_runs.md: ``make docs``.

The rows of ``published_runs.toml`` are data to judge the planner by. No constant with which a prediction is
computed comes from them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from trilith.models import family_of, published_sizes
from trilith.parallel_state import Layout, ParallelState
from trilith.planner import Asked, Work, sampled
from trilith.planner.memory import FRAGMENTATION, memory_of, reserved_bytes
from trilith.planner.time import StepTime, StepTimer, machine_named
from trilith.storage.small_files import read_toml

_TABLE = Path(__file__).with_name("published_runs.toml")


@dataclass(frozen=True)
class PublishedRun:
    """Describe a published run: its step, and one reported speed: ``tokens`` a second or ``tflops`` of a GPU,
    or ``mfu``. ``published_runs.toml`` says what its keys are.

    ``title`` names the source. ``split_ends``: blocks of the first and the last stage, if these have fewer.
    ``bandwidth``: of the GPU's memory, if the source says that it is not the table's. ``loss_chunk``: tokens
    whose logits exist at once; 0 for all.
    """

    source: str
    title: str
    model: str
    gpu: str
    gpus: int
    layout: Mapping[str, Any]
    sequence_length: int
    global_batch: int
    assumed: str
    schedule: str = "1f1b"
    split_ends: int = 0
    micro_batch: int = 1
    dtype: str = "bfloat16"
    checkpointing: Any = "none"
    loss_chunk: int = 0
    compiled: bool = True
    tokens: float = 0.0
    tflops: float = 0.0
    mfu: float = 0.0
    convention: Literal["causal", "full"] = "causal"
    bandwidth: float = 0.0
    attention: float = 0.0
    exchanged: float = 1.0
    gibibytes: float = 0.0
    counts: Literal["allocated", "reserved", ""] = ""
    differs: str = ""
    named: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def products(self) -> str:
        """Return the type of matrix products, and whether blocks are compiled."""
        return self.dtype + ("" if self.compiled else ", eager")


@dataclass(frozen=True)
class Comparison:
    """Hold a reported speed beside the predicted one, and the same for the memory of the fullest rank."""

    run: PublishedRun
    layout: Layout
    unit: str
    reported: float
    predicted: float
    #: Predicted, in GiB.
    memory: float
    time: StepTime

    @property
    def error(self) -> float:
        """Return the error of the prediction in relation to what was reported."""
        return self.times_slower - 1

    @property
    def explained(self) -> float:
        """Return the GiB that the row should report: the plan's, what differs by name, and for a row that
        counts what is reserved the allocator's unused share.
        """
        allocated = self.memory + self.run.named
        reserved = reserved_bytes(round(allocated * 2**30)) / 2**30
        return reserved if self.run.counts == "reserved" else allocated

    @property
    def times_slower(self) -> float:
        """Return how many times as long as predicted the run's step took."""
        return self.predicted / self.reported


def published_runs() -> list[PublishedRun]:
    """Return the rows of the table; a source is its address."""
    raw = read_toml(_TABLE)
    configs = {name: size.fields for name, size in published_sizes().items()} | raw["models"]
    return [
        PublishedRun(
            **{key: value for key, value in row.items() if key != "fields"}
            | {"source": raw["sources"][row["source"]], "title": raw["titles"][row["source"]]}
            | {key: raw[key][row[key]] for key in ("attention", "exchanged") if key in row}
            | {"config": configs[row["model"]] | row.get("fields", {})}
        )
        for row in raw["run"]
    ]


def compare(run: PublishedRun) -> Comparison:
    """Predict the speed of a published run on the machine that the planner's table has for its GPU."""
    family = family_of(run.config, run.model)
    config = family.from_hf(run.config, run.model)
    layout = Layout.of(**run.layout)
    split = None
    if run.split_ends:
        inner = (config.num_hidden_layers - 2 * run.split_ends) // (layout.stages - 2)
        split = [run.split_ends, *[inner] * (layout.stages - 2), run.split_ends]
    rounds = run.global_batch // layout.data // run.micro_batch
    step = config.hidden_size, run.sequence_length, run.micro_batch, rounds, run.schedule
    memory = {"checkpointing": run.checkpointing, "loss_chunk": run.loss_chunk}
    work = Work(ParallelState.stand_in(layout), *step, compute=2, **memory)
    model = sampled(family, config, layout, Asked(float8="tensorwise" if run.dtype == "float8" else None))
    machine = machine_named(run.gpu)
    reached = machine.efficiency
    links = {"": reached.link(""), "all_to_all": reached.link("all_to_all") / run.exchanged}
    reached = replace(reached, attention=run.attention or reached.attention, links=links)
    machine = replace(machine, bandwidth=run.bandwidth or machine.bandwidth, efficiency=reached)
    timer = StepTimer(model, work, machine, split=split, compiled=run.compiled, dtype=run.dtype)
    time = timer.time()
    ranks, work_of = range(layout.pipeline), work.of_pipeline
    plans = [memory_of(work_of(rank), timer.parameters(rank), timer.costs(rank)) for rank in ranks]
    peak = max(plan.total for plan in plans) / 2**30
    rate = time.rate / layout.world
    if run.tokens:
        unit, reported, predicted = "tokens/s", run.tokens, rate
    elif run.tflops:
        unit, reported, predicted = "TFLOP/s", run.tflops, rate * getattr(time.flops, run.convention) / 1e12
    else:
        unit, reported, predicted = "% MFU", 100 * run.mfu, 100 * getattr(time.mfu, run.convention)
    return Comparison(run, layout, unit, reported, predicted, peak, time)


def page(comparisons: Sequence[Comparison]) -> str:
    """Return docs/published_runs.md."""
    errors = [comparison.error for comparison in comparisons]
    slower = [comparison.times_slower for comparison in comparisons]
    reporting = [row for row in comparisons if row.run.gibibytes]
    plain = [row.memory / row.run.gibibytes for row in reporting]
    explained = [row.explained / row.run.gibibytes for row in reporting]
    words = read_toml(_TABLE)
    head = words["page"].format(
        rows=len(comparisons),
        within=sum(abs(error) <= 0.15 for error in errors),
        middle=100 * median(map(abs, errors)),
        largest=100 * max(map(abs, errors)),
        least=min(slower),
        most=max(slower),
        usual=median(slower),
        fast=sum(error > 0 for error in errors),
        meanings=_table(("column", "meaning"), words["meanings"].items()),
        reporting=len(reporting),
        lowest=min(plain),
        highest=max(plain),
        under=min(explained),
        over=max(explained),
        unused=FRAGMENTATION,
        memory=_table(_MEMORY, map(_memory_cells, reporting)),
    )
    parts = [head]
    for source in dict.fromkeys(comparison.run.source for comparison in comparisons):
        rows = [comparison for comparison in comparisons if comparison.run.source == source]
        place = f"<{source}>" if "://" in source else f"[{source}]({source})"
        table = _table(_COLUMNS, map(_cells, rows))
        parts.append(f"## {rows[0].run.title}\n\nSource: {place}\n\n{table}\n")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


#: The heads of the table of memory, and of each table of speeds.
_MEMORY = ("GPUs x model", "products", "planned", "by name", "so expected", "reported", "what differs")
_COLUMNS = ("model", "GPUs", "layout", "step", "checkpointing", "products", "reported", "predicted", "error",
            "memory", "assumed")  # fmt: skip


def _memory_cells(row: Comparison) -> tuple[str, ...]:
    run = row.run
    sizes = f"{row.memory:.1f}", f"{run.named:+.1f}", f"{row.explained:.1f}", f"{run.gibibytes:.1f}"
    return f"{run.gpus:,} x {run.model}", run.products, *sizes, run.differs


def _cells(comparison: Comparison) -> tuple[str, ...]:
    run, layout = comparison.run, comparison.layout
    return (
        run.model,
        f"{run.gpus:,} {run.gpu}",
        str(layout) + (f", {run.schedule}" if layout.pipeline > 1 else ""),
        f"{run.global_batch:,} x {run.sequence_length:,}, {run.micro_batch} at once",
        run.checkpointing,
        run.products,
        f"{_short(comparison.reported)} {comparison.unit}",
        _short(comparison.predicted),
        f"{100 * comparison.error:+.0f} %",
        f"{comparison.memory:.0f}" + (f" ({run.gibibytes:.0f})" if run.gibibytes else ""),
        run.assumed,
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


if __name__ == "__main__":
    Path("docs/published_runs.md").write_text(page([compare(run) for run in published_runs()]), "utf-8")
