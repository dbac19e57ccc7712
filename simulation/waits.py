"""List every place at which the host waits for the device, with its reason; a new one is an error.

Where the host reads a number that is not there, the list says what it is given.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from ..system.user_errors import PACKAGE, package_of

#: ``read``: a number or a tensor comes to the host. ``upload``: a tensor of the host's pageable memory goes
#: to the device, which CUDA ends with a wait for the stream. ``inside``: an operator reads by itself.
Kind = Literal["read", "upload", "inside"]

#: How often a wait may happen: in each step; there for each micro-batch of each stage of a rank, for each
#: block that this computes (again in its backward, too), or for each parameter; or never in a later step.
Per = Literal["step", "micro-batch", "block", "parameter", "outside"]

_HOUSE, _HERE = Path(__file__).resolve().parents[1], Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).parent  # as its functions name their files


class Locals:
    """Look up a local variable in the function that waits, or else in those that called it."""

    def __init__(self, frame: FrameType | None) -> None:
        self._frame = frame

    def __getitem__(self, name: str) -> Any:
        frame = self._frame
        while frame is not None and name not in frame.f_locals:
            frame = frame.f_back
        if frame is None:
            raise KeyError(name)
        return frame.f_locals[name]


@dataclass(frozen=True)
class Wait:
    """Describe a place in the code at which the host waits for the device.

    ``place``: file and qualified name of the function. ``most``: how often at most in each of ``per``.
    ``gives``: what is read there, from the tensor and local variables; by default zeros, and
    true for a condition.
    """

    place: str
    kind: Kind
    reason: str
    most: int = 0
    per: Per = "outside"
    gives: Callable[[Tensor, Locals], Any] | None = None


#: What a rank's host may wait for.
Waits = Sequence[Wait]


def _spread(total: int, over: int) -> list[int]:
    return [total // over + (index < total % over) for index in range(over)]


def _ends(tensor: Tensor, inside: Locals) -> list[int]:
    """Let each expert have as many tokens as the next."""
    return [*accumulate(_spread(len(inside["x_MD"]), len(tensor)))]


def _table(tensor: Tensor, inside: Locals) -> list[list[list[int]]]:
    """Let each expert have as many tokens as the next, and this rank receive what it sends."""
    tokens, rank_experts = _spread(inside["flat"].numel(), inside["num_experts"]), inside["rank_experts"]
    sent = [tokens[at : at + rank_experts] for at in range(0, len(tokens), rank_experts)]
    return [sent, sent]


def _static(tensor: Tensor, inside: Locals) -> list[int]:
    """Let all stages vote that their shapes are known."""
    return [1]


_OURS = "parallel_state/engine/fully_sharded.py"
_FSDP = "torch/distributed/fsdp/_fully_shard/_fsdp"
_ROWS = "over several ranks of experts the host sends rows, and must know how many"
_CUTS = "where torch has no kernel for all groups at once, the host cuts the rows"
_LOSS = (
    "loss, norm and the counts of what was trained, once the update is launched; with offload the host "
    "updates, and needs the loss and the counts before"
)
_CHECK = "a check of torch's kernels"
_STATE = "weights and moments of a checkpoint"
_VOTE = "torch's vote on known shapes"

#: Each place where a rank's host waits in a step.
WAITS = (
    # In every step.
    Wait("training/update.py: Update.__call__", "read", _LOSS, 3, "step"),
    # In the layers of some models and layouts.
    Wait("layers/experts/dispatch.py: Dispatch.__init__", "read", _ROWS, 1, "block", _table),
    Wait("layers/experts/grouped_matmul.py: GroupSizes.sizes", "read", _CUTS, 1, "block", _ends),
    # With offload FSDP copies each gradient to the host, waits for the copy, and adds it to the one before.
    Wait(f"{_OURS}: end_backward", "inside", "offload: the gradient's copy", 1, "parameter"),
    Wait(f"{_OURS}: _after_backward", "inside", "the same", 1, "parameter"),
    Wait(f"{_FSDP}_param_group.py: FSDPParamGroup.finalize_backward", "inside", "the same", 1, "parameter"),
    Wait(f"{_FSDP}_collectives.py: foreach_reduce", "read", "the same", 1, "parameter"),
    Wait(f"{_OURS}: sum_gradients", "read", "the same", 1, "parameter"),
    # At the start of a run, where it saves and evaluates, and in generation.
    Wait("checkpoints/optimizer_state.py: _restored", "upload", "each moment's number of steps"),
    Wait("layers/rope.py: RotaryEmbedding._inverses", "upload", "the table of frequencies"),
    Wait("layers/host_numbers.py: constants", "upload", "slopes of ALiBi, shared heads"),
    Wait("layers/attention/kernel_checks.py: _tried", "upload", _CHECK),
    Wait("layers/attention/kernel_checks.py: _tried", "read", _CHECK),
    Wait("layers/attention/kernel_checks.py: _documents", "upload", _CHECK),
    Wait("parallel_state/initial_weights.py: fill", "upload", "weights are drawn on the host"),
    Wait("checkpoints/load.py: fill", "upload", _STATE),
    Wait("checkpoints/rank_files.py: write_file", "read", _STATE),
    Wait("training/evaluation.py: held_out_loss", "read", "the loss on held-out tokens"),
    Wait("training/parameter_norms.py: NormLog._summed", "read", "the norms, in steps that ask for them"),
    Wait("generation/generate.py: left_padded", "upload", "the prompts"),
    Wait("generation/generate.py: generate", "upload", "each token's random numbers"),
    Wait("generation/generate.py: generate", "read", "each token, which may end the text"),
    Wait(
        "pipeline/driver.py: DrivenStage._get_init_p2p_neighbors_ops",
        "upload",
        "before torch 2.13: the number of a stage, which neighbours exchange",
    ),
    Wait("pipeline/driver.py: Pipeline.step", "upload", _VOTE),
    Wait("pipeline/driver.py: Pipeline.step", "read", _VOTE, gives=_static),
)


def waiting_place() -> tuple[str, FrameType | None]:
    """Return the innermost function of ours that runs, as ``file: Class.method``, and its frame; or, where
    autograd's own thread runs nothing of ours, that of torch's distributed package.
    """
    of_torch: tuple[str, FrameType | None] = "torch", None
    for place, frame in _functions():
        if not place.startswith("torch/"):
            return place, frame
        if of_torch[1] is None:
            of_torch = place, frame
    return of_torch


def _functions() -> Iterator[tuple[str, FrameType]]:
    """Yield the functions that run of ours, but for those of this room, and of torch's distributed package,
    the innermost first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname.partition(".<locals>")[0]
        if path.is_relative_to(_HOUSE):
            # A mode stands between torch and torch.
            if not (path.is_relative_to(_HERE) or name.endswith("__torch_dispatch__")):
                yield f"{path.relative_to(_HOUSE)}: {name}", frame
        elif path.is_relative_to(_TORCH / "distributed"):
            yield f"torch/{path.relative_to(_TORCH)}: {name}", frame
        frame = frame.f_back


