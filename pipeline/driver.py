"""Run a rank's stages of a pipeline under torch's schedules, with parameters sharded over data ranks or not.

Torch's own stage keeps whole gradients until the last micro-batch, and wants gathered weights to stay. Here
FSDP's hooks gather and drop a block at a time, as without a pipeline (``zero`` 3), and gradients are summed
over the data ranks as soon as those of a micro-batch are there (``zero`` 2 and 3), or those of a block in
the stage's last micro-batch (``zero`` 0 and 1), be they made in one backward pass or in two.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import get_schedule_class

from ..layers import recomputes_operators
from ..parallel_state import ParallelState
from ..parallel_state.engine import accelerator, fsdp_modules, is_sharded
from ..parallel_state.engine.fully_sharded import (
    computed_with,
    end_backward,
    gather_weights,
    in_one_backward,
    left_alone,
    sum_gradients,
)
from ..parallel_state.engine.gathered_weights import ForwardOrder
from ..parallel_state.engine.weight_gradients import compute_weight_gradients
from .relay import Travels, greet, sent_as
from .schedule_kinds import check_recomputation, check_schedule, schedule_kind
from .stages import Samples, Stages


class StageModule(nn.Module):
    """Hold what a stage of ``stages`` computes with: the modules whose parameters it uses."""

    def __init__(self, stages: Stages, number: int) -> None:
        super().__init__()
        self._stages, self._number, model = stages, number, stages.model
        part = stages.parts[number] or getattr(model, "stage", None)
        modules: Sequence[nn.Module] = model.uses(part) if hasattr(model, "uses") else [model]
        self.uses = nn.ModuleList(modules)
        #: What FSDP shards of this stage alone; and with the whole model, which several stages may share.
        self.own = [sharded for module in modules for sharded in fsdp_modules(module) if sharded is not model]
        roots = [model] if is_sharded(model) else []
        uses_root = not all(is_sharded(module) and module is not model for module in modules)
        self.sharded = [*self.own, *(roots if uses_root else [])]
        #: What FSDP's hooks would gather although this stage computes without it.
        self.unused = [] if uses_root else roots

    def forward(self, x: Tensor, /, **keywords: Tensor) -> Any:
        """Return what the stage sends for a micro-batch, or the last one the share of the step's loss."""
        samples, stages = {name[1:]: sample for name, sample in keywords.items()}, self._stages
        output = stages.run_stage(self._number, x, samples)
        return stages.loss(output, samples) if self._number == stages.state.layout.stages - 1 else output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield also the whole parameters that FSDP gathers: autograd's graph is made of them."""
        yield from dict.fromkeys((*super().parameters(recurse), *computed_with(self.sharded)))


class DrivenStage(pipelining.PipelineStage):
    """Extend torch's stage: gradients are summed at every micro-batch from ``zero`` 2 on, or at the last."""

    def __init__(self, stages: Stages, number: int, takes: Travels, gives: Travels) -> None:
        state, model, module = stages.state, stages.model, StageModule(stages, number)
        zero, self._takes, self._gives = state.layout.zero, takes.meta(), gives.meta()
        super().__init__(
            module, number, state.layout.stages, state.device, group=state.pipeline.group,
            input_args=self._takes, output_args=self._gives,
        )  # fmt: skip
        self.args_recv_info, self.grad_recv_info = _WithoutMemory(), _WithoutMemory()
        self.module, self.sums_each, self.gathers_each = module, zero >= 2, zero == 3
        self.root = model if is_sharded(model) else None
        #: If each micro-batch gives each trained parameter a gradient, replicas of a block's shards (HSDP)
        #: sum theirs at the last one alone.
        self.replicas_wait = module.own if getattr(model, "trains_all", False) else []
        self._order = ForwardOrder(model) if self.gathers_each and self.root is not None else None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives a micro-batch's input, into memory that is made now."""
        if not self.is_first:
            self._make_memory(self.args_recv_info[fwd_chunk_id], self._takes)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the gradient of a micro-batch's output, into memory that is made now."""
        if self.has_backward and not self.is_last:
            self._make_memory(self.grad_recv_info[bwd_chunk_id], self._gives)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_memory(self, infos: Sequence[Any], like: Tensor) -> None:
        (info,) = infos
        if not _torch_makes(info):
            info.buffer = torch.empty_like(like, device=self.device, requires_grad=False)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        """Run one micro-batch's forward; after it autograd alone keeps the input that was received."""
        if not self.is_first and self.has_backward and torch.is_grad_enabled():
            # Before torch 2.13 torch does so only where it makes the memory.
            for info in self.args_recv_info[fwd_chunk_id]:
                cast(Tensor, info.buffer).requires_grad_()
        with self._sparing(), self._order.noted() if self._order else nullcontext():
            try:
                output = super().forward_one_chunk(fwd_chunk_id, *args, **named)
            except RuntimeError as error:  # in torch's words, which leave out what the model raised
                raise error.__cause__ or error from None
        _free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one micro-batch's backward; a whole backward runs FSDP's hooks, which sum block by block."""
        if self._order:
            self._order.recall()
        with self._sparing(), self._summing(last_backward) if full_backward else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _free(self.grad_recv_info.get(bwd_chunk_id, ()))
        if not full_backward and not self.is_first:
            # The second part needs neither what came into the stage and out of it, nor their gradients.
            inputs, groups, *_ = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = ((), groups, (), ())
            for x in inputs:
                if isinstance(x, Tensor):
                    x.grad = None  # what is sent has it

    # Two private methods of torch, which are called before torch 2.13 only.

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Compare outputs with the stated shapes, but for the last stage's, which nobody receives."""
        if not self.is_last:
            cast(Any, super())._validate_fwd_outputs(outputs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Greet the neighbours, but not this rank itself, which holds both stages where a V turns."""
        greetings: list[dist.P2POp] = cast(Any, super())._get_init_p2p_neighbors_ops()
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second of two backward passes: the gradients of weights, for which FSDP has no hook.

        Some operators read a weight to compute its own gradient (layer_norm's does), so weights are gathered.
        Of the model's first stage this is the whole backward, which runs FSDP's hooks.
        """
        if self.is_first:
            if self._order:
                self._order.recall()
            with self._sparing(), self._summing(last_backward):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            return
        if self.gathers_each:
            gather_weights(self.module.sharded)
        with self._sparing(), in_one_backward(self.root):
            inputs, groups, *outputs = self.backward_state[bwd_chunk_id]
            compute_weight_gradients(self.module.parameters(), groups)
            self.backward_state[bwd_chunk_id] = (inputs, [], *outputs)  # torch has no group left to compute
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            if self.root is None:  # FSDP copies gradients anyway
                _lay_out_gradients(self.module.parameters())
            with self._summing(last_backward) as modules:
                sum_gradients(modules)

    def _sparing(self) -> AbstractContextManager[None]:
        """Let FSDP gather nothing of the root for a stage that uses none of it."""
        return left_alone(self.module.unused) if self.gathers_each else nullcontext()

    @contextmanager
    def _summing(self, last: bool) -> Iterator[list[FSDPModule]]:
        """Let FSDP sum what this pass sums. The root waits for the step's end, unless each micro-batch sums;
        its replicas then sum each time, because no pass of a stage is known to be the root's last.
        """
        modules = self.module.sharded if self.sums_each else self.module.own if last else []
        for module in modules:
            # This turns on both sums: over the ranks that hold shards, and over their replicas.
            module.set_requires_gradient_sync(True, recurse=False)
        for module in () if last else self.replicas_wait:
            module.set_requires_all_reduce(False, recurse=False)
        yield modules
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)


