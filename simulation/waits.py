"""List every place at which the host waits for the device, with its reason; a new one is an error."""

from itertools import accumulate

from torch import Tensor

from .wait import Locals, Wait

_OURS = "parallel_state/engine/fully_sharded.py"
_FSDP = "torch/distributed/fsdp/_fully_shard/_fsdp"


def _spread(total: int, over: int) -> list[int]:
    return [total // over + (index < total % over) for index in range(over)]


def _ends(tensor: Tensor, inside: Locals) -> list[int]:
    """Let each expert have as many tokens as the next."""
    return [*accumulate(_spread(len(inside["x_MD"]), len(tensor)))]


def _table(tensor: Tensor, inside: Locals) -> list[list[list[int]]]:
    """Let each expert have as many tokens as the next, and this rank receive what it sends."""
    each, here = _spread(inside["flat"].numel(), inside["num_experts"]), inside["here"]
    sent = [each[at : at + here] for at in range(0, len(each), here)]
    return [sent, sent]


def _static(tensor: Tensor, inside: Locals) -> list[int]:
    """Let all stages vote that their shapes are known."""
    return [1]


WAITS = (
    # In every step.
    Wait(
        *("training/update.py: Update.__call__", "read", 3, "step"),
        reason="loss, norm and the counts of what was trained, once the update is launched; with offload the "
        "host updates, and needs the loss and the counts before",
    ),
    # In the layers of some models and layouts.
    Wait(
        *("layers/experts/dispatch.py: Dispatch.__init__", "read", 1, "block"),
        reason="over several ranks of experts the host sends rows, and must know how many",
        gives=_table,
    ),
    Wait(
        *("layers/experts/grouped_matmul.py: GroupSizes.sizes", "read", 1, "block"),
        reason="where torch has no kernel for all groups at once, the host cuts the rows",
        gives=_ends,
    ),
    # With offload FSDP copies each gradient to the host, waits for the copy, and adds it to the one before.
    Wait(f"{_OURS}: end_backward", "inside", 1, "parameter", "offload: the gradient's copy"),
    Wait(f"{_FSDP}_param_group.py: FSDPParamGroup.finalize_backward", "inside", 1, "parameter", "the same"),
    Wait(f"{_FSDP}_collectives.py: foreach_reduce", "read", 1, "parameter", "the same"),
    Wait(f"{_OURS}: sum_gradients", "read", 1, "parameter", "the same"),
    # At the start of a run, where it saves and evaluates, and in generation.
    Wait(
        "checkpoints/optimizer_state.py: _restored",
        "upload",
        0,
        "outside",
        "each moment's number of steps",
    ),
    Wait("layers/rotary.py: RotaryEmbedding._inverses", "upload", 0, "outside", "the table of frequencies"),
    Wait(
        "layers/device_constants.py: HostNumbers.on", "upload", 0, "outside", "slopes of ALiBi, shared heads"
    ),
    Wait("layers/attention/kernel_checks.py: _tried", "upload", 0, "outside", "a check of torch's kernels"),
    Wait("layers/attention/kernel_checks.py: _tried", "read", 0, "outside", "a check of torch's kernels"),
    Wait("layers/attention/kernel_checks.py: _documents", "upload", 0, "outside", "a check of the kernels"),
    Wait("parallel_state/initial_weights.py: fill", "upload", 0, "outside", "weights are drawn on the host"),
    Wait("checkpoints/load.py: fill", "upload", 0, "outside", "weights and moments of a checkpoint"),
    Wait(
        "checkpoints/rank_files.py: write_file", "read", 0, "outside", "weights and moments of a checkpoint"
    ),
    Wait("training/evaluation.py: Evaluator.__call__", "read", 0, "outside", "the loss on held-out tokens"),
    Wait(
        "training/parameter_norms.py: Norms._measure",
        "read",
        0,
        "outside",
        "the norms, in steps that ask for them",
    ),
    Wait("generation/generate.py: left_padded", "upload", 0, "outside", "the prompts"),
    Wait("generation/generate.py: generate", "upload", 0, "outside", "each token's random numbers"),
    Wait("generation/generate.py: generate", "read", 0, "outside", "each token, which may end the text"),
    Wait(
        "pipeline/driver.py: DrivenStage._get_init_p2p_neighbors_ops",
        "upload",
        0,
        "outside",
        "before torch 2.13: the number of a stage, which neighbours exchange",
    ),
    Wait("pipeline/runner.py: Pipeline.step", "upload", 0, "outside", "torch's vote on known shapes"),
    Wait("pipeline/runner.py: Pipeline.step", "read", 0, "outside", "torch's vote on known shapes", _static),
)
