"""Published runs: the page is what the planner predicts today, and the planner knows none of the rows."""

import json
from pathlib import Path
from statistics import median, quantiles

import pytest
import trilith
from published_runs import compare, page, published_runs
from trilith.planner.time import MIDDLE_HALF, TIMES_SLOWER, machine_named

ROOT = Path(trilith.__path__[0])
PAGE = (ROOT / "docs" / "published_runs.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found():
    return [compare(run) for run in published_runs()]


def test_the_page_is_what_the_planner_predicts(found):
    assert page(found) == PAGE, "run `make docs`"


def test_products_on_an_h100_have_the_rate_of_a_profiled_step(found):
    measured = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["rows"]
    profiled = next(row for row in measured if row["name"] == "Llama 3.2 1B, compiled, profiled")
    compared = next(row for row in found if row.run.compiled and row.run.model == "llama-3.2-1b")
    flops = 3 * compared.time.flops.matrices * compared.time.tokens
    machine = machine_named("h100-80gb")
    reached = machine.peak("bfloat16") * machine.efficiency.products
    assert reached == pytest.approx(1e3 * flops / profiled["figures"]["products: ms"], rel=2e-3)


def test_every_row_names_its_source_its_gpus_and_one_speed(found):
    assert len(found) >= 20
    for one in found:
        run = one.run
        assert one.layout.world == run.gpus
        assert run.source.startswith("http") or (ROOT / "docs" / run.source).is_file()
        assert [bool(run.tokens), bool(run.tflops), bool(run.mfu)].count(True) == 1
        assert not run.mfu or run.convention == "full"  # as Megatron-LM counted when it published them
        assert run.global_batch % (one.layout.data * run.micro_batch) == 0 and run.title
        # No source states everything: what is recomputed, or what ZeRO cuts, is missing in each of them.
        assert len(run.assumed) > 5 and run.assumed != "nothing"


def test_speeds_of_other_units_are_one_arithmetic(found):
    """TFLOP/s and MFU of a row say the same: tokens a second times the FLOPs of a token."""
    for one in found:
        rate = one.time.rate / one.layout.world
        flops = {"causal": one.time.flops.causal, "full": one.time.flops.full}[one.run.convention]
        in_units = {"tokens/s": rate, "TFLOP/s": rate * flops / 1e12}
        in_units["% MFU"] = 100 * rate * flops / one.time.peak
        assert one.predicted == pytest.approx(in_units[one.unit])


def test_what_a_plan_and_pages_tell_of_published_runs_is_what_the_rows_say(found):
    slower = [one.times_slower for one in found]
    guide = " ".join((ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split())
    error = median(abs(comparison.error) for comparison in found)
    assert f"miss by {100 * error:.0f}% in the median" in guide
    assert tuple(round(of(slower), 2) for of in (min, median, max)) == TIMES_SLOWER
    least, _, most = quantiles(slower, n=4)
    assert (round(least, 2), round(most, 2)) == MIDDLE_HALF
    least, usual, most = TIMES_SLOWER
    words = f"took {least:.2f} to {most:.2f} times as long as predicted, in the median {usual:.2f} times"
    assert words in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_what_the_sources_report_of_memory_is_the_plan_with_what_differs_by_name(found):
    rows = [row for row in found if row.run.gibibytes]
    assert len(rows) == 10
    for row in rows:
        run = row.run
        assert run.differs.startswith(run.counts) and run.counts in ("allocated", "reserved")
        assert 0.9 < row.explained / run.gibibytes < 1.1, run
    assert not any(row.run.differs or row.run.counts for row in found if not row.run.gibibytes)


def test_nothing_that_computes_a_plan_reads_the_published_rows():
    files = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "planner").rglob("*.py")}
    assert "planner/search/report.py" in files
    page = "docs/published_runs.md"  # which a plan names
    assert [name for name, text in files.items() if "published_runs" in text.replace(page, "")] == []
