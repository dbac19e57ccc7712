"""A predicted step: its parts add up, and follow the formulas where these hold."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.configs import MODELS
from trilith.models import family_of, published_size
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.pipeline import timetable
from trilith.pipeline.timetable import UNIT_COSTS, layout_of, step_length
from trilith.planner import Work, sampled
from trilith.planner.communication import group_of
from trilith.planner.time import MACHINES, PARTS, StepTimer, machine_from_bench, machine_named
from trilith.planner.time.collectives import Links
from trilith.planner.time.prediction import rank_step
from trilith.planner.time.stage_timer import Kernels
from trilith.simulation.recorder import Operator
from trilith.simulation.trace import Trace

H100 = machine_named("h100-80gb")


def predicted(size, layout, machine=H100, **given):
    raw = dict(published_size(size).with_fields({})) if isinstance(size, str) else size
    family = family_of(raw)
    config = family.from_hf(raw)
    options = {"compiled": given.pop("compiled", True)}
    shape = {"sequence_length": 4096, "micro_batch": 1, "micro_batches": 8, "compute": 2} | given
    work = Work(ParallelState.stand_in(layout), config.hidden_size, **shape)
    return StepTimer(sampled(family, config, layout), work, machine, **options).time()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout.of(tensor=2, data=4, zero=3), {"checkpointing": "full"}),
        (Layout.of(data=2, pipeline=4, zero=1), {}),
        (Layout.of(context=2, pipeline=2, virtual_stages=2, v_shape=True), {"schedule": "zbv"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("machine", [H100, replace(H100, asynchronous=False)], ids=("beside", "waits"))
def test_a_rank_s_step_has_the_seconds_of_each_part(layout, options, machine):
    time = predicted("llama-3.2-1b", layout, machine, micro_batches=8, **options)
    spans = rank_step(options.get("schedule", "1f1b"), layout, 8, time)
    assert all(left.start + left.seconds == right.start for left, right in pairwise(spans))
    seconds = Counter()
    for span in spans:
        seconds[span.part] += span.seconds
    assert layout.pipeline > 1 or not {"bubble", "pipeline"} & seconds.keys()
    waits = {"bubble", "pipeline"}  # of which the prediction says how much less it would be without messages
    for part in {*PARTS} - waits:
        assert seconds[part] == pytest.approx(time.parts[part], rel=1e-8), part
    assert sum(seconds.values()) == pytest.approx(time.seconds, rel=1e-7)
    assert tuple(time.parts) == PARTS and min(time.parts.values()) >= 0
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert time.rate * time.seconds == pytest.approx(layout.data * 8 * 4096)
    assert 0 < time.mfu.causal < time.mfu.full < 1
    assert (time.parts["tensor"] > 0) == (layout.tensor > 1)
    assert (time.parts["pipeline"] > 0) == (layout.pipeline > 1) == (min(time.busy) < max(time.busy))
    # The rank that holds both ends of a V has most to do, and the others wait for it.
    assert (time.parts["bubble"] > 0) == (layout.pipeline > 1 and not layout.v_shape)
    assert max(time.busy) <= time.seconds
    assert len(time.busy) == layout.pipeline and len(time.stages) == layout.stages


@pytest.mark.parametrize(
    ("layout", "gpus"),
    [
        (Layout.of(tensor=3, data=8, zero=1), 8),  # 6 to 8 straddle two nodes, 0 to 2 do not
        (Layout.of(tensor=2, data=6, zero=2), 3),
        (Layout.of(tensor=2, data=6, zero=2), 6),
        (Layout.of(data=6, pipeline=4, expert=3), 4),
        (Layout.of(tensor=2, context=3, pipeline=3, data=2), 4),
        (Layout.of(tensor=8, data=4, pipeline=2), 8),
        (Layout.of(context=6, data=2, data_replicate=2, zero=3), 8),
        (Layout.of(tensor=5, pipeline=3), 4),
    ],
)
def test_the_group_of_an_axis_is_timed_that_lies_worst(layout, gpus):
    """Against all groups, one rank at a time."""
    links = Links(layout, replace(H100, gpus=gpus))
    for axis in ("tensor", "context", "expert", "data", "pipeline"):
        ranks, stride = group_of(layout, axis)
        groups = {
            frozenset(block + place + number * stride for number in range(ranks))
            for block in range(0, layout.world, ranks * stride)
            for place in range(stride)
        }
        on = [Counter(rank // gpus for rank in group) for group in groups]
        worst = max((len(one), -min(one.values())) for one in on)
        assert (links.place(axis).nodes, -links.place(axis).together) == worst, axis


def test_a_collective_takes_the_link_that_it_runs_on():
    """A ring of n ranks sends 2 (n - 1) / n of the bytes; over nodes at the rate of the network."""
    size = 1e9
    inside = Links(Layout.of(tensor=8), H100)
    over = Links(Layout.of(tensor=8, data=4, zero=1), H100)
    share = H100.efficiency.link("all_reduce")
    assert inside.seconds("tensor", "all_reduce", size) == pytest.approx(
        2 * 7 / 8 * size / 450e9 / share, rel=0.02
    )
    gathered = over.seconds("data", "all_gather", size)
    assert gathered == pytest.approx(3 * size / 50e9 / share, rel=0.02)
    wide = Links(Layout.of(data=32, zero=1), H100)  # eight ranks of a node send over eight links
    assert wide.rate("data") == min(450e9, 8 * 50e9) * share
    assert inside.seconds("data", "all_reduce", size) == 0
    small = Links(Layout.of(data=1024), H100).seconds("replicas", "all_reduce", 8)
    assert small < 2 * 127 * H100.between.latency  # a tree: by halves of the nodes


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]
)
def test_many_micro_batches_take_as_long_as_their_whole_timetable(name):
    layout = layout_of(name, 4)
    costs = [{"F": 1 + stage % 3 / 4, "B": 2.5, "I": 1.25, "W": 1.25} for stage in range(layout.stages)]
    for sending in (0.0, 0.1):
        whole = timetable(name, layout, 44, costs, sending).length
        assert step_length(name, layout, 44, costs, sending) == pytest.approx(whole, rel=1e-9)
    assert timetable(name, layout, 12, costs, 0.5).length > timetable(name, layout, 12, costs).length


def test_the_slowest_stage_sets_the_pace():
    layout = layout_of("1f1b", 4)
    costs = [dict(UNIT_COSTS) for _ in range(4)]
    even = step_length("1f1b", layout, 64, costs, 0.0)
    costs[3] = {kind: 1.5 * cost for kind, cost in UNIT_COSTS.items()}
    assert step_length("1f1b", layout, 64, costs, 0.0) == pytest.approx(1.5 * even, rel=0.05)


def test_what_a_layout_or_a_machine_lacks_costs_time():
    """Each change names what must grow, and by what it differs from the first step."""
    layout = Layout.of(tensor=8, sequence=True, data=2, zero=1)
    first = predicted("llama-3.1-8b", layout)
    full = predicted("llama-3.1-8b", layout, checkpointing="full")
    half = predicted("llama-3.1-8b", layout, checkpointing="selective")
    assert full.parts["recompute"] > half.parts["recompute"] > first.parts["recompute"] == 0
    assert full.parts["compute"] == first.parts["compute"]
    # A tensor group over two nodes
    assert predicted("llama-3.1-8b", layout, replace(H100, gpus=4)).parts["tensor"] > first.parts["tensor"]
    slow = replace(H100, between=replace(H100.between, rate=1e9))
    assert predicted("llama-3.1-8b", layout, slow).parts["data"] > first.parts["data"]
    assert predicted("llama-3.1-8b", layout, slow).parts["tensor"] == first.parts["tensor"]
    offloaded = predicted("llama-3.1-8b", layout, offload=True)
    assert offloaded.parts["optimizer"] > first.parts["optimizer"]
    eager = predicted("llama-3.1-8b", layout, compiled=False)
    assert eager.parts["compute"] > first.parts["compute"]
    sharded = predicted("llama-3.1-8b", Layout.of(tensor=8, sequence=True, data=2, zero=3), slow)
    assert sharded.parts["data"] > predicted("llama-3.1-8b", layout, slow).parts["data"]
    # FSDP copies what it gathered, and gradients before their sum, in the device's memory: with ZeRO 3 at
    # every micro-batch, nothing of which is hidden.
    zero, memory = Layout.of(data=8, zero=3), replace(H100, bandwidth=H100.bandwidth / 2)
    once, twice = (predicted("llama-3.1-8b", zero, one).parts["data"] for one in (H100, memory))
    group = 8.03e9 * (2 * 2 * 2 + 2 + 4) * 8 / (H100.bandwidth * H100.efficiency.memory)
    assert twice - once == pytest.approx(group, rel=0.05)


def test_experts_that_leave_a_node_are_waited_for_longer():
    near, far = (Layout.of(data=8, zero=1, expert=4), Layout.of(tensor=4, data=8, zero=1, expert=4))
    model = MODELS["qwen3_moe"]
    none = predicted(model, Layout.of(data=8, zero=1), sequence_length=64)
    inside, outside = (predicted(model, one, sequence_length=64) for one in (near, far))
    assert none.parts["expert"] == 0 < inside.parts["expert"] < outside.parts["expert"]
    again = predicted(model, near, sequence_length=64, checkpointing="full").parts["expert"]
    assert again == pytest.approx(1.5 * inside.parts["expert"])  # there and back, three times for two


def operator(name, phase, **given):
    return Operator(
        f"aten::{name}", phase, **{"flops": 0, "moved": 0, "fused": given.get("moved", 0)} | given
    )


def computed(operators, machine=H100, mode="none", **given):
    trace = Trace(steps=tuple(operators))
    return Kernels(machine, given.get("kernels", "eager"), given.get("dtype", "bfloat16")).compute(
        trace, mode, compiled=True
    )


def test_an_operator_takes_its_flops_at_its_rate_or_its_bytes_whichever_is_longer():
    free = replace(H100, efficiency=replace(H100.efficiency, launch=0.0))
    reached, memory = free.efficiency, free.bandwidth * free.efficiency.memory
    product, small = (operator("mm", "forward", flops=flops, moved=10**9) for flops in (10**15, 1))
    assert computed([product], free).forward == pytest.approx(1e15 / (989e12 * reached.products))
    assert computed([small], free).forward == pytest.approx(1e9 / memory)
    scaled = operator("_scaled_mm", "forward", flops=10**15)
    both = computed([product, scaled], free, dtype="float8").forward
    assert both == pytest.approx(1e15 / (989e12 * reached.products) * (1 + 989 / 1979))
    scores = operator("_scaled_dot_product_flash_attention", "forward", flops=10**15)
    found = computed([scores, replace(scores, phase="backward", causal=True)], free)
    whole = 1e15 / (989e12 * reached.attention)
    assert found.attention == (found.forward, found.inputs) == pytest.approx((whole, whole / 2))
    of_weight = replace(product, phase="backward", gradient=True)
    parts = computed([product, of_weight, replace(product, phase="backward")], free)
    assert parts.forward == parts.weights == parts.inputs


def test_a_compiler_makes_one_kernel_of_a_chain():
    chain = [operator("add", "forward", moved=3 * 10**9, fused=2 * 10**9)]
    chain += [operator("mul", "forward", moved=3 * 10**9, fused=None)] * 3
    memory = H100.bandwidth * H100.efficiency.memory
    for kernels, size in (("eager", 12e9), ("compiled", 2e9)):
        assert computed(chain, kernels=kernels).forward == pytest.approx(size / memory)
    none = [operator("add", "forward"), operator("mul", "forward", fused=None)]
    for kernels, launches in (("eager", 2), ("compiled", 1)):
        assert computed(none, kernels=kernels).forward == launches * H100.efficiency.launch


def test_a_cpu_waits_for_what_the_host_does_in_recomputation_and_a_gpu_does_not():
    block = [operator("add", "forward")] * 10 + [operator("add", "again")] * 5
    gpu = replace(H100, efficiency=replace(H100.efficiency, again={"full": 1e-3, "selective": 3e-3}))
    cpu, launched = replace(gpu, asynchronous=False), 5 * H100.efficiency.launch
    modes = ("full", "selective")
    assert [computed(block, cpu, mode).again for mode in modes] == pytest.approx([1e-2, 3e-2])
    assert [computed(block, gpu, mode).again for mode in modes] == pytest.approx([launched, launched])


def test_a_collective_in_a_block_of_a_cpu_takes_longer_and_nothing_hides_it():
    cpu = replace(
        H100,
        asynchronous=False,
        efficiency=replace(H100.efficiency, collectives={"none": 1e-3, "selective": 3e-3}),
    )
    gpu, host = (Links(Layout.of(tensor=2), one) for one in (H100, cpu))
    alone = gpu.seconds("tensor", "all_reduce", 1e6, 4)
    assert host.seconds("tensor", "all_reduce", 1e6, 4) == pytest.approx(alone + 4e-3)
    assert host.seconds("tensor", "all_reduce", 1e6, 4, "selective") == pytest.approx(alone + 12e-3)
    assert (gpu.exposed(3.0, 2.0), gpu.exposed(1.0, 2.0), host.exposed(1.0, 2.0)) == (1, 0, 1)
    layout = Layout.of(tensor=2, data=2, zero=3)
    fast, slow = (
        predicted("llama-3.2-1b", layout, one, compiled=False, checkpointing="selective").parts
        for one in (H100, cpu)
    )
    # Of a block: four all-reduces, and the one of selective checkpointing's last product
    assert slow["tensor"] - fast["tensor"] >= 8 * 16 * 4 * 3e-3
    assert slow["data"] > fast["data"]


def test_a_rank_of_a_cpu_computes_nothing_while_it_takes_a_message():
    """Under GPipe the last stage has more to do, so its rank takes one message after the other, and the first
    stage takes the last gradient.
    """
    gpu = replace(H100, efficiency=replace(H100.efficiency, launch=0.0))
    cpu, sizes = replace(gpu, asynchronous=False), {"schedule": "gpipe", "compiled": False}
    beside, taken = (
        predicted("llama-3.2-1b", Layout.of(pipeline=2), one, micro_batches=6, **sizes) for one in (gpu, cpu)
    )
    assert taken.sending == 0 < beside.sending
    assert beside.parts["pipeline"] == pytest.approx(2 * beside.sending)
    assert taken.parts["pipeline"] == pytest.approx((6 + 1) * beside.sending)
    layout = Layout.of(pipeline=2, virtual_stages=2, v_shape=True)  # stages 1 and 2 are on one rank
    zbv = predicted("llama-3.2-1b", layout, cpu, schedule="zbv", compiled=False)
    whole = predicted("llama-3.2-1b", layout, gpu, schedule="zbv", compiled=False)
    more = [
        {kind: one[kind] - other[kind] for kind in ("F", "I", "W", "B")}
        for one, other in zip(zbv.stages, whole.stages, strict=True)
    ]
    sent = whole.sending
    for found, forward, back in zip(more, (0, sent, 0, sent), (sent, 0, sent, 0), strict=True):
        assert found == pytest.approx({"F": forward, "I": back, "W": 0, "B": back}, abs=1e-12)


def test_context_ranks_compute_attention_again_under_selective_checkpointing():
    """One context rank keeps attention's result, several do not (``spare_memory``)."""
    alone, two = (
        predicted("llama-3.2-1b", Layout.of(context=n), checkpointing="selective", compiled=False)
        for n in (1, 2)
    )
    assert two.parts["recompute"] > alone.parts["recompute"]  # with half of the tokens


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(random.Random(0).sample([*MODELS], 8), id="drawn"),
        pytest.param([*MODELS], id="all", marks=pytest.mark.slow),
    ],
)
def test_every_family_has_a_step_that_takes_longer_with_more_tokens(names):
    for name in names:
        sizes = {"sequence_length": 64}
        one, two = (predicted(MODELS[name], Layout(), micro_batches=n, **sizes).seconds for n in (1, 2))
        assert 0 < one < two < 2 * one, name


