"""Use torch's private names, in this room only, of versions of torch that are known to have them.

Offers collectives that ``torch.compile`` can trace, kernels, and access to FSDP's internals.
"""
# mypy: implicit-reexport

from . import accelerator, supported_torch
from .autograd_and_compiler import (
    TorchDispatchMode,
    UncompiledMode,
    after_backward,
    allow_graphs,
    backward_number,
    compiler_errors,
    fake_mode,
    forward_number,
    in_backward,
    other_modes,
    outside_modes,
    wanted_gradients,
    without_compiler,
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
)
from .forward_order import ForwardOrder
from .fully_sharded import (
    ReplicaSums,
    clocked,
    compute_with_stored,
    computed_with,
    end_backward,
    fsdp_modules,
    gather_weights,
    in_one_backward,
    is_sharded,
    left_alone,
    parameters_of,
    ranks_of,
    sum_gradients,
    sum_on_one_rank,
    watched,
)
from .gloo_all_gather import gather_safely
from .kernels import assert_on_device, flash_attention, flash_attention_backward, scaled_mm
from .local_tensors import (
    AdamW,
    OfParts,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    is_dtensor,
    like,
    local_data,
    map_tensors,
    tensors_in,
    to_empty,
    without_view,
)
from .measuring import Waited, dump_on_timeout, group_ranks, recorded_collectives, waiting_time
from .weight_gradients import compute_weight_gradients
