"""The bench: its report on this machine, that a part that fails is a row, and what it refuses."""

import json
import os
import re
import signal
import time
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import pytest
import torch
from support.command_lines import call_command
from support.configs import TINIEST_LLAMA
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.machine import Finding, Report, Row
from trilith.machine.measure import blocks, cases, layouts, speed
from trilith.machine.measure import run as run_module
from trilith.machine.measure.cases import PARTS, Bench, Case
from trilith.machine.measure.run import make_page, shown_figure
from trilith.machine.random_files import built
from trilith.parallel_state import Box, Layout, ParallelState, engine, initialize
from trilith.parallel_state.engine.measuring import clocked
from trilith.planner.time import machine_from_bench
from trilith.ranks import run_parallel
from trilith.recipes.recipe import parse_recipe
from trilith.training import Precision, shard_over_data

#: The default suite times no links, which is half of the work; below each kind of collective is timed alone.
WITHOUT_LINKS = [part for part in PARTS if part != "links"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        pytest.param(WITHOUT_LINKS, ["--only", ",".join(WITHOUT_LINKS)], id="without links"),
        pytest.param([*PARTS], [], id="every part", marks=pytest.mark.slow),
    ],
)
def test_the_quick_bench_measures_every_part_and_leaves_a_json_and_a_page(
    parts, words, tmp_path, monkeypatch, capsys
):
    out, finding = tmp_path / "new" / "out", Finding("disk", str(tmp_path), "ok", "written", "")
    monkeypatch.setattr(run_module, "diagnose", lambda folders: [finding])  # test_doctor.py has a real one
    code = run(["bench", "--quick", "--device", "cpu", "--out", str(out), *words])
    assert code == 0, capsys.readouterr()
    assert sorted(path.name for path in out.iterdir()) == ["bench.html", "bench.json"]
    report = json.loads((out / "bench.json").read_text())
    rows = {f"{row['part']}: {row['what']}": row for row in report["rows"]}
    assert [*dict.fromkeys(row["part"] for row in report["rows"])] == parts
    assert {row["status"] for row in rows.values()} == {"done", "passed"}
    assert all(row["figures"] and None not in row["figures"].values() for row in rows.values())
    assert report["machine"]["torch"] == torch.__version__
    assert report["doctor"] == [asdict(finding)]
    reached = machine_from_bench(out / "bench.json").efficiency
    assert reached.source.startswith("measured") and reached.again["selective"] > 0
    assert {*reached.collectives} == ({"none", "full", "selective", "every"} if "links" in parts else set())
    assert report["machine"]["ranks"] == 2 and "2 ranks at once" in rows["speed: the device itself"]["note"]
    exact = [row["figures"] for row in rows.values() if row["part"] == "parity"]
    assert len(exact) == 3 and all(one["fp64: gradients"] < 1e-12 < one["bf16: gradients"] for one in exact)
    step = rows["mfu: tiny Llama, eager"]["figures"]
    assert step["tokens/s"] == pytest.approx(64 / step["ms a step"] * 1e3)
    page = (out / "bench.html").read_text()
    assert "<script" not in page and "http" not in re.sub(r'"http://www\.w3\.org/[^"]*"|http-equiv', "", page)
    assert all(row["what"] in page for row in rows.values())
    said = capsys.readouterr().out
    assert all(name in said for name in rows) and "please send both" in said


def raises():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs():
    time.sleep(60)
    return {}


def differs():
    return {"figures": {"fp64: loss": 1.0}, "status": "differs", "note": "too far"}


def fine():
    return {"figures": {"rate": 2.0, "odd": float("inf")}}