def _lay_out_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let each gradient lie in memory as its parameter does. ``backward`` sees to that; torch's second part
    of a backward does not, and a fused optimizer goes through the memory of both, element by element.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


class _WithoutMemory(dict[int, tuple[Any, ...]]):
    """Hold what torch states of the tensors that a stage receives, by micro-batch, without their memory."""

    def __setitem__(self, number: int, infos: tuple[Any, ...]) -> None:
        _free(infos)
        super().__setitem__(number, infos)


def _free(infos: Sequence[Any]) -> None:
    """Give the memory of these received tensors back; what the model's first stage is given has none."""
    for info in infos:
        if getattr(info, "buffer", None) is not None and not _torch_makes(info):
            info.buffer = torch.empty(0)


def _torch_makes(info: Any) -> bool:
    """Tell whether torch, since 2.15, makes the memory of a tensor when it is received, and gives it back."""
    return hasattr(info, "allocate_buffer")


class Pipeline:
    """Run a step's micro-batches, with ``step``, forward and backward through the stages of all ranks.

    ``name`` is the schedule over this rank's ``stages``, of ``count`` micro-batches with ``rows`` samples.
    Raises ``BadInput`` for an unknown name, and for micro-batches or stages that it cannot run.
    """

    def __init__(self, stages: Stages, name: str, count: int, rows: int) -> None:
        state, model = stages.state, stages.model
        check_schedule(name, state.layout, count)
        if any(map(recomputes_operators, model.modules())):
            check_recomputation(name, "selective")
        ends = Travels((rows,), torch.int64), Travels((), torch.float32)
        travels = [ends[0], *map(sent_as, stages.outputs[:-1]), ends[1]]
        driven = [DrivenStage(stages, number, *travels[number : number + 2]) for number in stages.parts]
        kind = schedule_kind(name)
        # The loss of a micro-batch is its share of the step's mean, so gradients are summed as they are.
        self._schedule = get_schedule_class(kind.torch_name)(
            driven if kind.virtual_stages > 1 else driven[0], count, scale_grads=False,
            loss_fn=lambda output, target: output,
        )  # fmt: skip
        self._stages, self._count, self._root = stages, count, model if is_sharded(model) else None
        if accelerator.is_accelerator(state.device):
            greet(neighbours(state), state.pipeline.group, state.device)

    def step(self, samples: Samples) -> None:
        """Run one step; collective over the pipeline. Gradients are in ``.grad``, added to what was there,
        summed over the data ranks.
        """
        stages, root = self._stages, self._root
        if root is not None:  # gathered weights stay until the end, or with ZeRO 3 while their block runs
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(stages.state.layout.zero == 3)
            root.set_requires_gradient_sync(False)
        first = stages.first_input if 0 in stages.parts else None
        keywords: dict[str, Any] = {
            f" {name}": sample  # with a blank, for torch's schedule has keywords of its own
            for name, sample in samples.items()
            if stages.has_last or stages.takes(name) or name == first
        }
        rows = torch.arange(len(next(iter(samples.values()))), device=stages.state.device)
        inputs = (rows,) if 0 in stages.parts else ()
        # Torch asks for a target of each micro-batch, although the last stage has computed the loss.
        target = torch.empty(self._count)
        self._schedule.step(*inputs, target=target, return_outputs=False, **keywords)
        if root is not None:  # sum the gradients that are not summed yet, and free all gathered weights
            end_backward(root)


def neighbours(state: ParallelState) -> list[int]:
    """Return the other pipeline ranks whose stages come before or after one of this rank's, in order."""
    layout, own_rank = state.layout, state.at.pipeline
    stages = {number + step for number in layout.stages_of(own_rank) for step in (-1, 1)}
    ranks = {layout.rank_of_stage(number) for number in stages if 0 <= number < layout.stages}
    return sorted(ranks - {own_rank})