def test_the_table_of_machines_states_sources_and_rates_without_sparsity():
    assert machine_named("h100-80gb").peak("bfloat16") == 989e12
    assert machine_named("h100-80gb", gpus_per_node=4).gpus == 4
    for one in MACHINES.values():
        assert one.source and one.efficiency.source
        assert (
            one.peaks["float32"]
            < one.peaks["bfloat16"]
            < 2.1 * one.peaks.get("float8", one.peaks["bfloat16"])
        )
        assert one.between.rate < one.inside.rate
    with pytest.raises(BadInput, match=r"h100-80gb.*trilith bench"):
        machine_named("h900")
    with pytest.raises(BadInput, match="float8"):
        machine_named("a100-80gb").peak("float8")


BENCH = json.loads(Path(__file__).with_name("bench.json").read_text(encoding="utf-8"))


def test_a_measured_machine_takes_the_place_of_the_table(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    machine = machine_from_bench(path)
    assert machine.peak("float32") == 0.05e12 and machine.efficiency.products == 1
    assert machine.gpus == 2 and machine.memory == 4 * 2**30  # two ranks share the CPU
    assert machine_from_bench(path, gpus_per_node=8).gpus == 8
    assert machine.efficiency.attention == 0.5 and machine.efficiency.source == f"measured: {path}"
    reached = machine.efficiency
    assert reached.again == pytest.approx({"full": 12.4e-6, "every": 12.4e-6, "selective": 47.4e-6})
    assert reached.collectives == pytest.approx({"none": 0, "full": 0, "every": 0, "selective": 50e-6})
    assert reached.exchanges == pytest.approx(
        {"none": 3e-5, "full": 6.5e-4, "every": 6.5e-4, "selective": 8.5e-4}
    )
    ring = Links(Layout.of(context=2, ring=True), machine)
    for mode, seconds in (("none", 80e-6), ("full", 700e-6), ("selective", 900e-6)):
        assert ring.seconds("context", "exchange", 3e-6, 3, mode) == pytest.approx(3 * seconds)
    two = Links(Layout.of(data=2), machine)
    assert two.seconds("all", "all_reduce", 2e9) == pytest.approx(1 + 100e-6)
    assert two.seconds("replicas", "all_reduce", 2e9) == pytest.approx(2 + 300e-6)
    sharded = Links(Layout.of(data=2, zero=1), machine)
    assert sharded.seconds("data", "all_gather", 1e9) == pytest.approx(2 + 400e-6)
    assert sharded.seconds("data", "reduce_scatter", 1e9) == pytest.approx(2)
    assert Links(Layout.of(tensor=2), machine).rate("tensor", "all_gather") == 1e9
    experts = Links(Layout.of(data=4, zero=1, expert=2), machine)  # which FSDP gathers by themselves
    assert experts.seconds("expert data", "all_gather", 1e9) == pytest.approx(2 + 400e-6)
    assert experts.seconds("expert", "all_gather", 1e9) == pytest.approx(1 + 100e-6 / 2)
    step = predicted("llama-3.2-1b", Layout.of(data=2), machine, compute=4, fused=False, compiled=False)
    assert step.source == f"measured: {path}" and step.seconds > 0


def test_a_file_that_lacks_a_figure_is_refused_with_the_command_that_measures_it(tmp_path):
    path = tmp_path / "bench.json"
    for index, key in (
        (0, "operator in a block: us"),
        (0, "checkpointing full, for an operator: us"),
        (0, "matmul, fp32: TFLOP/s"),
        (1, "collective in a block, checkpointing none: us"),
        (1, "exchange around a ring, checkpointing full: us"),
        (1, "all-gather of a tiny block: us"),
    ):
        lacking = json.loads(json.dumps(BENCH))
        del lacking["rows"][index]["figures"][key]
        path.write_text(json.dumps(lacking))
        with pytest.raises(BadInput, match="trilith bench --only speed,links"):
            machine_from_bench(path)
    machine = {key: value for key, value in BENCH["machine"].items() if key != "ranks"}
    path.write_text(json.dumps(BENCH | {"machine": machine}))
    with pytest.raises(BadInput, match=r"ranks.*trilith bench --only speed,links"):
        machine_from_bench(path)
    alone = BENCH | {"rows": BENCH["rows"][:1]}
    path.write_text(json.dumps(alone))
    with pytest.raises(BadInput, match="one device"):
        predicted("llama-3.2-1b", Layout.of(data=2), machine_from_bench(path), compute=4, fused=False)