def test_a_part_that_fails_is_a_row_and_the_others_still_run(tmp_path, monkeypatch, capsys):
    chosen = [
        Case("mfu", "raises", raises, note="8 of 32 blocks"),
        Case("mfu", "is killed", is_killed, world=2),
        Case("mfu", "hangs", hangs, seconds=1.0),
        Case("mfu", "differs", differs),
        Case("mfu", "left out", note="one GPU"),
        Case("mfu", "fine", fine),
    ]
    monkeypatch.setattr(run_module, "cases", lambda bench, parts: chosen)
    monkeypatch.setattr(run_module, "diagnose", lambda folders: [])
    assert run(["bench", "--device", "cpu", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["what"]: row for row in report["rows"]}
    assert [row["status"] for row in report["rows"]] == [*["failed"] * 3, "differs", "left out", "done"]
    assert rows["raises"]["note"] == (
        "rank 0 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB; 8 of 32 blocks"
    )
    assert "in raises" in rows["raises"]["output"]
    assert "was killed by SIGKILL" in rows["is killed"]["note"]
    assert "did not end within 1 s" in rows["hangs"]["note"]
    assert rows["fine"]["figures"] == {"rate": 2.0, "odd": None}
    page = (tmp_path / "bench.html").read_text()
    assert "out of memory" in page and "left out" in page


def test_what_would_begin_after_the_time_is_left_out(monkeypatch):
    row = run_module._measured(Case("mfu", "late", fine), seconds_left=1.0, minutes=3.0)
    assert row.status == "left out" and "--minutes" in row.note and "--only mfu" in row.note


def write_files(folder):
    (folder / "file").write_text("mine")
    (folder / "earlier").mkdir()
    (folder / "earlier" / "bench.json").write_text("mine")


REFUSED = {
    "--only mfu,spped": "bench: --only: expected parts among speed, parity, .*, found spped",
    "--device tpu": "bench: --device: expected cpu or cuda, found tpu",
    "--out file": "file: expected a directory, found a file",
    "--out earlier": "earlier: expected a new folder",
}
if not torch.cuda.is_available():
    REFUSED["--device cuda"] = "expected a GPU that torch sees, found none"
test_what_cannot_be_measured_is_refused = refusals(
    Refused(
        words,
        lambda folder, words=words: call_command(folder, "bench", "--quick", *words.split()),
        says,
        given=write_files,
    )
    for words, says in REFUSED.items()
)


def test_no_minutes_are_refused(capsys):
    assert run(["bench", "--quick", "--minutes", "0"]) == 2
    assert "'--minutes': Input should be greater than or equal to 0.1" in capsys.readouterr().err


def on_gpus(count, memory=84e9, room=100e9):
    return Bench("cuda", count, int(memory), int(room), Path("nowhere"))


def test_on_one_gpu_as_many_blocks_are_trained_as_the_planner_lets_fit():
    bench = on_gpus(1)
    chosen = [*cases.cases(bench, ["mfu"])]
    assert [case.what for case in chosen] == [
        f"{size}, {mode}" for size in ("llama-3.2-1b", "llama-3.1-8b") for mode in ("eager", "compiled")
    ]
    for case in chosen:
        recipe = parse_recipe(case.options["recipe"])
        assert cases._planned(case.options["recipe"]) <= 84e9 and recipe.compute == "bfloat16"
        assert recipe.compile == ("compiled" in case.what)
    small, large = (parse_recipe(case.options["recipe"]).model.config for case in chosen[::2])
    assert isinstance(small, dict) and small["num_hidden_layers"] == 16
    assert isinstance(large, dict) and 1 <= large["num_hidden_layers"] < 32
    assert f"{large['num_hidden_layers']} of 32 blocks" in chosen[2].note


def test_layouts_run_on_the_gpus_as_far_as_there_are_and_say_where_not():
    bench = on_gpus(8)
    whole = next(case for case in cases.cases(bench, ["mfu"]) if "8b" in case.what)
    recipe = parse_recipe(whole.options["recipe"])
    assert (recipe.layout.data, recipe.layout.zero, whole.world) == (8, 3, 8)
    assert isinstance(recipe.model.config, dict) and recipe.model.config["num_hidden_layers"] == 32
    assert [case.world for case in cases.cases(bench, ["links"])] == [8]
    for gpus, most in ((8, 8), (1, 4)):
        compared = [*cases.cases(on_gpus(gpus), ["parity"])]
        assert max(case.world for case in compared) == most
        for case in compared:
            assert case.options["device"] == ("cuda" if case.world <= gpus else "cpu")
            assert ("on the CPU over gloo" in case.note) == (case.world > gpus)


def test_what_the_machine_cannot_hold_is_left_out_with_the_reason():
    small = on_gpus(1, memory=5e9, room=1e9)
    left_out = [case for case in cases.cases(small) if case.work is None]
    assert {case.part for case in left_out} == {"links", "mfu", "saving", "conversion"}
    assert all(case.note for case in left_out)


def test_a_piece_that_differs_is_seen_in_the_distance_of_the_gradients():
    right, wrong = torch.ones(4, 4), torch.ones(4, 4)
    wrong[2, 1] += 4.0
    box = Box((2, 0), (4, 4))
    alone = ParallelState.alone()
    for distance, far in ((layouts._norm, 4 / 8**0.5), (layouts._worst, 4.0)):
        assert distance({"w": right}, {"w": (box, True, right[2:])}, alone) == 0.0
        assert distance({"w": right}, {"w": (box, True, wrong[2:])}, alone) == pytest.approx(far)


def strict(**options):
    layouts.BOUNDS["fp64"] = -1.0
    return layouts.compare_layout(**options)


def test_a_layout_beyond_its_bound_differs():
    case = Case("parity", "one process", strict, {"layout": {}, "device": "cpu"})
    row = run_module._measured(case, seconds_left=100.0, minutes=10.0)
    assert row.status == "differs" and "fp64 -1" in row.note


def test_the_link_s_rate_is_the_sum_of_a_gpu_s_links():
    text = "GPU 0: NVIDIA H100 80GB HBM3\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    assert speed.link_rate(text) == pytest.approx(53.124) and speed.link_rate("") == 0.0


def test_a_group_of_parameters_is_never_sent_faster_than_in_a_loop(monkeypatch):
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    tiny, wide = dict(zip(kinds, (2e-3, -1e-3, 1e-3), strict=True)), dict.fromkeys(kinds, 6e-3)
    exchanges = {16: (tiny, 1), 256: (wide, 4_000_000)}
    monkeypatch.setattr(blocks, "_exchanges", lambda world, width, rounds: exchanges[width])
    loop = {"all-reduce: GB/s": 5.0, "all-gather: GB/s": 0.25, "reduce-scatter: GB/s": 5.0}
    assert blocks.exchange_figures(2, loop, 1) == pytest.approx({
        "all-reduce of a tiny block: us": 2000, "all-reduce of a block: GB/s": 1.0,
        "all-gather of a tiny block: us": 0, "all-gather of a block: GB/s": 0.25,
        "reduce-scatter of a tiny block: us": 1000, "reduce-scatter of a block: GB/s": 0.4,
    })  # fmt: skip


def test_the_page_escapes_what_comes_from_elsewhere():
    harm = "<script>alert(1)</script>"
    rows = [
        Row("mfu", harm, "failed", {harm: harm, "peak: GB": 3.0, "planned: GB": 2.0}, harm, 1.0, harm),
        Row("mfu", "good", "done", {"MFU, causal": 0.5, "peak: GB": 1.0, "planned: GB": 2.0}),
    ]
    page = make_page(Report({harm: harm}, [Finding(harm, harm, "ok", harm, harm)], rows))
    assert harm not in page and page.count("&lt;script&gt;") > 8


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (0.48123, "0.4812"), (4.9e-16, "4.9e-16"), (None, "not finite"), ("a", "a")],
)
def test_figures_have_four_digits(value, text):
    assert shown_figure(value) == text


