"""Name the strategy of a layout, say why the search chose it, and warn of what makes a run slow or bad."""

from __future__ import annotations

from math import prod

from ..parallel_state import Layout, declarations
from .critical_batch import critical_batch
from .evaluate import Answer
from .request import Request

#: Bytes of one trained parameter in mixed precision: weights, gradients and two moments in fp32.
_STATES = 16


def strategy(layout: Layout) -> str:
    """Return the name under which the literature knows a layout."""
    if layout.world == 1:
        return "one GPU"
    data = {0: "data parallelism (DDP)", 1: "ZeRO 1", 2: "ZeRO 2", 3: "ZeRO 3 (FSDP)"}[layout.zero]
    if layout.zero and layout.data_replicate > 1:
        data += " in replicas (HSDP)"
    found = [data] if layout.data * layout.context > 1 else []
    found += [f"{layout.pipeline} pipeline ranks"] if layout.pipeline > 1 else []
    if layout.tensor > 1:
        found.append(f"{layout.tensor} tensor ranks" + (" with sequence parallelism" * layout.sequence))
    if layout.context > 1:
        found.append(f"{layout.context} context ranks" + (" around a ring" if layout.ring else ""))
    found += [f"{layout.expert} expert ranks"] if layout.expert > 1 else []
    three = layout.tensor > 1 and layout.pipeline > 1 and layout.data > 1
    return ("3D parallelism: " if three else "") + ", ".join(found)


def reasons(request: Request, answer: Answer) -> list[str]:
    """Return two sentences: which strategy this is, and why."""
    layout, room = answer.choice.layout, request.room / 1e9
    whole, trained = _parameters(request)
    states = (_STATES * trained + 2 * (whole - trained)) / 1e9
    what = f"Weights, gradients and moments take {states:,.0f} GB, of which a GPU may hold {room:.1f} GB"
    why = []
    if layout.holds_alone and layout.tensor * layout.pipeline == 1:
        why.append("nothing has to be cut")
    elif layout.tensor * layout.pipeline == 1:
        cut = {0: "nothing", 1: "moments", 2: "moments and gradients", 3: "weights, gradients and moments"}
        why.append(f"the data ranks share {cut[layout.zero]}, which is the least exchange that fits")
    if layout.tensor > 1:
        inside = layout.tensor <= request.machine.gpus
        where = "inside a node, over its fast link" if inside else "beyond one node"
        why.append(f"tensor ranks cut every product {where}")
    if layout.pipeline > 1:
        why.append(
            f"pipeline ranks cut the blocks over nodes, where little is sent, and wait {_waits(answer)}"
        )
    if layout.context > 1:
        why.append(
            f"context ranks cut rows of {request.recipe.data.sequence_length:,} tokens, and their activations"
        )
    if layout.expert > 1:
        why.append("expert ranks hold different experts")
    return [f"This is {strategy(layout)}.", f"{what}: {'; '.join(why)}."]


def _waits(answer: Answer) -> str:
    return f"{answer.time.parts['bubble'] / answer.time.seconds:.0%} of the step"


def warnings(request: Request, answer: Answer) -> list[str]:
    """Return a line for each thing about a layout that a user should know before it costs a run."""
    layout, gpus, found = answer.choice.layout, request.machine.gpus, []
    if layout.tensor > gpus:
        found.append(
            f"tensor={layout.tensor} leaves the node of {gpus} GPUs: every block waits for the network"
        )
    if layout.expert > 1 and layout.expert * layout.tensor > gpus:
        found.append(
            f"expert={layout.expert} x tensor={layout.tensor} crosses the node of {gpus} GPUs: "
            "tokens travel over the network in every block"
        )
    whole, trained = _parameters(request)
    if trained == whole:
        tokens = request.tokens or 20 * whole
        critical = critical_batch(whole, tokens)
        if request.step_tokens > critical:
            found.append(
                f"a step of {request.step_tokens / 1e6:.1f} M tokens is beyond the critical batch of about "
                f"{critical / 1e6:.1f} M at the end of training: more tokens a step save few steps "
                "(Kaplan et al. 2020, eq. 1.4, with the loss of Hoffmann et al. 2022)"
            )
    host = max(one.host for one in answer.memory)
    if host:
        found.append(f"offload needs {host * gpus / 1e9:,.0f} GB of each node's own memory")
    return found


def _parameters(request: Request) -> tuple[int, int]:
    """Return the parameters of the whole model, and those that are trained."""
    model = request.family.build(request.config)
    stated = {name: one for name, one in declarations(model).items() if not one.buffer}
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    sizes = {name: prod(one.shape) for name, one in stated.items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name in trained)
