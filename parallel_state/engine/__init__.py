"""Use torch's private names, in this room only, and check that this version of torch still has them.

Offers collectives that ``torch.compile`` can trace, kernels, access to FSDP's internals, and ``self_check``.
"""

from . import accelerator
from .autograd_and_compiler import (
    TorchDispatchMode,
    after_backward,
    allow_graphs,
    compiler_errors,
    wanted_gradients,
)
from .collectives import (
    abort_groups,
    all_gather,
    all_reduce,
    all_reduce_start,
    all_to_all,
    default_store,
    group_of_call,
    reduce_scatter,
    reduce_scatter_start,
    ring_exchange_start,
    ring_exchange_wait,
    work_of,
)
from .flight_recorder import dump_on_timeout, group_ranks, recorded_collectives
from .fully_sharded import (
    ReplicaSums,
    clocked,
    compute_with_stored,
    computed_with,
    end_backward,
    fsdp_modules,
    gather_weights,
    is_sharded,
    left_alone,
    ranks_of,
    sum_gradients,
)
from .kernels import assert_on_device, flash_attention, flash_attention_backward, scaled_mm
from .local_tensors import (
    AdamW,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    is_dtensor,
    like,
    local_data,
    tensors_in,
)
from .private_names import COMPILER, FULLY_SHARDED, PIPELINING, PRIVATE, require, self_check
from .waiting_time import Waited, waiting_time
from .weight_gradients import compute_weight_gradients, join_groups, passes_through_others

__all__ = [
    "AdamW",
    "COMPILER",
    "FULLY_SHARDED",
    "PIPELINING",
    "PRIVATE",
    "ReplicaSums",
    "TorchDispatchMode",
    "Waited",
    "abort_groups",
    "accelerator",
    "after_backward",
    "all_gather",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "allow_graphs",
    "assert_on_device",
    "compiler_errors",
    "compute_weight_gradients",
    "compute_with_stored",
    "computed_with",
    "default_store",
    "dump_on_timeout",
    "end_backward",
    "flash_attention",
    "flash_attention_backward",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "fsdp_modules",
    "gather_weights",
    "group_of_call",
    "group_ranks",
    "is_dtensor",
    "join_groups",
    "passes_through_others",
    "is_sharded",
    "clocked",
    "left_alone",
    "like",
    "local_data",
    "ranks_of",
    "recorded_collectives",
    "reduce_scatter",
    "reduce_scatter_start",
    "require",
    "ring_exchange_start",
    "ring_exchange_wait",
    "scaled_mm",
    "self_check",
    "sum_gradients",
    "tensors_in",
    "waiting_time",
    "wanted_gradients",
    "work_of",
]