def late(call, seconds):
    def wrapped(*given, **named):
        time.sleep(seconds)
        return call(*given, **named)

    return wrapped


def _slow_gathers_and_sums():
    """Delay each gather of a block by 10 ms and each sum by 30 ms; return what is clocked, after one pass
    and after a second one that is not clocked.
    """
    state = ParallelState.start(Layout.of(data=2, zero=3))
    model = built(TINIEST_LLAMA, state=state, device="cpu")
    shard_over_data(model, state, Precision())
    initialize(model, 0, state=state)
    modules = engine.fsdp_modules(model.layers)
    group = next(iter(engine.fully_sharded.groups_of(modules)))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        for collective, seconds in ((group._all_gather_comm, 0.01), (group._reduce_scatter_comm, 0.03)):
            patch.setattr(type(collective), "__call__", late(type(collective).__call__, seconds))
        with clocked(modules) as spent:
            model(ids).sum().backward()
        once = dict(spent)
        model(ids).sum().backward()
    wrapped = any("unshard" in vars(group) for group in engine.fully_sharded.groups_of(modules))
    each = {name: seconds / len(modules) for name, seconds in once.items()}
    return each, {name: seconds - once[name] for name, seconds in spent.items()}, wrapped


def test_a_clock_holds_what_blocks_gather_and_sum_meanwhile_and_nothing_else():
    for once, later, wrapped in run_parallel(_slow_gathers_and_sums, 2):
        assert once["all_gather"] >= 2 * 0.01  # in forward and in backward
        assert once["reduce_scatter"] >= 0.03
        assert later == {"all_gather": 0, "reduce_scatter": 0} and not wrapped


def _tiny_exchanges():
    """Time one round in which the sums of a model's groups add 7 s."""
    seconds = cycle((7.0, 0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "seconds_of", lambda work: (work(), next(seconds))[1])
        return blocks._exchanges(2, 16, rounds=1)


def test_each_kind_of_collective_is_timed_for_a_block():
    for found, size in run_parallel(_tiny_exchanges, 2, timeout=200):
        assert set(found) == {"all_gather", "reduce_scatter", "all_reduce"}
        assert found["all_gather"] > 0 and found["reduce_scatter"] > 0
        assert found["all_reduce"] == 1  # six blocks, and the root
        assert size == 4 * (4 * 16 * 16 + 3 * 16 * 44 + 2 * 16)
