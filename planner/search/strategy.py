"""Name the strategy of a layout, say why the search chose it, and warn of what may cost a run."""

import math
from collections.abc import Callable
from dataclasses import replace

from ...parallel_state import BadInput, Layout
from ...system import counted
from ..explanation import plain, readable
from ..time.collectives import worst_placement
from .evaluate import Answer, Evaluator
from .find import LONGEST, SHOWN, Found
from .request import Request

#: Bytes of one trained parameter in mixed precision: weights, gradients and two moments in fp32.
_STATES = 16
#: Two steps take as long if they differ by less than this share.
_ALIKE = 0.0005


def strategy(layout: Layout) -> str:
    """Return the name under which the literature knows a layout."""
    if layout.world == 1:
        return "one GPU"
    zero = layout.zero if layout.data_sizes()[1] > 1 else 0  # with one shard each data rank holds everything
    data = {0: "data parallelism (DDP)", 1: "ZeRO 1", 2: "ZeRO 2", 3: "ZeRO 3 (FSDP)"}[zero]
    if zero and layout.data_replicate > 1:
        data += " in replicas (HSDP)"
    axes = [data] if layout.data * layout.context > 1 else []
    axes += [f"{layout.pipeline} pipeline ranks"] if layout.pipeline > 1 else []
    if layout.tensor > 1:
        axes.append(f"{layout.tensor} tensor ranks" + (" with sequence parallelism" * layout.sequence))
    if layout.context > 1:
        axes.append(f"{layout.context} context ranks" + (" around a ring" if layout.ring else ""))
    axes += [f"{layout.expert} expert ranks"] if layout.expert > 1 else []
    three = layout.tensor > 1 and layout.pipeline > 1 and layout.data > 1
    return ("3D parallelism: " if three else "") + ", ".join(axes)


def reasons(search: Found) -> list[str]:
    """Return two sentences about the fastest layout: which strategy it is, and why."""
    request, best = search.request, search.best[0]
    layout = best.choice.layout
    parameters = request.parameters
    states = _STATES * parameters.trained + 2 * (parameters.whole - parameters.trained)
    room = f"a GPU may hold {request.room / 1e9:.1f} GB"
    what = f"Weights, gradients and moments take {readable(states, 'bytes')}, and {room}"
    why = ["nothing has to be cut"] if layout.world == 1 else []
    why += [_sharing(request, best)] if layout.data * layout.context > 1 else []
    if layout.tensor > 1:
        where = _where(layout, layout.tensor, request.machine.gpus, "inside a node, over its fast link")
        why.append(f"tensor ranks cut every product {where}{_without(search, lambda axes: axes.tensor > 1)}")
    if layout.pipeline > 1:
        where = _where(layout, layout.world, request.machine.gpus, "inside a node")
        waits = best.time.parts["bubble"] / best.time.seconds
        why.append(
            f"pipeline ranks cut the blocks {where}, send little, and wait {waits:.0%} of the step"
            f"{_without(search, lambda axes: axes.pipeline > 1)}"
        )
    if layout.context > 1:
        why.append(
            f"context ranks cut rows of {request.recipe.data.sequence_length:,} tokens, and their activations"
            f"{_without(search, lambda axes: axes.context > 1)}"
        )
    if layout.expert > 1:
        why.append(f"expert ranks hold different experts{_without(search, lambda axes: axes.expert > 1)}")
    if best.choice.offload:
        why.append("the host holds weights, gradients and moments, because no layout fits otherwise")
    return [f"This is {strategy(layout)}.", f"{what}: {'; '.join(why)}."]


def crosses(layout: Layout, span: int, gpus: int) -> bool:
    """Tell whether some group of ``span`` consecutive ranks does not lie inside one node of ``gpus``."""
    return worst_placement(span, 1, layout.world, gpus).nodes > 1


def _where(layout: Layout, span: int, gpus: int, within_node: str) -> str:
    return "over nodes" if crosses(layout, span, gpus) else within_node


def _sharing(request: Request, best: Answer) -> str:
    """Say what the data ranks share, and what one ZeRO stage less would need or take."""
    layout = best.choice.layout
    who = " and ".join(name for name in ("data", "context") if getattr(layout, name) > 1) + " ranks"
    if layout.data_sizes()[1] == 1:
        how = ", and sum gradients beside each micro-batch, as ZeRO 2 does" if layout.zero > 1 else ""
        return f"the {who} share no weights, gradients or moments, for these fit{how}"
    shared = {1: "moments", 2: "moments and gradients", 3: "weights, gradients and moments"}[layout.zero]
    return f"the {who} share {shared}{_one_stage_less(request, best)}"


