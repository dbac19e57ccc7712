"""Run DDP and ZeRO stages 1 to 3 on FSDP2: when parameters are gathered and when gradients are reduced.

=====  =======================================  ======================================  ====================
stage  parameters between steps                 gradients                               gathered again
=====  =======================================  ======================================  ====================
0      whole on every data rank                 whole, reduced at the last micro-batch  never
1      sharded; whole during the step           whole, reduced at the last micro-batch  once a step
2      sharded; whole during the step           reduce-scattered every micro-batch      once a step
3      sharded; a block whole while it computes reduce-scattered every micro-batch      forward and backward
=====  =======================================  ======================================  ====================

At stage 0 FSDP shards over one rank. ``ReplicaSums`` sums the gradients over the ranks with the same weights,
and ``compute_with_stored`` spares FSDP's copy of the weights. The stages are the same under a pipeline
(``pipeline/driver.py``). Without data and context ranks there is nothing to share and no FSDP;
``ComputeWeights`` casts the weights then. Source: Rajbhandari et al. 2020; FSDP2 is torch's.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from ..layers import keep_aside, stacks_of_experts, unshared_blocks
from ..parallel_state import (
    ParallelState,
    buffer_names,
    declarations,
    engine,
    mark_shared,
    refuse_foreign,
    refuse_hooks,
    refuse_replaced,
    require,
)
from ..parallel_state.engine import accelerator
from ..parallel_state.engine.autograd_and_compiler import OutsideOfForward
from ..parallel_state.engine.fully_sharded import (
    ReplicaSums,
    compute_with_stored,
    follow_unfreezing,
    parameters_of,
    ranks_of,
    sum_on_one_rank,
)
from ..parallel_state.engine.gathered_weights import drop_after_evaluation
from ..parallel_state.engine.local_tensors import without_view
from ..parallel_state.engine.own_weights import refuse_other_weights
from ..parallel_state.state import fsdp_mesh
from .precision import ComputeWeights, Precision

Model = TypeVar("Model", bound=nn.Module)


def shard_over_data(
    model: Model,
    state: ParallelState,
    precision: Precision,
    *,
    offload: bool = False,
    blocks: Iterable[nn.Module] | None = None,
) -> Model:
    """Shard the parameters of any model over the data axes with FSDP2 (ZeRO 1 to 3, or DDP), in place.

    FSDP handles one block at a time. A rank that shares its weights with no other needs it only to
    ``offload``; its weights are cast by ``ComputeWeights``, which also takes them out of DTensors, or used as
    they are. The model may be on the meta device; ``model.to_empty`` and ``initialize`` or a load come after
    this call, on the host if ``offload`` keeps weights, gradients and moments there (``resting_device``).
    ``blocks``: the modules that ZeRO 3 gathers at a time, each with a ``forward``; the default is
    ``find_blocks``. Those that share a parameter are gathered with the model.
    """
    refuse_foreign(model, "shard_over_data")
    refuse_replaced(model, state.layout, "shard_over_data")
    _refuse_narrower(model, precision.master)
    model.__dict__["precision"] = precision
    declared = declarations(model)
    fixed = buffer_names(declared)
    if state.layout.holds_alone and not offload:
        if precision.casts or any(engine.is_dtensor(parameter) for parameter in model.parameters()):
            _refuse_unfit(model)
            model.__dict__["compute_weights"] = ComputeWeights(model, precision, fixed=fixed)
        mark_shared(model, state)
        return model
    for name, declaration in declared.items():
        declaration.check_shared(name)
    _refuse_unfit(model)
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # half a second
    from torch.distributed.tensor import Shard

    regather, mesh, policy = state.layout.zero == 3, fsdp_mesh(state), precision.policy
    # Pages of a host without accelerator need no pinning, and cannot be.
    resting = (
        CPUOffloadPolicy(pin_memory=accelerator.copies_from_pinned(state.device))
        if offload
        else OffloadPolicy()
    )
    stacks = stacks_of_experts(model, state.layout)
    ignored = {parameter for name, parameter in model.named_parameters() if name in fixed}
    dims = {parameter: declared[name].shard_dim(state.layout) for name, parameter in model.named_parameters()}
    common: dict[str, Any] = {
        "shard_placement_fn": lambda parameter: Shard(dims[parameter]) if dims[parameter] else None,
        "ignored_params": ignored, "mp_policy": policy, "offload_policy": resting,
    }  # fmt: skip
    of_stacks = fsdp_mesh(state, experts=True) if stacks else mesh  # the ranks that hold the same experts
    for stack in stacks:
        fully_shard(stack, mesh=of_stacks, reshard_after_forward=regather, **common)
        keep_aside(stack)
    for block in unshared_blocks(model, blocks):
        if block not in stacks:
            block.register_forward_hook(_without_views)
            fully_shard(block, mesh=mesh, reshard_after_forward=regather, **common)
    # Backward begins with what forward ended with, the output layer; a loss may use its weight, too.
    # Between the two, a pipeline's stage runs forwards of other micro-batches.
    stays = state.layout.pipeline == 1 or getattr(model, "head_in_loss", False)
    fully_shard(model, mesh=mesh, reshard_after_forward=regather and not stays, **common)
    drop_after_evaluation(model)
    refuse_other_weights(model)
    _sum_gradients(model, stacks, state)
    for module in engine.fsdp_modules(model) if precision.casts else ():
        follow_unfreezing(module)
    _refuse_several_dtypes(model)
    mark_shared(model, state)
    return model


def _refuse_unfit(model: nn.Module) -> None:
    """Refuse parameters in whose place others cannot be computed with."""
    refuse_hooks(model, "shard_over_data")
    for name, parameter in model.named_parameters():
        todo = "Hold them as torch.view_as_real gives them, and compute with torch.view_as_complex"
        require(not parameter.is_complex(), "shard_over_data", name, "real numbers", "complex ones", todo)


def _refuse_narrower(model: nn.Module, master: torch.dtype) -> None:
    """Refuse trained parameters that cannot hold what a master does: small updates would round to nothing."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            holds = torch.promote_types(parameter.dtype, master) == parameter.dtype
            expected = f"{master}, the master of its Precision"
            todo = "Build the model in it, or say Precision(master=..., compute=..., reduce=...)"
            require(holds, "shard_over_data", name, expected, parameter.dtype, todo)


