"""Compare a model in a layout with the same model on one device: run it, gather its pieces, one rule.

The rule (``differences``) is a tensor's largest difference over its largest element. Some gradients are zero
but for rounding, as that of a key's bias without rotation: a tensor counts as at least ``zero_share`` of the
largest of all.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import IGNORE
from ..parallel_state import BadInput, Box, Constant, Normal, ParallelState, declarations, seed_of, stored_box
from ..parallel_state.engine import local_data
from ..parallel_state.initial_weights import fill
from ..ranks import RankError, run_parallel
from ..training.optimizer import make_adamw

#: A rank's part of each parameter: its box without padding, whether the rank owns it, the numbers.
Pieces = dict[str, tuple[Box, bool, Tensor]]

#: By module, the pieces of its outputs that ranks hold, each with its box of the whole (samples, length,
#: features); in the order in which modules ran.
Outputs = dict[str, list[tuple[Box, Tensor]]]

#: Makes the model and the step that takes a batch through it and returns the loss; gradients stay behind.
Build = Callable[[], tuple[nn.Module, Callable[[Any], Tensor]]]


@dataclass
class Observation:
    """Hold what one rank saw: each step's loss and gradient norm, its pieces of the first step's gradients
    and of the parameters before the first step and after the last, and of outputs that were recorded.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Pieces = field(default_factory=dict)
    initial: Pieces = field(default_factory=dict)
    parameters: Pieces = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)


def observe(
    build: Build,
    batches: Iterable[Any],
    state: ParallelState,
    *,
    lr: float = 0.0,
    clip: Callable[[nn.Module], Tensor] | None = None,
    strict: bool = True,
    then: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
) -> Observation:
    """Build a model on this rank, take a step with each batch, and return what was seen.

    With ``clip``, which clips the gradients and returns their norm, each step ends with it and an update by
    AdamW; ``then`` is given the model and the optimizer at the end. ``strict``: see ``pieces``.
    """
    model, step = build()
    observation = Observation(initial=pieces(model, state, strict=strict))
    optimizer = make_adamw(model, lr=lr)
    for number, batch in enumerate(batches):
        observation.losses.append(float(step(batch)))
        if number == 0:
            observation.gradients = pieces(model, state, gradients=True, strict=strict)
        if clip is not None:
            observation.norms.append(float(clip(model)))
            optimizer.step()
            optimizer.zero_grad()
    observation.parameters = pieces(model, state, strict=strict)
    if then is not None:
        then(model, optimizer)
    return observation


def on_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    """Call ``run_parallel``; what a rank refuses is refused in its words, as if it had not been a rank's."""
    try:
        return run_parallel(function, world, *args, timeout=timeout)
    except RankError as error:
        if isinstance(error.cause, BadInput):
            raise error.cause from None
        raise


def pieces(model: nn.Module, state: ParallelState, *, gradients: bool = False, strict: bool = True) -> Pieces:
    """Return this rank's pieces of the parameters, or of their gradients where they have one, on the host.

    ``strict``: asserts that padding is zero, and that just what is trained has a gradient.
    """
    declared, pieces_here = declarations(model), {}
    for name, parameter in model.named_parameters():
        declaration = declared[name]
        tensor = parameter.grad if gradients else parameter
        if strict and gradients:
            assert (tensor is None) != parameter.requires_grad, (
                f"{name} {'is frozen and has a' if tensor is not None else 'has no'} gradient"
            )
        if tensor is None:
            continue
        box = declaration.true_part(stored_box(parameter, declaration, state))
        part = local_data(tensor)
        if declaration.multiple is not None:
            assert not strict or not bool(part[box.shape[0] :].any()), f"{name}: padding is not zero"
            part = part[: box.shape[0]]
        pieces_here[name] = (box, declaration.owner(state.layout, state.at), part.clone().cpu())
    return pieces_here


