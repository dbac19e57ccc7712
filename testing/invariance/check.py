"""Define ``assert_layout_invariant``: is a user's own module the same in every layout? If not, where from?"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ...checkpoints import differences, read_source
from ...parallel_state import Layout
from ...ranks.messages import FunctionName, pack
from ...training import FunctionLoss, Loss
from ..layouts import on_ranks
from .run import Trial, Witnessed, run_trial
from .verdict import Fault, Figures, Judge, module_of

#: Layouts that a module without sequence parallelism and stages should support.
LAYOUTS = (Layout(tensor=2), Layout(data_replicate=2), Layout.of(tensor=2, data=2, zero=3))


class LayoutVariance(AssertionError):
    """Report a module whose results depend on the layout; ``fault.module`` is the first module that
    differs.
    """

    def __init__(self, layout: Layout, fault: Fault) -> None:
        self.layout, self.fault = layout, fault
        where = fault.module or "the model itself"
        super().__init__(f"{layout}: {fault.phase}: {where}: {fault.message}")


def assert_layout_invariant(
    factory: Callable[..., nn.Module],
    batch: Mapping[str, Tensor],
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    loss: Callable[..., Any] | None = None,
    micro_batch: int = 1,
    steps: int = 3,
    clip: float = 0.1,
    lr: float = 1e-2,
    schedule: str | None = None,
    checkpoint: bool = True,
    tolerance: float = 1e-10,
    seed: int = 0,
    timeout: float = 120,
) -> dict[Layout, Figures]:
    """Run a module on one process and in every layout, in fp64, and compare all that can be seen of it.

    ``factory(state=...)`` builds it: a function or class at the top level of a file, which other processes
    find by name, or a ``functools.partial`` of one. On one process its ``state`` is ``None``. ``batch``:
    tensors by name, samples on dim 0; ``forward`` takes those that it names, ``loss(given, samples)`` all of
    them and, if it names it, ``state``, and returns the sum of the losses and how many they are, alike on
    all tensor ranks; or it is a ``Loss``. Without one the module gives a whole tensor, whose elements all
    weigh otherwise. ``micro_batch`` is in samples. ``schedule`` is of every pipeline; ``None`` is the
    plainest that goes with the layout's stages: 1f1b, interleaved, or zbv.

    Compared are, from micro-batch to micro-batch, what each module is given and gives and the gradients of
    both; every parameter's gradient; loss, gradient norm and weights of ``steps`` AdamW steps with clipping;
    and a ``checkpoint`` that each layout writes and the next reads, bit for bit. Dropout is off. Over context
    ranks, for which a ``Loss`` states its ``sequence``, modules are not compared.

    Returns the largest differences by layout. Raises ``LayoutVariance``, an ``AssertionError``, which names
    the first module that differs in the order of computation, and ``BadInput`` for a layout that the module
    refuses; what the module itself raises comes as ``RankError``. ``tolerance`` is relative to a tensor's
    largest element. Beyond it a parameter or its gradient is still right if one process is about as far from
    itself with weights that differ in their last digit: a key's bias, whose gradient is zero but for
    rounding, is. ``timeout``, in seconds, is of each run.
    """
    name, arguments = _named(factory)
    by_name = loss is None or isinstance(loss, FunctionType)
    loss_name = None if loss is None else FunctionName.of(loss if by_name else _written(loss))
    packed = pack((*arguments, dict(batch), None if by_name else loss))
    trial = Trial(name, loss_name, packed, micro_batch, steps, clip, lr, seed, schedule)
    figures: dict[Layout, Figures] = {}

    @cache
    def nudge() -> Witnessed:
        nudged = replace(trial, nudged=True)
        witnessed: Witnessed = on_ranks(run_trial, 1, nudged, None, {}, None, None, timeout=timeout)[0]
        return witnessed

    with tempfile.TemporaryDirectory() as folder:
        read = f"{folder}/0" if checkpoint else None
        (alone,) = on_ranks(run_trial, 1, trial, None, {}, None, read, timeout=timeout)
        for number, layout in enumerate(layouts, 1):
            write = f"{folder}/{number}" if checkpoint else None
            ranks = on_ranks(
                run_trial, layout.world, trial, layout, alone.declared, read, write, timeout=timeout
            )
            verdict = Judge(layout, alone, ranks, tolerance, nudge).verdict()
            if isinstance(verdict, Fault):
                raise LayoutVariance(layout, verdict)
            figures[layout] = verdict
            if read is not None and write is not None:
                _same_checkpoint(layout, f"{folder}/0", write)
                read = write
    return figures


def _same_checkpoint(layout: Layout, first: str, second: str) -> None:
    for apart in differences(read_source(first), read_source(second)):
        name = apart.name.removeprefix("optimizer.exp_avg_sq.").removeprefix("optimizer.exp_avg.")
        text = f"{apart.name} is not what was read: {apart.what}"
        raise LayoutVariance(layout, Fault(module_of(name), "checkpoint", apart.relative, text))


def _written(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the user wrote of a loss that is no function: of a ``Loss`` its class, or the function."""
    if isinstance(loss, FunctionLoss):
        loss = loss.function
    inner: Callable[..., Any] = loss.func if isinstance(loss, partial) else loss
    return type(inner) if isinstance(inner, Loss) else inner


def _named(factory: Callable[..., nn.Module]) -> tuple[FunctionName, tuple[Any, Any]]:
    """Return the factory by its name, and the arguments that a ``partial`` gives it."""
    if isinstance(factory, partial):
        return FunctionName.of(factory.func), (factory.args, factory.keywords)
    return FunctionName.of(factory), ((), {})