# Numbers that a trace has not ------------------------------------------------------------------------------


class NumbersAsked(RuntimeError):
    """Report an operator whose result depends on numbers."""


_REFUSED = [False]
_GIVES = {wait.place: wait.gives for wait in WAITS if wait.gives is not None}


@contextmanager
def numbers_refused() -> Iterator[None]:
    """Let ``refuse_numbers`` raise inside this context: what code of users does may depend on them."""
    before, _REFUSED[0] = _REFUSED[0], True
    try:
        yield
    finally:
        _REFUSED[0] = before


def refuse_numbers(operator: str) -> None:
    """Raise ``NumbersAsked`` if code that is not this package's asks for what an operator reads."""
    frame: FrameType | None = sys._getframe(1)
    while _REFUSED[0] and frame is not None:
        if package_of(frame) != "torch" and not Path(frame.f_code.co_filename).is_relative_to(_HERE):
            if package_of(frame) != PACKAGE:
                raise NumbersAsked(f"{operator} asks for numbers")
            return
        frame = frame.f_back


def read_in_trace(tensor: Tensor) -> Any:
    """Return what ``Tensor.tolist`` gives in a trace: what the list says, or zeros."""
    for place, frame in _functions():
        if (gives := _GIVES.get(place)) is not None:
            return gives(tensor, Locals(frame))
    refuse_numbers("tolist")
    return _zeros(tensor.shape)


def _zeros(shape: Sequence[int]) -> Any:
    return 0 if not shape else [_zeros(shape[1:]) for _ in range(shape[0])]
