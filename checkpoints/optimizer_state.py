"""Save and restore what an optimizer keeps of each parameter: tensors of its shape, and single numbers.

A run's checkpoint has AdamW's two moments, and its memory has the updates. A checkpoint of ``save`` states
the optimizer's class, its moments and its numbers (``StoredOptimizer``).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ..parallel_state import BadInput, ParallelState
from ..parallel_state.collective_errors import together
from ..parallel_state.engine import local_data
from ..storage.strict_json import StrictRecord

#: AdamW's running means of the gradient and of its square; each lies exactly as its parameter does.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: How the names of moments begin in a checkpoint.
MOMENT_PREFIX = "optimizer."
#: The options of torch's optimizers that need a moment, which a run without the option has not kept.
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_SHAPES = "tensors of the parameter's shape and dtype, and single numbers"
_ANEW = "Leave the optimizer out to begin anew from these weights"
#: A number (its dtype and value), or ``None`` for a moment.
Entry = tuple[str, float] | None
#: Among a parameter's entries, the name of its learning rate: no name that an optimizer keeps something by.
_RATE = ""


class StoredNumber(StrictRecord):
    """Record a number that an optimizer keeps of each parameter, such as ``step``.

    ``dtype``: torch's name of the tensor's, or Python's type. ``of``: parameters with another value, or none.
    """

    dtype: Annotated[str, Field(pattern=r"^(float|int|bool|bfloat16|float(16|32|64)|u?int(8|16|32|64))$")]
    value: float
    of: dict[str, float | None] = Field(default_factory=dict)


class StoredOptimizer(StrictRecord):
    """Record an optimizer's class, and what it keeps: each moment with the trained parameters that have none
    yet, and the numbers. ``lr``: the learning rate of each trained parameter, that of its group.
    """

    kind: str
    lr: StoredNumber | None = None
    moments: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    numbers: dict[str, StoredNumber] = Field(default_factory=dict)


def moment_name(moment: str, parameter: str) -> str:
    """Return the checkpoint's name of an optimizer moment."""
    return f"{MOMENT_PREFIX}{moment}.{parameter}"


def adamw(memory: Mapping[str, Any]) -> StoredOptimizer:
    """Return what a run's checkpoint has of AdamW: both moments, and the updates that ``memory`` counts.

    ``memory`` has ``updates``, and in ``updates_of`` the number for a parameter that steps have left out.
    """
    updates, exceptions = float(memory.get("updates", 0)), dict(memory.get("updates_of", {}))
    step = StoredNumber(dtype="float32", value=updates, of=exceptions)
    return StoredOptimizer(kind="Adam", moments=dict.fromkeys(MOMENTS, ()), numbers={"step": step})


def begin_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make zero moments for every trained parameter. AdamW makes its moments at its first update; if that
    step is skipped, there must be moments to save too.
    """
    restore_state(model, optimizer, adamw({}))


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, stored: StoredOptimizer) -> None:
    """Replace what the optimizer keeps: its numbers, and zeros for the moments, which are filled afterwards.

    Raises ``BadInput`` for an option that needs a moment which was not kept, and for a group of parameters
    that had several learning rates.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if stored.lr is not None:
        names = {parameter: name for name, parameter in trained.items()}
        for group in optimizer.param_groups:
            named = [names[parameter] for parameter in group["params"] if parameter in names]
            _restore_rate(group, named, stored.lr)
    options = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trained.items():
        if parameter not in options:
            continue
        device = local_data(parameter).device
        parameter_state: dict[str, Tensor | float] = {}
        for key, number in stored.numbers.items():
            if (value := number.of.get(name, number.value)) is not None:
                parameter_state[key] = _restored(number.dtype, value, device)
        for moment, without in stored.moments.items():
            if name not in without:
                parameter_state[moment] = torch.zeros_like(parameter, requires_grad=False)
        for option, moment in _NEEDED.items():
            chosen = options[parameter].get(option)
            if parameter_state and chosen and moment not in parameter_state:
                expected = f"off, as the checkpoint has no {moment}"
                raise BadInput("load", f"optimizer.{option}", expected=expected, found=chosen, todo=_ANEW)
        optimizer.state.pop(parameter, None)
        if parameter_state:
            optimizer.state[parameter] = parameter_state


