"""Explain what the parallel axes cost: bytes over the links, the seconds for them, and waiting."""

from __future__ import annotations

from ...parallel_state import BadInput
from ...pipeline.bubble import bubble_share, micro_batches_for
from ...pipeline.schedule_kinds import schedule_kind
from ..formulas.axis_bytes import (
    context_block_bytes,
    expert_block_bytes,
    pipeline_border_bytes,
    tensor_block_bytes,
)
from ..formulas.ring_and_tree import (
    ring_seconds,
    ring_wire_bytes,
    tree_all_reduce_seconds,
    tree_all_reduce_wire_bytes,
)
from .explanation import Explanation


def explain_bubble(
    stages: int, micro_batches: int, virtual: int | None, *, schedule: str, target: float
) -> Explanation:
    """Explain the share of a step in which a pipeline rank waits. ``virtual``: as ``schedule`` has it."""
    kind = schedule_kind(schedule, "explain")
    virtual = kind.virtual_stages if virtual is None else virtual
    if not kind.interleaved and virtual != kind.virtual_stages:
        expected = f"{kind.virtual_stages} with {schedule}"
        todo = "Only interleaved and interleaved-zero-bubble take others"
        raise BadInput("explain", "--virtual", expected=expected, found=virtual, todo=todo)
    found = Explanation("the bubble: the share of a step in which a pipeline rank waits")
    found.put_in("p", stages, "pipeline ranks", "--stages")
    found.put_in("m", micro_batches, "micro-batches in a step", "--micro-batches")
    found.put_in("v", virtual, "stages on each rank, more than 1 where a schedule interleaves", "--virtual")
    waits = "2 * (p - 1)" if schedule == "dualpipev" else "(p - 1)"
    work = "3 * v * m" if kind.two_backwards else "v * m"
    share = bubble_share(stages, micro_batches, virtual, schedule=schedule)
    found.step("bubble", f"{waits} / ({work} + {waits})", share, "share", "of a step is waiting")
    found.step("efficiency", "1 - bubble", 1 - share, "share", "of a step is work")
    found.step(
        "overhead",
        f"{waits} / ({work})",
        share / (1 - share),
        "share",
        "is the waiting in relation to the work; papers often print this ratio and call it the bubble",
    )
    if not kind.two_backwards:
        found.put_in("b", target, "largest bubble wanted", "--target")
        needed = micro_batches_for(target, stages, virtual)
        found.step(
            "needed", "max(1, ceil((p - 1) * (1 - b) / (b * v)))", needed, "micro-batches",
            "keep the bubble at most b",
        )  # fmt: skip
    found.notes.append(
        f"{schedule}: all stages take equally long, a backward twice as long as a forward. "
        "`trilith schedule` draws the timetable."
    )
    found.sources.append("Narayanan et al. 2021, section 2.2; Qi et al. 2023 for split backwards")
    return found


def explain_pipeline(
    stages: int,
    micro_batches: int,
    virtual: int | None,
    *,
    layers: int,
    tokens: float,
    hidden: int,
    number_bytes: float,
    bandwidth: float,
    schedule: str,
    target: float,
) -> Explanation:
    """Explain a pipeline: blocks of a stage, bytes between stages, seconds for them, and the bubble."""
    found = explain_bubble(stages, micro_batches, virtual, schedule=schedule, target=target)
    found.title = "pipeline parallelism: blocks of a stage, bytes between stages, and waiting"
    found.put_in_usual(L=layers, N=tokens, D=hidden)
    found.put_in_link(number_bytes, bandwidth)
    held = next(one.value for one in found.given if one.symbol == "v")
    found.step("blocks", "L / (p * v)", layers / (stages * held), "blocks", "are a stage, on average")
    border = pipeline_border_bytes(tokens, hidden, number_bytes=number_bytes)
    found.step(
        "border", "2 * N * D * w", border, "bytes", "cross each border for a micro-batch: there and back"
    )
    found.over_link("border", border, bandwidth)
    return found


def explain_allreduce(
    parameters: float, number_bytes: float, ranks: int, *, bandwidth: float, latency: float
) -> Explanation:
    """Explain an all-reduce of a model's gradients: by a ring, and by two trees."""
    found = Explanation("all-reduce: every rank gets the sum of all ranks' tensors")
    found.put_in("P", parameters, "numbers in the tensor, such as a model's parameters", "--parameters")
    found.put_in("N", ranks, "ranks", "--ranks")
    found.put_in_link(number_bytes, bandwidth)
    found.put_in("a", latency, "seconds before a message arrives, however small it is", "--latency")
    size = parameters * number_bytes
    found.step("B", "P * w", size, "bytes", "is the tensor")
    ring = ring_wire_bytes("all_reduce", size, ranks)
    found.step("ring", "2 * (N - 1) / N * B", ring, "bytes", "are sent by each rank around a ring")
    of_ring = ring_seconds("all_reduce", size, ranks, bytes_per_second=bandwidth, latency_seconds=latency)
    found.step("ring_time", "ring / W + 2 * (N - 1) * a", of_ring, "s", "around a ring")
    if ranks > 1:
        tree = tree_all_reduce_wire_bytes(size, ranks)
        found.step("tree", "2 * B", tree, "bytes", "are sent by the busiest ranks over two trees")
        of_tree = tree_all_reduce_seconds(size, ranks, bytes_per_second=bandwidth, latency_seconds=latency)
        found.step("tree_time", "tree / W + 2 * ceil(log2(N)) * a", of_tree, "s", "over two trees")
    half = ring_wire_bytes("reduce_scatter", size, ranks)
    found.step(
        "scatter", "(N - 1) / N * B", half, "bytes", "are a reduce-scatter, or an all-gather: one half"
    )
    found.notes.append(
        "A ring's bytes hardly depend on the ranks: at most twice the tensor. Its latency does."
    )
    found.notes.append("100 Gbit/s are 12.5e9 bytes a second.")
    found.sources.append("Patarasu and Yuan 2009; Sanders, Speck and Traeff 2009; Thakur et al. 2005")
    return found


