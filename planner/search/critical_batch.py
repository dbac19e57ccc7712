"""Estimate the critical batch, beyond which more tokens in a step save few steps."""

import math

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
