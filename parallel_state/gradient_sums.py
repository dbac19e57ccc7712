"""Sum the gradients that are still partial after backward, over tensor ranks and pipeline ends; check that a
step trains: every trained parameter has a gradient, and not all gradients are zero.
"""

import math
import re
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..system.errors import BadInput, PeerFailed
from .declaration import declarations
from .engine import accelerator, fsdp_modules, local_data
from .engine.local_tensors import foreach_copy_, real_data
from .foreign import check_state
from .optimizer_steps import watch_steps
from .state import ParallelState, alone_or


class GradientSums:
    """Sum the partial gradients of a model after each backward, and count the parameters that got none.

    The parameters and their declarations are looked up once. So make this object after ``shard_over_data``,
    when the model's parameters are the same objects as the optimizer's. ``where`` names the caller in an
    error. ``averaged``: torch's wrappers over ``state.data_mesh`` may have averaged the gradients before. No
    method makes the host wait for the device, but where a partial gradient is missing here, or may be a sum.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState | None = None,
        *,
        where: str = "GradientSums",
        averaged: bool = False,
    ) -> None:
        self.state = state = alone_or(state)
        check_state(model, state, where, averaged=averaged)
        declared = declarations(model)
        self._all = [(name, parameter, declared[name]) for name, parameter in model.named_parameters()]
        # FSDP adds to a gradient without a change of the tensor that is the parameter's.
        self._added = int(state.layout.holds_alone and not fsdp_modules(model))

    def finalize(self, *, reduce: torch.dtype | None = None) -> None:
        """Sum the partial gradients, in place; see ``finalize_gradients``."""
        state, summed = self.state, list[Tensor]()
        if state.tensor.size > 1:
            partial = [weight for _, weight, declaration in self._all if "tensor" in declaration.partial]
            summed += _sum_together(partial, state.tensor.group, reduce, self._added)
        if state.layout.pipeline > 1 and not state.layout.v_shape:  # in a V one rank holds both ends
            tied = [weight for _, weight, declaration in self._all if declaration.ends]
            summed += _sum_together(tied, state.ends.group, reduce, self._added)
        # Not before: a gradient may be in both sums.
        _SUMMED.update((gradient, gradient._version) for gradient in summed)

    def count(self, *, unused: Callable[[str], Any] = lambda name: False) -> tuple[int, int]:
        """Return two counts of this rank: its trained parameters, and how many of them have no gradient.

        ``unused`` tells from a parameter's name whether a step may leave it without a gradient; such
        parameters are not counted.
        """
        trained = [weight for name, weight, _ in self._all if weight.requires_grad and not unused(name)]
        return len(trained), sum(weight.grad is None for weight in trained)


def finalize_gradients(
    model: nn.Module, *, reduce: torch.dtype | None = None, state: ParallelState | None = None
) -> None:
    """Sum the partial gradients, in place; call it once in a step after the last backward.

    Norm weights and row biases with sequence parallelism, and shared key/value heads, are summed over the
    tensor axis; a tied embedding is summed over the two ends of the pipeline. Over the data axes
    ``shard_over_data`` has already summed them, or torch's ``fully_shard`` or DDP over ``state.data_mesh``
    averaged them: the loss is then the mean over this rank's tokens. ``reduce``: the dtype to sum in; the
    default is that of the gradients. Raises ``BadInput`` for gradients that are such sums already.
    """
    GradientSums(model, state, where="finalize_gradients", averaged=True).finalize(reduce=reduce)


def refuse_held_twice(model: nn.Module, state: ParallelState) -> None:
    """Refuse, on all ranks of a pipeline, a parameter of two of them whose gradients nothing would add up.

    Collective over the pipeline.
    """
    ranks: list[dict[str, bool]] = [{}] * state.layout.pipeline
    own = {name: declaration.ends for name, declaration in declarations(model).items()}
    dist.all_gather_object(ranks, own, group=state.pipeline.group)
    ends = {0} if state.layout.v_shape else {0, len(ranks) - 1}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        holders = [number for number, rank in enumerate(ranks) if name in rank]
        tied = all(ranks[number][name] for number in holders)
        if len(holders) > 1 and not (tied and ends.issuperset(holders)):
            raise BadInput(
                "model", name, expected="one pipeline rank, or with ends=True the first and the last",
                found=f"ranks {', '.join(map(str, holders))}",
                todo="Compute with it on the first that needs it, and send on what it gives",
            )  # fmt: skip


def divide_gradients(model: nn.Module, by: Tensor) -> None:
    """Divide all gradients by one number, in place, on the host if they are kept there (offload)."""
    grads = [local_data(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    on = {device: by.to(device) for device in {grad.device for grad in grads}}
    for grad in grads:
        grad.div_(on[grad.device])


def _sum_together(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, reduce: torch.dtype | None, added: int
) -> list[Tensor]:
    """All-reduce the gradients of many small parameters as one tensor, for each dtype, and return them.

    A trained parameter without a gradient counts as zeros, so that all ranks send the same number of bytes;
    it gets the sum if another rank has a gradient, be it zero. These zeros are negative ones: a sum is
    negative zero in all its elements only if no rank has a gradient.
    """
    trained = [weight for weight in parameters if weight.requires_grad or weight.grad is not None]
    sums = list[Tensor]()
    for dtype in sorted({weight.dtype for weight in trained}, key=str):
        same = [weight for weight in trained if weight.dtype == dtype]
        gradients = [
            torch.zeros_like(weight).neg() if weight.grad is None else weight.grad for weight in same
        ]
        grads = [real_data(gradient) for gradient in gradients]
        flat = torch.cat([grad.reshape(-1) for grad in grads]).to(reduce or dtype.to_real())
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        _refuse_summed_twice(gradients, grads, added)
        summed = [part.view_as(grad) for grad, part in zip(grads, parts, strict=True)]
        foreach_copy_(grads, summed)
        for parameter, gradient, part in zip(same, gradients, parts, strict=True):
            # What other ranks computed is the gradient of this rank's copy too. Only then does the host wait.
            if parameter.grad is None and bool(part.any() | ~part.signbit().all()):
                parameter.grad = gradient
        sums += gradients
    return sums


#: The gradients that are sums which no optimizer has used so far, each with its version then.
_SUMMED: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
# What sets gradients to zero after it may leave no trace in their versions, as one call for many DTensors.
watch_steps(after=_SUMMED.clear)


def _refuse_summed_twice(gradients: Iterable[Tensor], parts: Iterable[Tensor], added: int) -> None:
    """Refuse sums of what was summed before, alike on all ranks: a gradient that is the same tensor as then,
    changed at most as often as by a backward that ``added`` to it; what sets it to zero is a change more.
    ``parts``: of each gradient, what this rank stores.
    """
    for gradient, part in zip(gradients, parts, strict=True):
        # The host waits for the device only here: zeros may be summed again, of what this rank did not use.
        if gradient._version <= _SUMMED.get(gradient, -2) + added and bool(part.any()):
            raise BadInput(
                "finalize_gradients", "gradients", expected="those of one step's backwards, summed once",
                found="sums, which would be summed a second time",
                todo="Call it once in a step, after the last backward, and not after Step; then zero_grad() "
                "(grad.data.zero_() leaves no trace)",
            )  # fmt: skip


class NotTrained(PeerFailed):
    """Report that a trained parameter has no gradient, or that all are zero. Exit code 3."""


def has_gradients(model: nn.Module) -> bool:
    """Tell whether any parameter of this rank has a gradient that is not zero."""
    return bool(_largest(model.parameters()))


def refuse_untrained(
    model: nn.Module,
    loss: float,
    counts: Sequence[float],
    *,
    unused: str | None = None,
    state: ParallelState | None = None,
) -> None:
    """Raise ``NotTrained``, naming parameters, if one parameter or all of them would not be trained.

    ``counts``: what ``GradientSums.count`` returns, summed over all ranks. All ranks must call this with the
    same numbers; then all raise alike. ``unused``: a pattern over names of parameters that a step may leave
    without a gradient. An expert that got no token has a gradient of zeros, and a rank's piece of a parameter
    may be empty: neither counts as missing. A loss of exactly zero, such as that of a step in which no label
    counts, may have zero gradients.
    """
    trained, missing = counts
    pattern = re.compile(unused or "(?!)")
    by_name = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not pattern.search(name)
    }
    if missing:
        names = [name for name, parameter in by_name.items() if parameter.grad is None]
        rank, name = _first(names, state)
        others = f" and {int(missing) - 1} more of all ranks'" if missing > 1 else ""
        raise NotTrained(
            f"rank {rank}: {name}{others}: trained, and without a gradient; nothing was updated. "
            "Freeze what the step does not use (requires_grad_(False); in a recipe optimizer.groups, or "
            "lora.exclude_modules)"
        )
    if not trained or loss == 0 or not math.isfinite(loss):
        return
    largest = _largest(by_name.values())
    if state is not None and state.layout.world > 1:
        largest = largest.to(next((parameter.device for parameter in model.parameters()), state.device))
        dist.all_reduce(largest)
    if not largest:
        rank, name = _first([*by_name], state)
        raise NotTrained(
            f"the loss is {loss:.6g} and every gradient is exactly zero, rank {rank}'s {name} among them; "
            "nothing was updated"
        )


def _largest(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a scalar, 0 only if all gradients here are 0; on a GPU it is the largest element."""
    grads = [local_data(parameter.grad) for parameter in parameters if parameter.grad is not None]
    grads = [grad for grad in grads if grad.numel()]
    if all(accelerator.is_host(grad.device) for grad in grads):  # the first gradient says it, nearly always
        return torch.tensor(any(bool(grad.any()) for grad in grads), dtype=torch.float64)
    return torch.nn.utils.get_total_norm(grads, norm_type=float("inf")).double()


def _first(names: Sequence[str], state: ParallelState | None) -> tuple[int, str]:
    """Return the first rank that has such a parameter, and the first such name there."""
    first = next(iter(names), None)
    if state is None or state.layout.world == 1:
        return 0, str(first)
    everywhere: list[str | None] = [None] * state.layout.world
    dist.all_gather_object(everywhere, first)
    return next((rank, name) for rank, name in enumerate(everywhere) if name is not None)