def explain_tensor_parallel(
    inputs: int,
    outputs: int,
    tensor: int,
    *,
    tokens: float,
    hidden: int,
    layers: int,
    number_bytes: float,
    bandwidth: float,
) -> Explanation:
    """Explain tensor parallelism: the shape of a shard, the bytes of a block, and the seconds for them."""
    found = Explanation("tensor parallelism: each rank holds a piece of every matrix")
    found.put_in("I", inputs, "inputs of a matrix", "--inputs")
    found.put_in("O", outputs, "outputs of a matrix", "--outputs")
    found.put_in_usual(t=tensor, N=tokens, D=hidden, L=layers)
    found.put_in_link(number_bytes, bandwidth)
    found.step("column", "O / t", outputs / tensor, f"outputs x {inputs:,} inputs", "are a column shard")
    found.step("row", "I / t", inputs / tensor, f"inputs x {outputs:,} outputs", "are a row shard")
    found.step("shard", "I * O / t", inputs * outputs / tensor, "numbers", "are in either")
    found.step(
        "tensor_bytes", "N * D * w", tokens * hidden * number_bytes, "bytes", "are one all-reduce's tensor"
    )
    block = tensor_block_bytes(tokens, hidden, tensor, number_bytes=number_bytes)
    found.step(
        "block", "4 * 2 * (t - 1) / t * tensor_bytes", block, "bytes",
        "are sent by a rank for a block: 2 all-reduces forward, after attention and feed-forward; 2 backward",
    )  # fmt: skip
    found.step("model", "L * block", layers * block, "bytes", "for all blocks")
    found.over_link("model", layers * block, bandwidth)
    found.notes.append(
        "Sequence parallelism sends a reduce-scatter and an all-gather for each all-reduce: as many bytes."
    )
    found.notes.append("The bytes come in every block, so tensor ranks belong on the fastest link (NVLink).")
    found.sources.append("Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2")
    return found


def explain_context(
    sequence: int,
    micro_batch: int,
    context: int,
    *,
    key_value_heads: int,
    head_width: int,
    tensor: int,
    number_bytes: float,
    bandwidth: float,
) -> Explanation:
    """Explain context parallelism: tokens of a rank, keys and values that travel, by all-gather or a ring."""
    found = Explanation("context parallelism: each rank has a piece of every row")
    found.put_in_usual(S=sequence, b=micro_batch)
    found.put_in("c", context, "context ranks", "--context")
    found.put_in("h", key_value_heads, "key/value heads", "--key-value-heads")
    found.put_in("d", head_width, "numbers of a head", "--head-width")
    found.put_in_usual(t=tensor)
    found.put_in_link(number_bytes, bandwidth)
    tokens, width = sequence * micro_batch / context, 2 * key_value_heads * head_width / tensor
    found.step("N", "S * b / c", tokens, "tokens", "are on each rank")
    found.step("K", "2 * h * d / t", width, "numbers", "are keys and values of a token on a rank")
    for name, ring in (("gather", False), ("ring", True)):
        sent = context_block_bytes(tokens, width, context, number_bytes=number_bytes, ring=ring)
        meaning = "are sent by a rank for a block, by " + (
            "a ring" if ring else "all-gather and reduce-scatter"
        )
        found.step(name, "(c - 1) * N * K * (2 * w + 4)", sent, "bytes", meaning)
    found.over_link("gather", found["gather"], bandwidth)
    found.notes.append(
        "Keys and values travel forward, again backward, then their gradients, of 4 bytes each."
    )
    found.notes.append("A ring sends as many bytes in c - 1 pieces, and computes while the next piece comes.")
    found.sources.append("Liu et al. 2023 (ring attention); Llama Team 2024, section 3.3.2")
    return found


def explain_experts(
    tokens: float,
    hidden: int,
    experts_of_token: int,
    expert: int,
    *,
    experts: int,
    layers: int,
    number_bytes: float,
    bandwidth: float,
) -> Explanation:
    """Explain expert parallelism: experts of a rank, and the all-to-alls that bring tokens to them."""
    found = Explanation("expert parallelism: each rank holds some experts, and tokens go to theirs")
    found.put_in_usual(N=tokens, D=hidden)
    found.put_in("k", experts_of_token, "experts that a token goes through", "--experts-of-token")
    found.put_in("e", expert, "expert ranks", "--expert")
    found.put_in("E", experts, "experts of a block", "--experts")
    found.put_in("L", layers, "blocks with experts", "--layers")
    found.put_in_link(number_bytes, bandwidth)
    unit = "expert" if experts == expert else "experts"
    found.step("held", "E / e", experts / expert, unit, "of each block on a rank")
    copies = tokens * experts_of_token * hidden * number_bytes
    found.step(
        "copies", "N * k * D * w", copies, "bytes", "are a rank's tokens, once for each of their experts"
    )
    block = expert_block_bytes(tokens, hidden, experts_of_token, expert, number_bytes=number_bytes)
    meaning = "are sent by a rank for a block: to the experts and back, and the gradients of both"
    found.step("block", "4 * (e - 1) / e * copies", block, "bytes", meaning)
    found.step("model", "L * block", layers * block, "bytes", "for all blocks")
    found.over_link("model", layers * block, bandwidth)
    found.notes.append("This assumes that tokens choose experts evenly; the busiest rank decides the time.")
    found.sources.append("Lepikhin et al. 2020 (GShard), section 3.2")
    return found