def _refuse_several_dtypes(model: nn.Module) -> None:
    """Refuse trained parameters of two dtypes whose gradients FSDP would sum as one tensor."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for module in engine.fsdp_modules(model):
        together = [parameter for parameter in parameters_of(module) if parameter in names]
        for first, other in pairwise(together):
            expected = f"the dtype of {names[first]}, which is gathered with it, {first.dtype}"
            todo = "Cast them alike, or put them into different ones of blocks="
            same_dtype = first.dtype == other.dtype
            require(same_dtype, "shard_over_data", names[other], expected, other.dtype, todo)


def _without_views(block: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a block's output in memory of its own: what changes a view in place drops FSDP's hook on it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return output
    return engine.map_tensors(output, without_view)


def _sum_gradients(model: nn.Module, stacks: Sequence[nn.Module], state: ParallelState) -> None:
    """Let FSDP sum gradients, never average: the loss is already divided by the step's tokens."""
    of_experts = state.replica_group(experts=True) if stacks else None
    groups = {False: state.replica_group(), True: of_experts}
    sums = {experts: ReplicaSums(group) for experts, group in groups.items() if group is not None}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        of_replicas = sums.get(module in stacks)
        if engine.is_sharded(module):
            for parameter in parameters_of(module):
                if parameter.requires_grad:
                    parameter.register_hook(OutsideOfForward(names[parameter]))
            if not state.layout.zero:
                compute_with_stored(module)
            module.set_force_sum_reduction_for_comms(True)
            if of_replicas is not None:
                of_replicas.take(module)
            elif all(len(ranks) == 1 for ranks in ranks_of(module)):
                sum_on_one_rank(module)
            else:
                module.set_gradient_divide_factor(1.0)


def resting_device(state: ParallelState, *, offload: bool) -> torch.device:
    """Return the device of the weights between steps, where the optimizer also steps."""
    return torch.device("cpu") if offload else state.device


def before_backward(model: nn.Module, state: ParallelState, *, last: bool, sum_replicas: bool) -> None:
    """Tell FSDP, before each micro-batch's forward, what its backward does with gradients and weights.

    ``sum_replicas``: whether the replicas of a shard (HSDP) add up their gradients now, or keep each their
    own until a later micro-batch of the step.
    """
    assert engine.is_sharded(model)
    zero = state.layout.zero
    model.set_requires_gradient_sync(last or zero >= 2)
    if not sum_replicas:
        model.set_requires_all_reduce(False)
    # Weights stay gathered between micro-batches (but for stage 3) and must be dropped after the last one:
    # otherwise the next step would compute with those from before the update.
    model.set_reshard_after_backward(last or zero == 3)
    model.set_is_last_backward(last)
