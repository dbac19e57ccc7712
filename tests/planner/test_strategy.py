"""Reasons and warnings about the fastest layout are true; plans that cannot be are refused."""

import json
import re
from dataclasses import replace

import pytest
from support.command_lines import call_command
from support.configs import FOLDER
from support.refusals import Refused, refusals
from trilith.parallel_state import Layout
from trilith.planner.search import Choice, Found, find_layouts, read_request
from trilith.planner.search.evaluate import Evaluator
from trilith.planner.search.strategy import critical_batch, reasons, strategy, warnings
from trilith.planner.time import machine_named
from trilith.simulation.model_flops import Parameters

DENSE, EXPERTS = (
    json.loads((FOLDER / "search" / f"{name}.json").read_text())
    | {"num_hidden_layers": 4, "num_key_value_heads": 8, **changes}
    for name, changes in (("dense", {}), ("experts", {"num_experts": 8}))
)


def request_for(folder, config, gpus, node, **given):
    file = folder / "model.json"
    file.write_text(json.dumps(config))
    given = {"sequence_length": 2048, "global_batch": 16} | given
    return read_request(str(file), machine_named("rtx-4090", gpus_per_node=node), gpus, **given)


def only(request, choice):
    return Found(request, best=[Evaluator(request).answer(choice)])


def reason(found):
    first, second = reasons(found)
    assert first.startswith("This is ") and first.endswith(".") and second.endswith(".")
    return second


@pytest.mark.parametrize(("node", "where"), [(8, "inside a node"), (2, "over nodes")])
def test_a_reason_says_where_the_pipeline_and_the_tensor_ranks_are(tmp_path, node, where):
    request = request_for(tmp_path, DENSE, 4, node)
    second = reason(only(request, Choice(Layout.of(pipeline=4))))
    assert f"pipeline ranks cut the blocks {where}, send little" in second
    second = reason(only(request, Choice(Layout.of(tensor=4, sequence=True))))
    assert f"tensor ranks cut every product {where}" in second
    assert ("over its fast link" in second) == (node == 8)


def test_a_reason_says_what_one_zero_stage_less_would_need_or_take(tmp_path):
    room = request_for(tmp_path, DENSE, 4, 8)
    small = replace(room, room=4_000_000_000)
    for zero in (1, 2, 3):
        choice = Choice(Layout.of(data=4, zero=zero))
        less = Evaluator(room).answer(replace(choice, layout=Layout.of(data=4, zero=zero - 1)))
        assert less.bytes > small.room
        assert f"(with ZeRO {zero - 1} a GPU needs {less.bytes / 1e9:.1f} GB)" in reason(only(small, choice))
        told = re.search(
            rf"\(ZeRO {zero - 1} fits too, and its step takes (.+?)\)", reason(only(room, choice))
        )
        more = less.time.seconds / Evaluator(room).answer(choice).time.seconds - 1
        assert told and told[1] == ("as long" if abs(more) < 0.0005 else f"{100 * more:.1f} % longer")
    assert "share no weights" in reason(only(room, Choice(Layout.of(data=4))))
    alone = reason(only(room, Choice(Layout.of(data=4, zero=3, data_replicate=4))))
    assert "share no weights" in alone and "sum gradients beside each micro-batch" in alone
    assert "the data and context ranks share moments" in reason(
        only(room, Choice(Layout.of(data=2, context=2, zero=1)))
    )


def test_a_reason_says_what_a_layout_without_an_axis_takes(tmp_path):
    """Of the fastest layouts some have no pipeline ranks, and all have tensor ranks."""
    found = find_layouts(request_for(tmp_path, DENSE, 4, 1, global_batch=2))
    best, *others = found.best
    assert best.choice.layout.tensor > 1 and all(other.choice.layout.tensor > 1 for other in others)
    without = next(other for other in others if other.choice.layout.pipeline == 1)
    more = 100 * (without.time.seconds / best.time.seconds - 1)
    assert re.findall(r"(tensor|pipeline) ranks cut [^;]*\((.*?)\)[;.]", reason(found)) == [
        ("tensor", "without them no layout fits, or its step takes more than 3 times as long"),
        ("pipeline", f"without them a step takes {more:.1f} % longer"),
    ]
    alike = replace(found, best=[best] * 10)
    assert (
        reason(alike).count("ranks cut") == reason(alike).count("(all of the 10 fastest layouts do so)") == 2
    )