def assemble(ranks: Sequence[Pieces]) -> dict[str, Tensor]:
    """Return whole tensors from all ranks' pieces, in the ranks' order.

    Asserts that each element is owned once, and that every copy equals it bit for bit.
    """
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        copies = [rank[name] for rank in ranks if name in rank]
        whole[name] = join([(box, tensor) for box, _, tensor in copies])
        owners = torch.zeros(whole[name].shape, dtype=torch.int32)
        for box, owner, tensor in copies:
            owners[box.slices] += owner
            assert torch.equal(whole[name][box.slices], tensor), f"{name}: copies differ at {box}"
        assert bool((owners == 1).all()), f"{name}: not every element has exactly one owner"
    return whole


def join(parts: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """Return the whole tensor of these parts; where there is none, it is NaN, or -1 of integers."""
    shape = tuple(max(stops) for stops in zip(*(box.stop for box, _ in parts), strict=True))
    dtype = parts[0][1].dtype
    whole = torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    for box, tensor in parts:
        whole[box.slices] = tensor
    return whole


def zero_share(dtype: torch.dtype) -> float:
    """Return the share of the largest of all tensors that each counts as at least: 1e-7 in fp64, 9e-4 in
    fp32, 0.1 in bf16, 0 of integers. Rounding is some ``eps`` of the largest.
    """
    return float(torch.finfo(dtype).eps ** 0.44) if dtype.is_floating_point else 0.0


def differences(single: Mapping[str, Tensor], ranks: Sequence[Pieces]) -> Iterator[tuple[str, float]]:
    """Yield each of one device's tensors, from the last to the first, and how far the ranks' pieces are from
    it at most, by the rule above. What is no number, has another shape, or is on one side only is infinitely
    far.
    """
    for name in {name for rank in ranks for name in rank} - single.keys():
        yield name, float("inf")
    sizes = {name: largest(tensor) for name, tensor in single.items()}
    of_all = max(sizes.values(), default=0.0)
    for name, whole in reversed([*single.items()]):
        scale = max(sizes[name], zero_share(whole.dtype) * of_all, 1e-300)
        gaps = [apart(whole[rank[name][0].slices], rank[name][2]) for rank in ranks if name in rank]
        yield name, max(gaps, default=float("inf")) / scale


def as_pieces(tensors: Mapping[str, Tensor]) -> Pieces:
    """Return whole tensors as the pieces of one rank that owns everything."""
    return {name: (Box.whole(tuple(tensor.shape)), True, tensor) for name, tensor in tensors.items()}


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; equal infinities do not differ, and NaN always does."""
    if a.shape != b.shape:
        return float("inf")
    gaps = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(gaps.nan_to_num(nan=float("inf")).max()) if gaps.numel() else 0.0


def largest(x: Tensor) -> float:
    """Return the largest finite element, without its sign."""
    finite = x.detach().double().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def random_rows(samples: int, length: int, ids: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (input_ids, labels), both (samples, length) int64; ignored labels are spread unevenly."""
    tokens = torch.randint(ids, (samples, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(samples):
        labels[sample, : (3 * sample) % length] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def roughen(model: nn.Module, seed: int, state: ParallelState, also: Collection[str] = ()) -> None:
    """Add noise to vectors, to parameters that begin with equal values, and to those ``also`` named: at their
    first values most mistakes do not show.
    """
    declared = declarations(model)
    for name, parameter in model.named_parameters():
        declaration, data = declared[name], local_data(parameter)
        box = declaration.true_part(stored_box(parameter, declaration, state))
        if (
            box.size
            and not declaration.integer
            and (len(declaration.shape) < 2 or isinstance(declaration.initial, Constant) or name in also)
        ):
            noise = torch.zeros(box.shape, dtype=data.dtype, device=data.device)
            fill(noise, box, declaration.shape, Normal(0.3), seed_of(seed, "rough", name))
            data[: box.shape[0]].add_(noise) if box.shape else data.add_(noise)
