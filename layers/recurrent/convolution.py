"""Compute the short causal convolution before a recurrence: a sum over the last few tokens of each channel.

B batch  R runs  L tokens of a run  C channels here  K kernel size
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...parallel_state import DeclaredModule, Initial, ParallelState, Uniform
from ..mlp import activation
from ..parallel_linear import cut_units, declare_product, weights_and_biases
from .runs import Runs, recomputed


class CausalConvolution(DeclaredModule):
    """Apply ``nn.Conv1d``, one filter a channel, to a document's tokens up to each itself, then ``act``.

    ``channels``: number of channels of each input, by name, as in ``ColumnParallelLinear``: ``unit`` and
    ``shared`` mean the same here, so that it takes such a layer's outputs. The parameters are
    ``<name>.weight`` (channels, 1, K) and, with ``bias``, ``<name>.bias`` (channels).

    Input and output: the channels here, (B, S, channels / tensor) each. Collective over the context ranks,
    which send each other the last K - 1 tokens of a run.
    """

    def __init__(
        self,
        channels: Mapping[str, int],
        kernel_size: int,
        *,
        act: str = "silu",
        bias: bool = False,
        unit: Mapping[str, int],
        shared: Sequence[str] = (),
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        self.kernel_size, self.act = kernel_size, activation(act)
        initial = initial or Uniform(kernel_size**-0.5)
        for name, count in channels.items():
            shape = (count, 1, kernel_size)
            weight, rows = cut_units(shape, unit[name], name in shared, self.state)
            of_bias, weight = replace(weight, shape=(count,)), replace(weight, initial=initial)
            self.add_module(name, part := DeclaredModule(state))
            declare_product(part, weight, of_bias if bias else None, rows)

    def forward(self, inputs: Sequence[Tensor], runs: Runs) -> tuple[Tensor, ...]:
        """Return the convolutions of the ``inputs``, of the same shapes."""
        x_RLC = runs.cut(torch.cat([*inputs], dim=-1))
        count = self.kernel_size - 1
        before = runs.tokens_before(x_RLC, count) if runs.cache is None else runs.cache.recall(self)
        weights, biases = zip(*weights_and_biases(cast(Any, self.children())), strict=True)
        bias_C = None if biases[0] is None else torch.cat(biases)
        y_RLC = causal_convolution(x_RLC, torch.cat(weights), bias_C, before, runs.places)
        if runs.cache is not None:  # in the memory of ``before``, which is no longer needed
            whole = x_RLC if before is None else torch.cat((before, x_RLC), dim=1)
            runs.cache.remember(self, F.pad(whole, (0, 0, count, 0))[:, whole.shape[1] :])
        y_BSC = self.act(runs.join(y_RLC))
        return torch.split(y_BSC, [len(weight) for weight in weights], dim=-1)


def causal_convolution(
    x_RLC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, before: Tensor | None, places_RL: Tensor | None
) -> Tensor:
    """Return, for each token, the sum of its channels and those of the K - 1 tokens before it, (R, L, C).

    ``before``: (R, K - 1, C), the tokens before each run; the default: zeros. ``places_RL``: each token's
    place in its document, whose tokens alone count; the default: all count.
    """
    count = weight_C1K.shape[-1] - 1
    if places_RL is None:
        padding = count if before is None else 0
        x_RCL = (x_RLC if before is None else torch.cat((before, x_RLC), dim=1)).transpose(1, 2)
        y_RCL = F.conv1d(x_RCL, weight_C1K, bias_C, padding=padding, groups=x_RCL.shape[1])
        return y_RCL[..., : x_RLC.shape[1]].transpose(1, 2)
    whole = F.pad(x_RLC, (0, 0, count, 0)) if before is None else torch.cat((before, x_RLC), dim=1)
    reaches = [(places_RL >= back).unsqueeze(-1) for back in range(count + 1)]

    def taps(whole: Tensor, weight_C1K: Tensor) -> Tensor:
        length = whole.shape[1] - count
        summed = whole.new_zeros(())
        for back, reached in enumerate(reaches):
            moved = whole[:, count - back : count - back + length]
            summed = summed + moved.masked_fill(~reached, 0.0) * weight_C1K[:, 0, count - back]
        return summed

    y_RLC = recomputed(taps, whole, weight_C1K)
    return y_RLC if bias_C is None else y_RLC + bias_C