def _one_stage_less(request: Request, best: Answer) -> str:
    choice, layout = best.choice, best.choice.layout
    shards, copies = layout.data_shard, layout.data_replicate
    if layout.zero == 1:
        shards, copies = 1, layout.data
    try:
        lowered = replace(layout, zero=layout.zero - 1, data_shard=shards, data_replicate=copies)
        less = Evaluator(request).answer(replace(choice, layout=lowered))
    except BadInput:  # experts may need shards
        return ""
    if less.bytes > request.room:
        return f" (with ZeRO {layout.zero - 1} a GPU needs {less.bytes / 1e9:.1f} GB)"
    return f" (ZeRO {layout.zero - 1} fits too, and its step takes {_longer(less, best)})"


def _without(search: Found, has: Callable[[Layout], bool]) -> str:
    """Say what the fastest layout takes that has not got an axis. Only the fastest ones are known."""
    if len(search.best) == 1:
        return ""
    for answer in search.best[1:]:
        if not has(answer.choice.layout):
            return f" (without them a step takes {_longer(answer, search.best[0])})"
    if len(search.best) == SHOWN:
        return f" (all of the {SHOWN} fastest layouts do so)"
    return f" (without them no layout fits, or its step takes more than {LONGEST:g} times as long)"


def _longer(answer: Answer, best: Answer) -> str:
    excess = answer.time.seconds / best.time.seconds - 1
    return "as long" if abs(excess) < _ALIKE else f"{100 * excess:.1f} % longer"


#: Tokens for each parameter, of a training whose tokens nobody states. Source: Hoffmann et al. 2022, table 3.
TOKENS_OF_A_PARAMETER = 20


def expected_loss(parameters: float, tokens: float) -> float:
    """Return the loss, in nats a token, that a dense model with ``parameters`` reaches after ``tokens``.

    Source: Hoffmann et al. 2022, section D.3 (their third approach), on their data.
    """
    return 1.69 + 406.4 / math.pow(parameters, 0.34) + 410.7 / math.pow(tokens, 0.28)


def critical_batch(parameters: float, tokens: float) -> float:
    """Return the critical batch in tokens, at the end of a training on ``tokens`` tokens.

    Source: Kaplan et al. 2020, equation 1.4: 2e8 tokens over the loss to the power of 1 / 0.21. It depends on
    the loss alone; ``parameters`` and ``tokens`` only estimate the loss. Of a model with experts they are the
    parameters that a token uses: its other experts lower the loss, so its critical batch is larger than this.
    Earlier in training the loss is higher, and so the critical batch is smaller.
    """
    return 2e8 / math.pow(expected_loss(parameters, tokens), 1 / 0.21)


def warnings(request: Request, answer: Answer) -> list[str]:
    """Return a line for each thing about a layout that makes a run slow or bad."""
    layout, gpus, lines = answer.choice.layout, request.machine.gpus, []
    if layout.tensor > 1 and crosses(layout, layout.tensor, gpus):
        lines.append(
            f"tensor={layout.tensor} leaves the node of {counted(gpus, 'GPU')}: "
            "every block waits for the network"
        )
    if layout.expert > 1 and crosses(layout, layout.expert * layout.tensor, gpus):
        lines.append(
            f"expert={layout.expert} x tensor={layout.tensor} crosses the node of {counted(gpus, 'GPU')}: "
            "tokens travel over the network in every block"
        )
    sizes = request.parameters
    if sizes.trained == sizes.whole:
        # The loss law was fitted to dense models, in which each token uses every parameter.
        tokens = request.tokens or TOKENS_OF_A_PARAMETER * sizes.active
        critical = critical_batch(sizes.active, tokens)
        if request.step_tokens > critical:
            which = "parameters" if sizes.active == sizes.whole else "parameters that a token uses"
            lines.append(
                f"a step of {_tokens(request.step_tokens)} tokens is beyond the critical batch of about "
                f"{_tokens(critical)} at the end of training: more tokens a step save few steps "
                "(Kaplan et al. 2020, eq. 1.4, with the loss of Hoffmann et al. 2022 for "
                f"{_rounded(sizes.active)} {which} and {_rounded(tokens)} tokens). A smaller --global-batch "
                "reaches the same loss with fewer tokens, in more steps"
            )
    host = max(plan.host for plan in answer.memory)
    if host:
        ranks = min(gpus, layout.world)
        lines.append(
            f"offload needs {host * ranks / 1e9:,.0f} GB of each node's own memory: "
            "see that a node has it, or take more GPUs"
        )
    return lines


def _rounded(number: float) -> str:
    """Write a number with three digits, as Python reads it: ``37.6e9``."""
    return plain(float(f"{number:.3g}"))


def _tokens(number: float) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,.0f}"
