"""Cut a rank's tokens into runs of consecutive tokens, and compute the recurrent state before each run.

On one context rank a row is one run. Over c context ranks a rank holds two chunks of each row, far apart (see
``context_chunks``), and so two runs. Before a run, a recurrence needs the state after all earlier tokens of
the row. The new state is a linear map of this state. So each rank first computes the maps of its own runs,
without knowing the states before them. Then all ranks gather the maps, and each rank combines the maps of the
earlier runs. So the ranks compute at the same time, and send maps of a state's size, not tokens.

B batch  R runs: B on one context rank, otherwise 2 B  L tokens of a run  C channels
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel_state import ParallelState, engine
from ...parallel_state.engine.autograd_and_compiler import differentiates_again
from ..attention.inputs import AttentionInputs
from ..collectives import pair
from ..context_chunks import own_chunks


class Runs:
    """Cut the tokens of a forward into runs, and hand states on from run to run."""

    def __init__(self, inputs: AttentionInputs, state: ParallelState) -> None:
        self.state, self.cache = state, inputs.cache
        self.in_row = 2 if state.context.size > 1 else 1
        places = inputs.documents
        #: (R, L), each token's place in its document; ``None``: no document starts after a row's first token.
        self.places: Tensor | None = None if places is None else self.cut(places)

    def cut(self, x: Tensor) -> Tensor:
        """Reshape (B, S, ...) to (R, L, ...)."""
        return x if self.in_row == 1 else x.unflatten(1, (self.in_row, -1)).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Reshape (R, L, ...) to (B, S, ...)."""
        return x if self.in_row == 1 else x.unflatten(0, (-1, self.in_row)).flatten(1, 2)

    def tokens_before(self, x_RLC: Tensor, count: int) -> Tensor | None:
        """Return the ``count`` tokens before each run, (R, count, C), zeros where there are none.

        ``None``: there are none before any run. Collective over the context ranks, in backward too.
        """
        if self.in_row == 1 or count == 0:
            return None
        chunks = own_chunks(self.state.context.index, self.state.context.size)
        # A run that is shorter is sent whole; then the tokens come from several runs.
        ends = _in_order(x_RLC[:, -count:].unflatten(0, (-1, 2)), self.state)
        none = x_RLC.new_zeros(len(ends[0]), count, x_RLC.shape[-1])
        before = [torch.cat((none, *ends[:chunk]), dim=1)[:, -count:] for chunk in chunks]
        return torch.stack(before, dim=1).flatten(0, 1)

    def states(
        self,
        times: Callable[[Tensor, Tensor], Tensor],
        through: Tensor,
        written: Tensor,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the state before each chunk, (R, ..., N, rows, columns), and that after each run.

        A chunk makes ``times(through, state) + written`` of a state; ``through`` and ``written`` are those of
        the N chunks of each run. ``first``: (B, ..., rows, columns), the state before each row; the default:
        0. Collective over the context ranks, in backward too.
        """
        if first is None:
            first = torch.zeros_like(written[:: self.in_row].select(-3, 0))
        chunks = [*zip(through.unbind(-3), written.unbind(-3), strict=True)]
        state = first if self.in_row == 1 else self._before_runs(times, chunks, first)
        before = []
        for chunk_through, chunk_written in chunks:
            before.append(state)
            state = times(chunk_through, state) + chunk_written
        return torch.stack(before, dim=-3), state

    def _before_runs(
        self,
        times: Callable[[Tensor, Tensor], Tensor],
        chunks: Sequence[tuple[Tensor, Tensor]],
        first: Tensor,
    ) -> Tensor:
        """Return the state before each run, (R, ...), from that before each row, (B, ...)."""
        through, written = chunks[0]  # in the end, what a whole run makes of a state
        for chunk_through, chunk_written in chunks[1:]:
            through, written = times(chunk_through, through), times(chunk_through, written) + chunk_written
        maps = torch.cat((through.flatten(1), written.flatten(1)), dim=1)
        early, late = own_chunks(self.state.context.index, self.state.context.size)
        states = [first]
        for run_map in _in_order(maps.unflatten(0, (-1, 2)), self.state)[:late]:
            decay, new = run_map.split((through[0].numel(), written[0].numel()), dim=1)
            decay, new = decay.view(-1, *through.shape[1:]), new.view(-1, *written.shape[1:])
            states.append(times(decay, states[-1]) + new)
        return torch.stack((states[early], states[late]), dim=1).flatten(0, 1)

    def recurrence(
        self, module: nn.Module, rule: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor
    ) -> Tensor:
        """Return the outputs (B, S, ...) of ``rule(*inputs, runs, first)``, which backward computes again.

        The ``inputs`` are (B, S, ...), those of the rule (R, L, ...). It returns outputs, and the state after
        each run, which is kept for ``module`` if there is a cache.
        """
        inputs = tuple(self.cut(x) for x in inputs)
        if self.cache is None:
            return self.join(recomputed(lambda *cut_inputs: rule(*cut_inputs, self)[0], *inputs))
        y, last = rule(*inputs, self, self.cache.recall(module))
        self.cache.remember(module, last)
        return y


def _in_order(x: Tensor, state: ParallelState) -> list[Tensor]:
    """Gather (B, 2, ...) of every context rank; return the runs of the whole sequence in its order."""
    # (2 c, B, ...), a rank's two runs together
    gathered = pair(x.transpose(0, 1), state.context, engine.all_gather, engine.reduce_scatter, dim=0)
    size = state.context.size
    place = {
        chunk: 2 * rank + half for rank in range(size) for half, chunk in enumerate(own_chunks(rank, size))
    }
    return [gathered[place[chunk]] for chunk in range(2 * size)]


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``function(*inputs)``, which backward computes again; the gradients are those of ``function``.

    A recurrence in chunks makes several times the bytes of its inputs. ``function`` must be a function of
    ``inputs`` alone, draw no random numbers, and may be collective. ``torch.compile`` traces it as it is.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs)
    output: Tensor = _Recomputed.apply(function, *inputs)
    return output


class _Recomputed(torch.autograd.Function):
    # With torch's own checkpoint the trace of a block is not affine in the number of ranks; plans need it so.
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed, inputs, again = ctx.needs_input_grad[1:], ctx.saved_tensors, differentiates_again()
        if not again:
            inputs = [x.detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        with_gradient = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        gradients = iter(torch.autograd.grad(outputs, with_gradient, grads[0], create_graph=again))
        return None, *(next(gradients) if need else None for need in needed)