def test_sizes_of_a_small_model_are_not_rounded_away(tmp_path):
    tiny = {**DENSE, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    request = request_for(tmp_path, tiny, 1, 8, global_batch=2048)
    second = reason(only(request, Choice(Layout())))
    states = 16 * (2 * 256 * 64 + 64 + 4 * (2 * 64 + 4 * 64 * 64 + 3 * 64 * 128))
    assert f"take {states / 1e6:.4g} MB" in second and "nothing has to be cut" in second
    (line,) = warnings(request, Evaluator(request).answer(Choice(Layout())))
    critical = re.search(r"4\.2 M tokens is beyond the critical batch of about ([\d,]+) ", line)
    assert critical and 100 < int(critical[1].replace(",", "")) < 100_000


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (Layout(), "one GPU"),
        (Layout.of(data=8), "data parallelism (DDP)"),
        (Layout.of(data=8, zero=3), "ZeRO 3 (FSDP)"),
        (Layout.of(data=8, zero=3, data_replicate=2), "ZeRO 3 (FSDP) in replicas (HSDP)"),
        (Layout.of(data=8, zero=3, data_replicate=8), "data parallelism (DDP)"),
        (Layout.of(tensor=2, data=4, zero=1), "ZeRO 1, 2 tensor ranks"),
        (
            Layout.of(tensor=2, pipeline=2, data=2),
            "3D parallelism: data parallelism (DDP), 2 pipeline ranks, 2 tensor ranks",
        ),
        (Layout.of(context=2, ring=True), "data parallelism (DDP), 2 context ranks around a ring"),
        (Layout.of(data=8, zero=1, expert=4), "ZeRO 1, 4 expert ranks"),
    ],
)
def test_a_strategy_has_the_name_that_tutorials_use(layout, word):
    assert strategy(layout) == word


@pytest.mark.parametrize(
    ("config", "layout", "node", "word"),
    [
        (DENSE, Layout.of(tensor=4, data=2), 2, "tensor=4 leaves the node of 2 GPUs"),
        (DENSE, Layout.of(tensor=2, data=4), 2, ""),
        (DENSE, Layout.of(tensor=2, data=4), 3, "tensor=2 leaves the node of 3 GPUs"),
        (DENSE, Layout.of(tensor=8), 8, ""),
        (EXPERTS, Layout.of(data=8, expert=8), 4, "expert=8 x tensor=1 crosses the node of 4 GPUs"),
        (EXPERTS, Layout.of(tensor=2, data=4, expert=4), 4, "expert=4 x tensor=2 crosses the node of 4 GPUs"),
        (EXPERTS, Layout.of(data=8, expert=4), 4, ""),
    ],
)
def test_a_plan_warns_when_tensor_or_expert_ranks_leave_a_node(tmp_path, config, layout, node, word):
    request = request_for(tmp_path, config, 8, node)
    found = warnings(request, Evaluator(request).answer(Choice(layout)))
    assert [line for line in found if line.startswith(word)] if word else found == []


def test_a_plan_warns_beyond_the_critical_batch_unless_adapters_are_trained(tmp_path):
    for tokens, warned in ((1e9, True), (1e16, False)):
        request = request_for(tmp_path, DENSE, 1, 8, global_batch=1024, tokens=tokens)
        found = warnings(request, Evaluator(request).answer(Choice(Layout())))
        assert [line for line in found if "critical batch" in line] == found and bool(found) == warned
    request = request_for(tmp_path, DENSE, 1, 8, global_batch=1024, lora=8)
    assert warnings(request, Evaluator(request).answer(Choice(Layout()))) == []


def test_the_critical_batch_of_experts_counts_what_a_token_uses(tmp_path):
    """2 of 8 experts: the loss law takes the parameters of a dense model that does as much for each token."""
    request = request_for(tmp_path, EXPERTS, 1, 8, global_batch=1024)
    block = 4 * 1024 * 8 * 128 + 2 * 128 + 2 * 1024 + 8 * 1024  # attention, norms, router
    active, every = (2 * 32000 * 1024 + 1024 + 4 * (block + n * 3 * 1024 * 1408) for n in (2, 8))
    assert request.parameters == Parameters(whole=every, trained=every, active=active)
    for tokens, used in ((None, 20 * active), (1e11, 1e11)):
        request = replace(request, tokens=tokens)
        (line,) = warnings(request, Evaluator(request).answer(Choice(Layout())))
        assert f"critical batch of about {critical_batch(active, used) / 1e6:.1f} M" in line
        stated = re.search(r"for (\S+) parameters that a token uses and (\S+) tokens", line)
        assert stated and [*map(float, stated.groups())] == pytest.approx([active, used], rel=0.005)
        assert f"{critical_batch(every, used) / 1e6:.1f} M" not in line
    dense = request_for(tmp_path, DENSE, 1, 8, global_batch=1024)
    (line,) = warnings(dense, Evaluator(dense).answer(Choice(Layout())))
    assert "parameters and" in line and "that a token uses" not in line


