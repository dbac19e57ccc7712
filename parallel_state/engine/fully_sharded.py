"""Reach into FSDP: its whole parameters, and the moments at which it gathers weights and sums gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .accelerator import is_host, use_in_current_stream
from .autograd_and_compiler import after_backward, in_backward, replaced

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Tell whether FSDP shards this module by itself. No module is sharded before FSDP is imported, which
    takes half a second that many commands need not spend.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return every module in ``module``, itself included, that FSDP shards by itself."""
    return [child for child in module.modules() if is_sharded(child)]


def ranks_of(module: FSDPModule) -> set[tuple[int, ...]]:
    """Return the ranks of each mesh over which FSDP averages or sums this module's own gradients."""
    return {tuple(sorted(group.mesh_info.mesh.mesh.flatten().tolist())) for group in groups_of([module])}


def parameters_of(module: FSDPModule) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP shards with this module: shards, and whole ones where gathered."""
    for group in groups_of([module]):
        yield from _parameters(group)


def computed_with(modules: Iterable[FSDPModule]) -> Iterator[nn.Parameter]:
    """Yield the whole parameters that these modules compute with, gathered at the moment or not.

    Autograd's graph is made of these; ``module.parameters()`` gives the shards when they are not gathered.
    """
    for group in groups_of(modules):
        yield from _parameters(group, shards=False)


def _parameters(group: Any, *, shards: bool = True) -> Iterator[nn.Parameter]:
    if shards:
        yield from (fsdp_param.sharded_param for fsdp_param in group.fsdp_params)
    wholes = (getattr(fsdp_param, "_unsharded_param", None) for fsdp_param in group.fsdp_params)
    yield from (whole for whole in wholes if whole is not None)


def gather_weights(modules: Iterable[FSDPModule]) -> None:
    """Gather the whole parameters of these modules; they stay until the next ``sum_gradients``."""
    for group in groups_of(modules):
        group.unshard()
        group.wait_for_unshard()


@contextmanager
def left_alone(modules: Iterable[FSDPModule]) -> Iterator[None]:
    """Keep these modules' weights as they are meanwhile: FSDP's hooks neither gather nor free them."""
    methods: dict[str, Callable[..., Any]] = {
        "unshard": lambda async_op=False: None,
        "reshard": lambda: None,
        "pre_forward": lambda module, args, kwargs: (args, kwargs),  # torch 2.14 looks at gathered weights
    }
    places = product(groups_of(modules), methods)
    with replaced(places, lambda group, name: methods[name]):
        yield


@contextmanager
def watched(
    modules: Iterable[FSDPModule],
    watch: Callable[[str, Iterator[nn.Parameter]], AbstractContextManager[None]],
) -> Iterator[None]:
    """While the ``with`` block runs, enter ``watch("all_gather", parameters)`` around each gathering of these
    modules' weights, and ``watch("reduce_scatter", parameters)`` around each sum of their gradients.

    ``parameters``: the shards and the whole ones that this is about.
    """
    kinds = {"unshard": "all_gather", "wait_for_unshard": "all_gather", "post_backward": "reduce_scatter"}

    def inside(group: Any, name: str) -> Callable[..., None]:
        call = getattr(group, name)

        def work(*arguments: Any) -> None:
            with watch(kinds[name], _parameters(group)):
                call(*arguments)

        return work

    with replaced(product(groups_of(modules), kinds), inside):
        yield


def sum_gradients(modules: Iterable[FSDPModule]) -> None:
    """Sum the gradients that these modules have so far over the data ranks, now, and keep shards of the sums.

    FSDP does this in hooks of a backward pass that reaches a module's input. A pass that computes only the
    gradients of weights, later, runs no such hook. The modules must have been told to sum.
    """
    for group in groups_of(modules):
        group.post_backward()


@contextmanager
def in_one_backward(root: FSDPModule | None) -> Iterator[None]:
    """Let the passes inside be one backward for FSDP, which does once, behind them, what follows a backward.

    Else it would take up the gradients that are there after each pass whose way leads through an output of a
    sharded module, and would cast those of some parameters to the dtype of sums and leave the rest, which it
    refuses to sum with them.
    """
    if root is None:
        yield
        return
    state = cast(Any, root)._get_fsdp_state()
    state._state_ctx.post_backward_final_callback_queued = True
    try:
        yield
    except BaseException:
        state._state_ctx.post_backward_final_callback_queued = False  # else no later backward would end
        raise
    _after_backward(root)


class ReplicaSums:
    """Sum the gradients of modules that FSDP does not cut over ``group``, the ranks with the same weights.

    FSDP's own sum over replicas copies each gradient three times, and on a CPU the host waits for it. Here a
    gradient is copied once, into the buffer that is summed and becomes the parameters' ``.grad``. On a CPU
    the sums run while backward goes on, and backward ends when they are there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.running: list[dist.Work] = []

    def take(self, module: FSDPModule) -> None:
        """Sum this module's gradients; FSDP was applied to it with a mesh of one rank."""
        sum_on_one_rank(module)
        module.set_all_reduce_hook(partial(self._sum, module))

    def _sum(self, module: FSDPModule, total: Tensor) -> None:
        sharded_params = [
            fsdp_param.sharded_param for group in groups_of([module]) for fsdp_param in group.fsdp_params
        ]
        # FSDP reads the sum at once to add it to an earlier one, to cast it, or to show it to a hook.
        unread = all(
            parameter.grad is None
            and parameter.dtype == total.dtype
            and not parameter._post_accumulate_grad_hooks
            for parameter in sharded_params
        )
        if is_host(total.device) and unread and in_backward():
            after_backward(self._wait)
            self.running.append(dist.all_reduce(total, group=self.group, async_op=True))
            return
        dist.all_reduce(total, group=self.group)
        use_in_current_stream(total)

    def _wait(self) -> None:
        while self.running:
            self.running.pop().wait()


