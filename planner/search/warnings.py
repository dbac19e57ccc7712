"""Warn of what a user should know about a layout before it costs a run."""

import math

from ...system import counted
from ..explanation import plain
from .evaluate import Answer
from .request import Request
from .strategy import crosses

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
    of = request.parameters
    if of.trained == of.whole:
        # The loss law was fitted to dense models, in which each token uses every parameter.
        tokens = request.tokens or TOKENS_OF_A_PARAMETER * of.active
        critical = critical_batch(of.active, tokens)
        if request.step_tokens > critical:
            which = "parameters" if of.active == of.whole else "parameters that a token uses"
            lines.append(
                f"a step of {_tokens(request.step_tokens)} tokens is beyond the critical batch of about "
                f"{_tokens(critical)} at the end of training: more tokens a step save few steps "
                "(Kaplan et al. 2020, eq. 1.4, with the loss of Hoffmann et al. 2022 for "
                f"{_rounded(of.active)} {which} and {_rounded(tokens)} tokens). A smaller --global-batch "
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
