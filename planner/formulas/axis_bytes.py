"""Compute the bytes that one layer, or one border of two stages, gives to the collectives of each axis.

Each function returns the bytes that one rank puts on the wire for one micro-batch, forward and backward
together, with ring collectives. ``tokens`` are those of the micro-batch on one rank (its piece of the context
axis); ``number_bytes`` is the size of one number (2 in bf16).
"""

from __future__ import annotations

from .ring_and_tree import ring_wire_bytes


def tensor_block_bytes(tokens: float, hidden: int, tensor: int, *, number_bytes: float = 2) -> float:
    """Return the bytes of a block over the tensor axis: two all-reduces forward, two backward.

    With sequence parallelism each all-reduce is a reduce-scatter and an all-gather, which send as much
    together. Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    return 4 * ring_wire_bytes("all_reduce", tokens * hidden * number_bytes, tensor)


def pipeline_border_bytes(tokens: float, hidden: int, *, number_bytes: float = 2, tensor: int = 1) -> float:
    """Return the bytes between two stages: hidden states forward, and their gradient backward.

    ``tensor``: the tensor ranks among which sequence parallelism cuts the message; 1 without it.
    Source: Narayanan et al. 2021, section 4.1.
    """
    return 2 * tokens * hidden * number_bytes / tensor


def context_block_bytes(
    tokens: float,
    key_value_width: float,
    context: int,
    *,
    number_bytes: float = 2,
    gradient_bytes: float = 4,
    ring: bool = False,
) -> float:
    """Return the bytes of a block's attention over the context axis.

    ``key_value_width``: the numbers of keys and values together that a rank has for a token: 2 x key/value
    heads x their width, over the tensor ranks. Forward gathers them; backward gathers them again and
    reduce-scatters their gradients, in fp32 here. Around a ring, forward passes them on ``context - 1``
    times, and backward passes them and their gradients on as often.
    Source: Liu et al. 2023 (ring); Llama Team 2024, section 3.3.2 (all-gather).
    """
    numbers = tokens * key_value_width
    if ring:
        return (context - 1) * numbers * (2 * number_bytes + gradient_bytes)
    gathered = ring_wire_bytes("all_gather", numbers * number_bytes, context)
    return 2 * gathered + ring_wire_bytes("reduce_scatter", context * numbers * gradient_bytes, context)


def expert_block_bytes(
    tokens: float, hidden: int, experts_of_token: int, expert: int, *, number_bytes: float = 2
) -> float:
    """Return the bytes of a block's experts over the expert axis, where tokens choose them evenly.

    Four all-to-alls: tokens to their experts and back, and the gradients of both.
    Source: Lepikhin et al. 2020 (GShard), section 3.2.
    """
    copies = tokens * experts_of_token * hidden * number_bytes
    return 4 * ring_wire_bytes("all_to_all", copies, expert)


def data_step_bytes(
    parameters: float,
    data_ranks: int,
    *,
    zero: int = 0,
    micro_batches: int = 1,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    ends: float = 0,
) -> float:
    """Return the bytes of a step over the data axis, for the ``parameters`` of a rank's stage and shard.

    ZeRO 0 all-reduces the gradients once; 1 reduce-scatters them and gathers the weights, as many bytes. 2
    reduce-scatters for each micro-batch, since it keeps no whole gradients; 3 also gathers the weights twice
    for each, forward and backward, but for ``ends``: the parameters that end the forward and begin the
    backward pass. Source: Rajbhandari et al. 2020, section 7.
    """
    gradients = parameters * gradient_bytes
    if zero == 0:
        return ring_wire_bytes("all_reduce", gradients, data_ranks)
    summed = ring_wire_bytes("reduce_scatter", gradients, data_ranks) * (micro_batches if zero >= 2 else 1)
    gathered = micro_batches * (2 * parameters - ends) if zero == 3 else parameters
    return summed + ring_wire_bytes("all_gather", gathered * weight_bytes / data_ranks, data_ranks)