def test_a_plan_warns_of_the_memory_that_offload_takes_from_a_node(tmp_path):
    for gpus, ranks in ((2, 2), (8, 4)):
        request = request_for(tmp_path, DENSE, gpus, 4)
        answer = Evaluator(request).answer(Choice(Layout.of(data=gpus), offload=True))
        (line,) = warnings(request, answer)
        assert (
            line == f"offload needs {answer.memory[0].host * ranks / 1e9:,.0f} GB of each node's own memory: "
            "see that a node has it, or take more GPUs"
        )


def inputs(folder):
    (folder / "empty").mkdir()
    (folder / "taken.toml").touch()
    (folder / "bench.json").write_text("{}")
    (folder / "unknown.json").write_text('{"model_type": "unknown"}')


def plan(why, says, *words, gpus="2", model="llama-3.2-1b"):
    words = ["plan", model, *(["--gpus", gpus] if gpus else []), *words]
    return Refused(why, lambda folder: call_command(folder, *words), says, given=inputs)


SMALL = ("--sequence-length", "512", "--global-batch", "4")
SMALL_GPU = "--gpu-type rtx-4090 --sequence-length 1024 --global-batch 4 --headroom"
LARGE_MODEL = {"gpus": "1", "model": "llama-3.1-8b"}
LITTLE_ROOM = "--gpu-type l40s --sequence-length 2048 --generate --headroom 0.9 --dtype float32"

test_plans_that_cannot_be_are_refused = refusals(
    plan("dtype", "--dtype", "--dtype", "float32"),
    plan("price-without-tokens", "--tokens", "--price", "2"),
    plan("tokens", "--tokens", "--tokens", "0.5"),
    plan("price", "--price", "--tokens", "1B", "--price", "cheap"),
    plan("two-outputs-in-one-file", "--html", "--write", "one.toml", "--html", "./one.toml"),
    plan("no-folder-for-the-page", "nowhere", "--html", "nowhere/page.html"),
    plan("taken", "taken.toml", "--write", "taken.toml"),
    plan("folder-without-config", "config.json", model="empty"),
    plan("unknown-model-type", "model_type", model="unknown.json"),
    plan("no-gpus", "--gpus", gpus=None),
    plan("gpus-of-0", "--gpus: expected numbers from 1 to 16,777,216", gpus="8,0"),
    plan("no-such-gpu", "h100-80gb", "--gpu-type", "h1000"),
    plan("no-layout-for-the-number", "--gpus", "--global-batch", "8", "--sequence-length", "64", gpus="17"),
    plan("no-layout-for-any-number", "plan llama-3.2-1b: --gpus", *SMALL, gpus="17,19"),
    plan("recipe-of-several-plans", "--write", *SMALL, "--write", "recipe.toml", gpus="1,2"),
    plan("recipe-of-generation", "--write", "--generate", "--write", "recipe.toml"),
    plan("bench-of-nothing", "bench.json", "--machine", "bench.json"),
    plan("rows-that-do-not-fit", "Take more --gpus", *LITTLE_ROOM.split()),
    plan(
        "model-that-does-not-fit",
        r"of 3.6 GB.*What would fit: --gpus 64 with memory.offload \(3.4 GB\)$",
        *(*SMALL_GPU.split(), "0.85"),
        **LARGE_MODEL,
    ),
    plan(
        "model-that-fits-on-more-with-offload-and-without",
        r"What would fit: --gpus 2 with memory.offload \(12.3 GB\); or --gpus 16 \(12.2 GB\); or --gpu-type",
        *(*SMALL_GPU.split(), "0.4"),
        **LARGE_MODEL,
    ),
    Refused("no-such-model", lambda _: read_request("no-such", machine_named("l40s"), 4), "published size"),
)
