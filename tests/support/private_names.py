"""List the names that torch keeps private and trilith uses, and say which of them a torch lacks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp"

#: The private names of torch that we use, and names that it neither documents nor promises: (module or class,
#: attribute) pairs that ``self_check`` looks for.
PRIVATE = (
    ("torch.autograd.Variable", "_execution_engine"),
    ("torch.autograd.graph.Node", "_sequence_nr"),
    ("torch", "_assert_async"),
    ("torch._C", "_current_autograd_node"),
    ("torch._C", "_current_graph_task_id"),
    ("torch._C", "_TorchDispatchModeKey"),
    ("torch._C", "_get_dispatch_mode"),
    ("torch._C", "_len_torch_dispatch_stack"),
    ("torch._C._autograd", "_get_sequence_nr"),
    ("torch._C", "_will_engine_execute_node"),
    ("torch.Tensor", "_post_accumulate_grad_hooks"),
    ("torch", "_foreach_copy_"),
    ("torch", "_foreach_mul_"),
    ("torch", "_foreach_norm"),
    ("torch.ops._c10d_functional", "all_reduce"),
    ("torch.ops._c10d_functional", "all_reduce_"),
    ("torch.ops._c10d_functional", "all_gather_into_tensor"),
    ("torch.ops._c10d_functional", "all_gather_into_tensor_coalesced"),
    ("torch.ops._c10d_functional", "all_gather_into_tensor_out"),
    ("torch.ops._c10d_functional", "reduce_scatter_tensor"),
    ("torch.ops._c10d_functional", "all_to_all_single"),
    ("torch.ops._c10d_functional", "wait_tensor"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_backward"),
    ("torch", "_scaled_mm"),
    ("torch.optim.AdamW", "_init_group"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_disable_current_modes"),
    ("torch.distributed.ProcessGroup", "unbox"),
    ("torch._C._distributed_c10d", "_create_work_from_future"),
    ("torch.distributed.distributed_c10d", "_abort_process_group"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch.distributed.distributed_c10d", "_pg_names"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
)

#: The same for parameters that are cut or sharded.
FULLY_SHARDED = (
    ("torch.distributed.tensor.DTensor", "_local_tensor"),
    ("torch.distributed.tensor.DTensor", "_spec"),
    ("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state"),
    (f"{_FSDP}_state.FSDPState", "_root_post_backward_final_callback"),
    (f"{_FSDP}_state.FSDPState", "_state_ctx"),
    (f"{_FSDP}_state.FSDPState", "_comm_ctx"),
    (f"{_FSDP}_state.FSDPStateContext", "post_backward_final_callback_queued"),
    (f"{_FSDP}_param_group.FSDPCommContext", "post_forward_order"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "_post_forward_indices"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "fsdp_params"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "mesh_info"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "post_backward"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "reshard"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "unshard"),
    (f"{_FSDP}_param_group.FSDPParamGroup", "wait_for_unshard"),
    (f"{_FSDP}_param.FSDPParam", "_unsharded_param"),
    (f"{_FSDP}_param.FSDPParam", "sharded_param"),
    (f"{_FSDP}_param.FSDPParam", "_sharded_param_data"),
    (f"{_FSDP}_param.FSDPParam", "all_gather_outputs"),
    (f"{_FSDP}_param.FSDPParam", "init_all_gather_outputs"),
    (f"{_FSDP}_param.FSDPParam", "free_unsharded_param"),
    (f"{_FSDP}_param.FSDPParam", "offload_to_cpu"),
)

#: The same for compiled blocks.
COMPILER = (
    ("torch._dynamo.config", "accumulated_recompile_limit"),
    ("torch._dynamo.config", "recompile_limit"),
)

#: The same for pipelines.
PIPELINING = (
    ("torch.distributed.pipelining._backward", "stage_backward_input"),
    ("torch.distributed.pipelining.PipelineStage", "backward_state"),
    ("torch.distributed.pipelining.PipelineStage", "_get_init_p2p_neighbors_ops"),
    ("torch.distributed.pipelining.PipelineStage", "args_recv_info"),
    ("torch.distributed.pipelining.PipelineStage", "grad_recv_info"),
    ("torch.distributed.pipelining.PipelineStage", "get_fwd_recv_ops"),
    ("torch.distributed.pipelining.PipelineStage", "get_bwd_recv_ops"),
    ("torch.distributed.pipelining.PipelineStage", "forward_one_chunk"),
    ("torch.distributed.pipelining.PipelineStage", "backward_one_chunk"),
    ("torch.distributed.pipelining.PipelineStage", "backward_weight_one_chunk"),
)


#: The same for the device of Python.
SIMULATED = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    ("torch.testing._internal.distributed.fake_pg", "_create_fake_pg"),
    ("torch.utils.backend_registration", "_setup_privateuseone_for_python_backend"),
    ("torch.utils.backend_registration", "_DummyBackendModule"),
    ("torch._C", "_set_only_lift_cpu_tensors"),
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
)


def self_check(
    names: Iterable[tuple[str, str]] = (*PRIVATE, *FULLY_SHARDED, *COMPILER, *PIPELINING, *SIMULATED),
) -> list[str]:
    """Return which of the names this torch lacks; none in the supported versions.

    An attribute that only objects of a class have is looked for in the code of the class's methods.
    """
    importlib.import_module("torch.distributed._functional_collectives")  # registers the operators
    return [f"{path}.{name}" for path, name in names if not _has(path, name)]


def _has(path: str, name: str) -> bool:
    owner: Any = torch
    parts = path.split(".")
    for count, part in enumerate(parts[1:], 2):
        if not hasattr(owner, part):  # a module that nobody has imported yet
            with suppress(ImportError):
                importlib.import_module(".".join(parts[:count]))
        owner = getattr(owner, part, None)
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else ()
    codes = [getattr(method, "__code__", None) for cls in classes for method in vars(cls).values()]
    return any(name in code.co_names for code in codes if code is not None)