def follow_unfreezing(module: FSDPModule) -> None:
    """Let FSDP ask again for the data types of a module's weights if none was trained when it asked first.

    It would give those that are trained later gradients in the data type that they are computed in.
    """

    def ask_again(*_: object) -> None:
        for group in () if torch.compiler.is_compiling() else groups_of([module]):
            if group._reduce_dtype is None:
                group._init_mp_dtypes()

    if not any(parameter.requires_grad for parameter in parameters_of(module)):
        cast(nn.Module, module).register_forward_pre_hook(ask_again)


def sum_on_one_rank(module: FSDPModule) -> None:
    """Let the buffer to which FSDP copies a module's gradients on a mesh of one rank become the sums.

    FSDP would copy them to a second one, and divide them on the way, into a third, if it was told a factor.
    """
    module.set_custom_reduce_scatter(cast(Any, _OneBuffer()))


class _OneBuffer:
    """Be FSDP's reduce-scatter over one rank: what it reads and what it writes are the same buffer."""

    def __init__(self) -> None:
        self.read: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer to read, and then the same one to write, in the stream of the sums."""
        read, self.read = self.read, None
        if read is None:
            self.read = read = torch.empty(*size, dtype=dtype, device=device)
        else:
            use_in_current_stream(read)
        return read


def compute_with_stored(module: FSDPModule) -> None:
    """Make FSDP compute with the stored parameters of a module on a mesh of one rank, instead of a copy.

    There the shard is the whole parameter, but FSDP would make memory for a second one, copy the shard there
    and free it after the step. It still does so where it casts the parameter or offloads it.
    """
    for group in groups_of([module]):
        for fsdp_param in group.fsdp_params:
            _share_memory(fsdp_param)


def _share_memory(fsdp_param: Any) -> None:
    make, free = fsdp_param.init_all_gather_outputs, fsdp_param.free_unsharded_param

    def shares() -> bool:
        return any(output is fsdp_param._sharded_param_data for output in fsdp_param.all_gather_outputs)

    # Torch 2.11 also says by name whether to make the memory anew, which it never asks for in eager mode.
    def share_or_make(sizes: list[int], dtypes: list[torch.dtype], *place: Any, **named: Any) -> None:
        stored = fsdp_param._sharded_param_data
        fills_storage = stored.untyped_storage().size() == stored.nbytes  # FSDP would cut off the rest
        if fsdp_param.offload_to_cpu or [stored.dtype] != dtypes or not fills_storage:
            make(sizes, dtypes, *place, **named)
        elif not shares():
            fsdp_param.all_gather_outputs = [stored]
            vars(fsdp_param).pop("_unsharded_param", None)  # it lies where the parameter lay before

    fsdp_param.init_all_gather_outputs = share_or_make
    fsdp_param.free_unsharded_param = lambda: None if shares() else free()


def end_backward(root: FSDPModule) -> None:
    """Finish a step after its last backward: sum the remaining gradients, wait, free gathered weights."""
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    for group in groups_of(fsdp_modules(cast(nn.Module, root))):
        group.post_backward()
    _after_backward(root)


def _after_backward(root: FSDPModule) -> None:
    """Do what FSDP does behind a backward, also where none of its hooks ran, one of which sets a flag."""
    state = cast(Any, root)._get_fsdp_state()
    context = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # since torch 2.15
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def groups_of(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield what FSDP gathers and sums at once: a module's group, if it holds parameters itself."""
    for module in modules:
        state = cast(Any, module)._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # one alone before torch 2.12
        group = getattr(state, "_fsdp_param_group", None) if several is None else None
        yield from several if several is not None else ([] if group is None else [group])
