"""Use torch's private names, in this file only, and check that this version of torch still has them.

Collectives here are torch's functional ones: they return new tensors, wait for the result, and are traced by
``torch.compile``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp"

#: The private names of torch that we use, and names that it neither documents nor promises: (module or class,
#: attribute) pairs that ``self_check`` looks for.
PRIVATE = (
    ("torch.autograd.Variable", "_execution_engine"),
    ("torch", "_assert_async"),
    ("torch", "_foreach_copy_"),
    ("torch", "_foreach_mul_"),
    ("torch", "_foreach_norm"),
    ("torch.ops._c10d_functional", "all_reduce"),
    ("torch.ops._c10d_functional", "all_gather_into_tensor"),
    ("torch.ops._c10d_functional", "reduce_scatter_tensor"),
    ("torch.ops._c10d_functional", "all_to_all_single"),
    ("torch.ops._c10d_functional", "wait_tensor"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_backward"),
    ("torch", "_scaled_mm"),
    ("torch.distributed.tensor.DTensor", "_local_tensor"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.distributed.ProcessGroup", "unbox"),
    ("torch._C._distributed_c10d", "_create_work_from_future"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state"),
    (f"{_FSDP}_state.FSDPState", "_root_post_backward_final_callback"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "fsdp_params"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "post_backward"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "unshard"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "wait_for_unshard"),
    (f"{_FSDP}_param.FSDPParam", "_unsharded_param"),
    ("torch._dynamo.config", "accumulated_recompile_limit"),
    ("torch._dynamo.config", "recompile_limit"),
)

#: The same for pipelines, checked when they are first used: importing torch's takes half a second.
PIPELINING = (
    ("torch.distributed.pipelining.PipelineStage", "_get_init_p2p_neighbors_ops"),
    ("torch.distributed.pipelining.PipelineStage", "backward_one_chunk"),
    ("torch.distributed.pipelining.PipelineStage", "backward_weight_one_chunk"),
    ("torch.distributed.pipelining.schedules._PipelineScheduleRuntime", "pipeline_order"),
    ("torch.distributed.pipelining.schedules._PipelineScheduleRuntime", "_prepare_schedule_with_comms"),
)


def self_check(names: Iterable[tuple[str, str]] = PRIVATE) -> list[str]:
    """Return which of the names this torch lacks; none in the supported versions (2.11 to 2.13).

    An attribute that only objects of a class have is looked for in the code of the class's methods.
    """
    importlib.import_module("torch.distributed._functional_collectives")  # registers the operators
    return [f"{path}.{name}" for path, name in names if not _has(path, name)]


def _has(path: str, name: str) -> bool:
    owner: Any = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part, None)
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else ()
    codes = [getattr(method, "__code__", None) for one in classes for method in vars(one).values()]
    return any(name in code.co_names for code in codes if code is not None)


def require(names: Iterable[tuple[str, str]]) -> None:
    """Raise ``ImportError`` unless this torch has the names; for a module that cannot do without them."""
    if missing := self_check(names):
        raise ImportError(
            f"torch {torch.__version__} lacks {', '.join(missing)}: trilith needs torch 2.11 to 2.13"
        )


require(PRIVATE)


def order_only(schedule: type[Any]) -> type[Any]:
    """Return torch's class of a pipeline schedule without its plan of messages, which takes most of the time
    and which only a run needs; what each rank computes in which order stays.
    """
    messages = {"_prepare_schedule_with_comms": lambda *_, **__: None}
    return type(schedule.__name__, (schedule,), messages)


_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Return a new tensor: ``x`` reduced (``sum`` or ``max``) over the ranks of ``group``."""
    out = _ops.all_reduce(x.contiguous(), op, group.group_name)
    return cast(Tensor, _ops.wait_tensor(out))


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors, which have one shape, along ``dim``."""
    size = group.size()
    out = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if dim == 0 or x.ndim == 0:
        return cast(Tensor, out)
    if _first_of_all(x, dim):  # one row, say: the pieces lie as they should
        return cast(Tensor, out.view(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]))
    return torch.cat(out.chunk(size, dim=0), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks; each rank keeps its equal piece of ``dim``."""
    return reduce_scatter_start(x, dim, group)()


def reduce_scatter_start(x: Tensor, dim: int, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin a ``reduce_scatter``; the function that is returned waits for it and gives the piece."""
    size = group.size()
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    if _first_of_all(x, dim):
        x = x.flatten(0, dim)
    elif dim != 0:
        x = torch.cat(x.chunk(size, dim=dim), dim=0)
    out = _ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name)
    return lambda: cast(Tensor, _ops.wait_tensor(out)).view(shape)


def all_reduce_start(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum ``x``, which nobody needs any more, over the ranks; the function that is returned waits
    for the sum and gives it.
    """
    out = _ops.all_reduce(x.contiguous(), "sum", group.group_name)
    return lambda: cast(Tensor, _ops.wait_tensor(out))


def _first_of_all(x: Tensor, dim: int) -> bool:
    """Tell whether pieces of ``dim`` lie one after the other in memory: no dim before it has several."""
    return dim > 0 and all(length == 1 for length in x.shape[:dim])


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[r]`` rows of ``x``, in order, to each rank r, and return the ``received[r]`` rows of each.

    The host knows the numbers of rows; any of them may be 0.
    """
    out = _ops.all_to_all_single(x.contiguous(), [*received], [*sent], group.group_name)
    return cast(Tensor, _ops.wait_tensor(out))


def ring_exchange_start(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x`` to the next rank of the ring while the one before sends its own, of the same shape.

    Returns at once; ``ring_exchange_wait`` waits. An all-to-all in which each rank has something for one
    other alone: unlike sends it comes in order with the group's other collectives, and needs no tags.
    """
    size, rank = group.size(), group.rank()
    here = [x.numel() if peer == (rank + 1) % size else 0 for peer in range(size)]
    there = [x.numel() if peer == (rank - 1) % size else 0 for peer in range(size)]
    coming = _ops.all_to_all_single(x.contiguous().view(-1), there, here, group.group_name)
    return cast(Tensor, coming)


def ring_exchange_wait(coming: Tensor, like: Tensor) -> Tensor:
    """Wait for the previous rank's piece and return it, in the shape of ``like``."""
    return cast(Tensor, _ops.wait_tensor(coming)).view(like.shape)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute fused attention, (B, H, S, E) in q's dtype, and its log-sums, (B, H, S) in at least fp32.

    ``F.scaled_dot_product_attention`` does not return the log-sums. All three inputs have as many heads.
    """
    if q.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    ``out`` and ``log_sums`` may be over more keys than ``k`` holds: the gradients are then these keys' part.
    """
    log_sums = log_sums.contiguous()
    if q.device.type == "cuda":
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        parts = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, log_sums, None, None, q.shape[2], k.shape[2], 0.0, causal, random, random),
            scale=scale,
        )
    else:
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sums, 0.0, causal, scale=scale
        )
    return cast(tuple[Tensor, Tensor, Tensor], tuple(parts))


def scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Multiply float8 matrices, (M, K) in rows and (K, N) in columns, times their scales, in fp32 or better.

    Scales: fp32, of one element each, or (M, 1) and (1, N). ``dtype``: of the product. ``fast``: whether GPUs
    may keep fewer digits of the sums.
    """
    if left.device.type == "cpu" and left_scale.numel() > 1:  # before torch 2.12 only one scale a tensor
        one = left_scale.new_ones(())
        product = torch._scaled_mm(left, right, one, one, out_dtype=dtype)
        return product * left_scale.to(dtype) * right_scale.to(dtype)
    return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast)


def local_data(x: Tensor) -> Tensor:
    """Return what this rank stores of ``x``, sharing memory and outside autograd."""
    here = x._local_tensor if isinstance(x, DTensor) else x
    return here.detach() if here.requires_grad else here


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, in ``dtype``; few kernels for all of them."""
    return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors, which have one dtype, by one number of that dtype, in place."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into the tensor at its place."""
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))


def like(parameter: Tensor, here: Tensor) -> Tensor:
    """Return this rank's piece ``here`` of a tensor that is cut as ``parameter`` is; its gradient, say."""
    if not isinstance(parameter, DTensor):
        return here
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(here, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def tensors_in(nest: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists and dicts."""
    leaves: list[Any] = importlib.import_module("torch.utils._pytree").tree_leaves(nest)
    return [one for one in leaves if isinstance(one, Tensor)]


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return every module in ``module``, itself included, that FSDP shards by itself."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def computed_with(modules: Iterable[FSDPModule]) -> Iterator[nn.Parameter]:
    """Yield the whole parameters that these modules compute with, gathered at the moment or not.

    Autograd's graph is made of these; ``module.parameters()`` gives the shards when they are not gathered.
    """
    for group in _groups(modules):
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            if whole is not None:
                yield whole


def gather_weights(modules: Iterable[FSDPModule]) -> None:
    """Gather the whole parameters of these modules; they stay until the next ``sum_gradients``."""
    for group in _groups(modules):
        group.unshard()
        group.wait_for_unshard()


def sum_gradients(modules: Iterable[FSDPModule]) -> None:
    """Sum the gradients that these modules have so far over the data ranks, now, and keep shards of the sums.

    FSDP does this in hooks of a backward pass that reaches a module's input. A pass that computes only the
    gradients of weights, later, runs no such hook. Afterwards the modules sum nothing until they are told to.
    """
    for module in modules:
        # Torch's own switch turns on both sums: over the ranks that hold shards, and over their replicas.
        module.set_requires_gradient_sync(True, recurse=False)
        for group in _groups([module]):
            group.post_backward()
        module.set_requires_gradient_sync(False, recurse=False)


def end_backward(root: FSDPModule) -> None:
    """Finish a step after its last backward: sum the remaining gradients, wait, free gathered weights."""
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    for group in _groups(fsdp_modules(cast(nn.Module, root))):
        group.post_backward()
    cast(Any, root)._get_fsdp_state()._root_post_backward_final_callback()


def _groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield what FSDP gathers and sums at once: one group for a module, or none if other modules hold all
    parameters.
    """
    for module in modules:
        state = cast(Any, module)._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # one alone before torch 2.12
        one = getattr(state, "_fsdp_param_group", None) if several is None else None
        yield from several if several is not None else ([] if one is None else [one])


def allow_graphs(count: int) -> None:
    """Let ``torch.compile`` make so many graphs of one function; beyond 8 it would give up."""
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def compiler_errors() -> type[Exception]:
    """Return the class of what ``torch.compile`` raises when it cannot compile."""
    errors: type[Exception] = importlib.import_module("torch._dynamo.exc").TorchDynamoException
    return errors


def assert_on_device(condition: Tensor, message: str) -> None:
    """Stop the device, and with it this rank, once it finds that ``condition`` is false; the host goes on."""
    torch._assert_async(condition, message)


def default_store() -> dist.Store:
    """Return the key-value store at which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def work_of(done: torch.futures.Future[Any]) -> Any:
    """Return a collective's handle, as its operator returns it, that ends with ``done``."""
    made: Any = torch._C._distributed_c10d
    return made._create_work_from_future(done).boxed()


def group_of_call(args: Iterable[Any]) -> dist.ProcessGroup:
    """Return the group that a collective operator is given, as an object or by name."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(one)
            except RuntimeError:
                continue  # a reduction, also an object of torch's
    name: Any = [one for one in args if isinstance(one, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)
