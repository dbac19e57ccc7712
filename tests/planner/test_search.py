"""A search finds the fastest legal layouts that fit, as timing every one does, and says why others fall."""

import json
import multiprocessing
import os
import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import support
from support.configs import FOLDER
from trilith.cli.app import run
from trilith.parallel_state import BadInput, Layout
from trilith.planner.dry_run import dry_run
from trilith.planner.search import Choice, find_layouts, groups, read_request
from trilith.planner.search.candidates import candidates
from trilith.planner.search.choice import Reason, Tally, recipe_of
from trilith.planner.search.evaluate import Answer, Evaluator
from trilith.planner.search.find import LONGEST, SHOWN, simplest_first, ties
from trilith.planner.search.pages import make_page
from trilith.planner.search.shortage import none_legal
from trilith.planner.search.strategy import critical_batch
from trilith.planner.time import machine_named
from trilith.planner.time.stage_timer import StageTimer
from trilith.recipes import load_recipe

MACHINE = machine_named("l40s", gpus_per_node=2)


def request_of_llama(**more):
    return read_request("llama-3.2-1b", MACHINE, 4, sequence_length=8192, global_batch=8, **more)


@pytest.fixture(scope="module")
def result():
    return find_layouts(request_of_llama())


@pytest.mark.parametrize("device", ["a GPU", "a CPU"])
def test_a_search_and_a_dry_run_call_the_same_layouts_fitting(tmp_path, device):
    """The fastest layout fits to the byte, and with a byte less of the device in neither."""
    machine = MACHINE if device == "a GPU" else replace(MACHINE, asynchronous=False)
    sizes = {"sequence_length": 2048, "global_batch": 8, "headroom": 0.25}
    best = find_layouts(read_request("smollm2-135m", machine, 2, **sizes)).best[0]
    for spare, fits in ((0, True), (-1, False)):
        room = best.bytes + spare
        memory = next(size for size in count(4 * room // 3) if int(size * 0.75) == room)
        request = read_request("smollm2-135m", replace(machine, memory=float(memory)), 2, **sizes)
        recipe = recipe_of(request, best.choice)
        planned = dry_run(recipe)
        assert (planned.rank.total, planned.rank.reserved) == (best.bytes, best.reserved)
        assert planned.room == request.room == best.bytes + spare
        assert (best.choice in {answer.choice for answer in find_layouts(request).timed}) is fits
        if fits:
            planned.check("recipe")
        else:
            with pytest.raises(BadInput, match="75% of the device's"):
                planned.check("recipe")
    if device == "a CPU":  # whose host is no other memory
        small = read_request("smollm2-135m", replace(machine, memory=1.4e9), 2, **sizes)
        with pytest.raises(BadInput, match=r"What would fit: --gpus \d+ \([\d.]+ GB\)$"):
            find_layouts(small)


def test_where_no_layout_is_legal_the_commonest_reason_of_an_illegal_one_is_named():
    tally = Tally()
    tally.add(Reason("not tried", "context", 9, "context 2"))
    for key, layouts in (("data.global_batch", 2), ("micro-batches", 3)):
        tally.illegal(BadInput("recipe", key, expected=f"another {key}", found=1), layouts)
    assert "Most often: expected another micro-batches, found 1" in str(none_legal(request_of_llama(), tally))


def test_every_layout_is_accounted_for(result):
    counted = sum(one.layouts for one in result.tally if one.kind in ("memory", "slower"))
    assert counted + len(result.best) == result.legal == result.settled


def test_a_search_with_offload_counts_no_illegal_layout_again():
    sizes = {"sequence_length": 64, "global_batch": 8}
    without, offloaded = (
        find_layouts(read_request("smollm2-135m", replace(MACHINE, memory=memory), 2, **sizes))
        for memory in (8e9, 4e9)
    )
    assert offloaded.best[0].choice.offload and not without.best[0].choice.offload
    for kind in ("not legal", "not tried"):
        assert offloaded.tally.count(kind) == without.tally.count(kind) > 0


def test_a_refused_layout_is_told_by_its_key_and_what_was_expected(result):
    refused = [one for one in result.tally if one.kind == "not legal"]
    assert refused
    for one in refused:
        assert one.example.startswith("expected ") and one.text not in one.example.split(", found")[0], one


def test_few_layouts_are_timed_and_stages_alike_are_priced_once(monkeypatch):
    priced, exact = list[object](), list[object]()
    of_stage, of_one = StageTimer._of_stage, Evaluator.least

    def stage(self, *given):
        priced.append(self)
        return of_stage(self, *given)

    def least(self, choice):
        exact.append(choice)
        return of_one(self, choice)

    monkeypatch.setattr(StageTimer, "_of_stage", stage)
    monkeypatch.setattr(Evaluator, "least", least)
    result = find_layouts(request_of_llama())
    assert 20 * len(result.timed) < result.legal and 2 * len(priced) < result.legal
    assert 2 * len(exact) < result.legal and len(set(exact)) == len(exact)


def test_processes_that_share_a_search_find_what_one_does(result, monkeypatch):
    """Also the reasons and their examples are equal; an error of a process ends the search, and all end."""
    monkeypatch.setattr(groups, "_CUTS_OF_PROCESS", 1)
    shared = find_layouts(request_of_llama(), processes=3)
    for name in ("best", "timed"):
        of_both = [[(answer.choice, answer.bytes, answer.time) for answer in getattr(search, name)]
                   for search in (result, shared)]  # fmt: skip
        assert of_both[0] == of_both[1]
    assert [*shared.tally] == [*result.tally] and shared.legal == result.legal

    def fail(self, choice):
        raise ArithmeticError(str(os.getpid()))

    monkeypatch.setattr(Evaluator, "least", fail)
    with pytest.raises(ArithmeticError) as raised:
        find_layouts(request_of_llama(), processes=3)
    assert str(raised.value) != str(os.getpid()) and not multiprocessing.active_children()


def test_a_reason_names_the_rank_the_figures_and_the_largest_part():
    result = find_layouts(request_of_llama(headroom=0.7))
    memory = [one for one in result.tally if one.kind == "memory"]
    assert memory
    for one in memory:
        needs = re.match(r"pipeline rank \d+ needs ([\d.]+) of ([\d.]+) GB: ", one.example)
        assert needs and float(needs[1]) > float(needs[2]) == pytest.approx(result.request.room / 1e9)
        assert f": {one.text} " in one.example


def test_the_page_is_whole_and_has_no_address(result):
    page = make_page(result)
    staged = make_page(replace(result, best=[one for one in result.best if one.choice.layout.pipeline > 1]))
    assert page.startswith("<!DOCTYPE html>") and (page.count("<svg"), staged.count("<svg")) == (2, 3)
    assert ">rank 1</text>" in staged
    assert page.count("http://") == page.count("http://www.w3.org") and "https://" not in page
    assert "The other layouts" in page and "prefers-color-scheme: dark" in page


def told(capsys, words):
    """Return what the command of these words says as JSON, and as text."""
    assert run([*words.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert run(words.split()) == 0
    return document, capsys.readouterr().out


def test_several_numbers_of_gpus_and_rows_are_a_table(capsys):
    words = "plan llama-3.2-1b --gpus 1,2 --sequence-length 512,1024 --global-batch 4"
    searches, shown = told(capsys, words)
    assert [search["gpus"] for search in searches] == [1, 1, 2, 2]
    assert "tokens" in shown and "of a row" in shown and shown.count("1,024") >= 2


def test_generation_lists_layouts_by_the_rows_that_fit(capsys):
    words = "plan llama-3.2-1b --gpus 2 --gpu-type l40s --sequence-length 2048 --generate"
    layouts, shown = told(capsys, words)
    assert {(layout["tensor"], layout["pipeline"]) for layout in layouts} == {(1, 2), (2, 1)}
    rows = [layout["rows_that_fit"] for layout in layouts]
    assert rows == sorted(rows, reverse=True) and rows[-1] > 16 and layouts[0]["rows"] == 16
    first, *shown = shown.splitlines()
    assert first.startswith("llama-3.2-1b on l40s") and "GB of the rank that needs most" in first
    assert "bfloat16" in first and "a GPU may hold 44.2 GB" in first and "reading" in "".join(shown)


def test_adapters_fit_where_the_whole_model_cannot_be_trained(capsys):
    # So many rows do not fit in one micro-batch; several micro-batches need gradients in whole.
    words = "plan llama-3.1-8b --gpus 1 --gpu-type l40s --sequence-length 1024 --global-batch 64"
    assert run(words.split()) == 2
    capsys.readouterr()
    assert told(capsys, f"{words} --lora 16")[0]["layouts"][0]["bytes"] < 48e9


def test_a_plan_for_a_measured_cpu_is_a_recipe_for_it(tmp_path, capsys):
    bench, recipe = Path(support.__path__[0]) / "bench.json", tmp_path / "recipe.toml"
    words = ["smollm2-135m", "--gpus", "2", "--sequence-length", "512", "--global-batch", "8", "--json"]
    assert run(["plan", *words, "--machine", str(bench), "--write", str(recipe)]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["seconds"] > 0
    written = load_recipe(recipe)
    assert (written.device, written.compute, written.layout.world) == ("cpu", None, 2)


def test_the_critical_batch_follows_from_the_loss():
    """At a loss of 1 nat it is 2e8 tokens (Kaplan et al. 2020), and at a higher loss less."""
    assert 1e6 < critical_batch(1e9, 2e10) < critical_batch(4e11, 1.5e13) < 2e8


def request_of(name, headroom, gpus):
    machine = machine_named("rtx-4090", gpus_per_node=2)
    path = str(FOLDER / "search" / f"{name}.json")
    return read_request(path, machine, gpus, sequence_length=2048, global_batch=4, headroom=headroom)


def test_a_layout_takes_as_long_whatever_was_timed_before():
    """Stages that are alike share seconds, but a rank of a V holds both ends beside them."""
    request = request_of("dense", 0.08, 4)
    stages = {"pipeline": 2, "data": 2, "virtual_stages": 2}
    cut = Choice(Layout.of(**stages), "interleaved-zero-bubble")
    in_v = Choice(Layout.of(**stages, v_shape=True), "zbv")
    alone = {choice: Evaluator(request).answer(choice).time.parts for choice in (cut, in_v)}
    for order in ((cut, in_v), (in_v, cut)):
        evaluator = Evaluator(request)
        assert [evaluator.answer(choice).time.parts for choice in order] == [alone[one] for one in order]


def every_layout(request):
    evaluator = Evaluator(request)
    for cut in candidates(request, Tally()):
        for flow in cut.flows:
            for mode in flow.modes:
                for store in cut.stores:
                    vars(evaluator).pop("_stage_timer", None)  # seconds that several layouts share
                    try:
                        yield cut, flow, store, evaluator.answer(cut.choice(flow, mode, store))
                    except BadInput:  # building a layer may refuse what the config allows
                        continue


#: The room is so small that many layouts do not fit.
CASES = [
    ("dense", 0.82, 4),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in
      [("windows", 0.8, 4), ("experts", 0.82, 4), ("latents", 0.82, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "headroom", "gpus"), CASES)
def test_the_ten_best_are_those_of_all_layouts(name, headroom, gpus):
    request = request_of(name, headroom, gpus)
    evaluator, fastest = Evaluator(request), dict[object, Answer]()
    for cut, flow, store, answer in every_layout(request):
        choice, seconds = answer.choice, answer.time.seconds
        least = [evaluator.least_of_rows(cut, flow), evaluator.least_of_flow(cut, flow)]
        least += [evaluator.least(choice)]
        least += [evaluator.least_of_stores(cut, flow, choice.checkpointing, (store,))]
        assert max(least) <= seconds * (1 + 1e-12), choice
        if answer.bytes <= request.room:
            known = fastest.setdefault(choice.cut, answer)
            fastest[choice.cut] = min(known, answer, key=lambda answer: answer.time.seconds)
    result, best = find_layouts(request), sorted(fastest.values(), key=lambda answer: answer.time.seconds)
    assert result.tally.count("memory") > 0 and len(best) > 1
    tied = sum(ties(answer, best[0]) for answer in best)
    near = [answer for answer in best if answer.time.seconds <= LONGEST * best[0].time.seconds]
    shown = simplest_first(near[: max(SHOWN, tied)])[:SHOWN]
    assert [answer.time.seconds for answer in result.best] == [answer.time.seconds for answer in shown]