def _restore_rate(group: dict[str, Any], names: Sequence[str], lr: StoredNumber) -> None:
    # Each learning rate that its parameters had, with the first of these.
    rates = {rate: name for name in reversed(names) if (rate := lr.of.get(name, lr.value)) is not None}
    if len(rates) > 1:
        both = " and ".join(f"{name} with {rate:g}" for rate, name in [*reversed(rates.items())][:2])
        expected, actual = "parameters in the groups of the saved optimizer", f"{both} in one group"
        todo = "Make the optimizer with the same groups, or leave it out to begin anew"
        raise BadInput("load", "optimizer.lr", expected=expected, found=actual, todo=todo)
    for rate in rates:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _restored(dtype: str, value: float, device: torch.device) -> Tensor | float:
    if dtype in ("int", "float"):
        return int(value) if dtype == "int" else value
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)


def check_optimizer(
    where: str, model: nn.Module, optimizer: torch.optim.Optimizer, stored: StoredOptimizer | None = None
) -> None:
    """Refuse an optimizer of other parameters, of another class than ``stored``, or that cannot be stored."""
    parameters, kind = set(model.parameters()), type(optimizer).__name__
    if any(parameter not in parameters for group in optimizer.param_groups for parameter in group["params"]):
        expected = "one of the model's parameters"
        todo = "Make it after shard_over_data, of model.parameters()"
        raise BadInput(where, "optimizer", expected=expected, found="one of others", todo=todo)
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor):
        raise BadInput(where, "optimizer", expected=f"one that keeps {_SHAPES}", found=kind)
    if stored is not None and stored.kind not in {base.__name__ for base in type(optimizer).__mro__}:
        expected = f"{stored.kind}, which the checkpoint is of"
        raise BadInput(where, "optimizer", expected=expected, found=kind, todo=_ANEW)


def _entries(
    where: str, name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Entry]]:
    """Yield what is kept of a parameter, by its name there."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if _is_moment(key, value, parameter) and key.isidentifier():
            yield key, None
        elif isinstance(value, Tensor) and value.dim() == 0:
            yield key, (str(value.dtype).removeprefix("torch."), value.item())
        elif type(value) in (int, float):
            yield key, (type(value).__name__, value)
        elif value is not None:
            form = [*value.shape] if isinstance(value, Tensor) else f"a {type(value).__name__}"
            actual = f"{type(optimizer).__name__}, whose {key} of {name} is {form}"
            raise BadInput(where, "optimizer", expected=f"one that keeps {_SHAPES}", found=actual)


def _is_moment(key: str, value: object, parameter: nn.Parameter) -> bool:
    same_form = isinstance(value, Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
    return same_form and key != "step"


def moment_of(optimizer: torch.optim.Optimizer, moment: str) -> Callable[[nn.Parameter], Tensor | None]:
    """Return a function from a parameter to its moment, for ``stored_parts``; a frozen parameter has none."""

    def choose(parameter: nn.Parameter) -> Tensor | None:
        value = optimizer.state[parameter].get(moment) if parameter in optimizer.state else None
        return value if parameter.requires_grad and _is_moment(moment, value, parameter) else None

    return choose


def gather_optimizer(
    where: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: ParallelState
) -> StoredOptimizer:
    """Return what a checkpoint states of an optimizer, from one rank of each stage. Collective."""

    def here() -> dict[str, dict[str, Entry]]:
        check_optimizer(where, model, optimizer)
        rates = {weight: float(group["lr"]) for group in optimizer.param_groups for weight in group["params"]}
        entries: dict[str, dict[str, Entry]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                entries[name] = dict(_entries(where, name, parameter, optimizer))
                if parameter in rates:
                    entries[name][_RATE] = "float", rates[parameter]
        return entries if state.rank == state.layout.first_rank(state.at.pipeline) else {}

    everywhere = {name: entries for rank in together(here, state) for name, entries in rank.items()}
    moments: dict[str, tuple[str, ...]] = {}
    numbers: dict[str, StoredNumber] = {}
    for key in dict.fromkeys(key for entries in everywhere.values() for key in entries):
        if with_moment := {name for name, entries in everywhere.items() if entries.get(key, _RATE) is None}:
            moments[key] = tuple(name for name in everywhere if name not in with_moment)
        values = {name: entries.get(key) for name, entries in everywhere.items()}
        if any(value is not None for value in values.values()):
            numbers[key] = _stored(values)
    lr = numbers.pop(_RATE, None)
    return StoredOptimizer(kind=type(optimizer).__name__, lr=lr, moments=moments, numbers=numbers)


def _stored(values: Mapping[str, Entry]) -> StoredNumber:
    """Record a number of each parameter: the most common one, and those of others."""
    ((dtype, usual), _), *_ = Counter(value for value in values.values() if value is not None).most_common(1)
    numbers = {name: None if value is None else value[1] for name, value in values.items()}
    exceptions = {name: number for name, number in numbers.items() if number != usual}
    return StoredNumber(dtype=dtype, value=usual, of=exceptions)
