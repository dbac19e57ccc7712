"""Save and restore what an optimizer keeps of each parameter: tensors of its shape, and single numbers.

A run's checkpoint has AdamW's two moments, and its memory has the updates. A checkpoint of ``save`` states
the optimizer's class, its moments and its numbers (``StoredOptimizer``).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from ..parallel_state import BadInput, ParallelState
from ..parallel_state.collective_errors import together
from ..parallel_state.engine import local_data
from ..storage.strict_json import StrictRecord

#: AdamW's running means of the gradient and of its square; each lies exactly as its parameter does.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: The options of torch's optimizers that need a moment, which a run without the option has not kept.
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_SHAPES = "tensors of the parameter's shape and dtype, and single numbers"
#: A parameter's numbers (dtype and value) and moments (``None``), by their names.
Kept = dict[str, tuple[str, float] | None]


def _number_type(name: str) -> str:
    if name not in ("int", "float") and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("no type of a number that torch has")
    return name


class StoredNumber(StrictRecord):
    """Record a number that an optimizer keeps of each parameter, such as ``step``.

    ``dtype``: torch's name of the tensor's, or Python's type. ``of``: parameters with another value, ``None``
    for those without.
    """

    dtype: Annotated[str, AfterValidator(_number_type)]
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
    return f"optimizer.{moment}.{parameter}"


def adamw(memory: Mapping[str, Any]) -> StoredOptimizer:
    """Return what a run's checkpoint has of AdamW: both moments, and the updates that ``memory`` counts.

    ``memory`` has ``updates``, and in ``updates_of`` the number for a parameter that steps have left out.
    """
    updates, of = float(memory.get("updates", 0)), dict(memory.get("updates_of", {}))
    step = StoredNumber(dtype="float32", value=updates, of=of)
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
    if stored.lr is not None:
        _restore_rates(model, optimizer, stored.lr)
    options = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter not in options or not parameter.requires_grad:
            continue
        parameter_state: dict[str, Any] = {}
        device = local_data(parameter).device
        for key, number in stored.numbers.items():
            if (value := number.of.get(name, number.value)) is not None:
                parameter_state[key] = _restored(number.dtype, value, device)
        for moment, without in stored.moments.items():
            if name not in without:
                parameter_state[moment] = torch.zeros_like(parameter, requires_grad=False)
        for option, moment in _NEEDED.items():
            if parameter_state and options[parameter].get(option) and moment not in parameter_state:
                raise BadInput(
                    "load", f"optimizer.{option}", expected=f"off, as the checkpoint has no {moment}",
                    found=options[parameter][option],
                    todo="Leave the optimizer out to begin anew from these weights",
                )  # fmt: skip
        optimizer.state.pop(parameter, None)
        if parameter_state:
            optimizer.state[parameter] = parameter_state


def _restore_rates(model: nn.Module, optimizer: torch.optim.Optimizer, lr: StoredNumber) -> None:
    """Give each group the learning rate that its parameters had."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for group in optimizer.param_groups:
        rates: dict[float, str] = {}
        for name in (names[each] for each in group["params"] if each in names):
            if (rate := lr.of.get(name, lr.value)) is not None:
                rates.setdefault(rate, name)
        if len(rates) > 1:
            (rate, name), (other_rate, other) = list(rates.items())[:2]
            raise BadInput(
                "load", "optimizer.lr", expected="parameters in the groups of the saved optimizer",
                found=f"{name} with {rate:g} and {other} with {other_rate:g} in one group",
                todo="Make the optimizer with the same groups, or leave it out to begin anew",
            )  # fmt: skip
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
    """Refuse an optimizer of other parameters, one that no checkpoint can hold, and one of another class than
    ``stored``.
    """
    mine, kind = set(model.parameters()), type(optimizer).__name__
    if any(parameter not in mine for group in optimizer.param_groups for parameter in group["params"]):
        todo = "Make it after shard_over_data, of model.parameters()"
        raise BadInput(
            where, "optimizer", expected="one of the model's parameters", found="one of others", todo=todo
        )
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor):
        raise BadInput(where, "optimizer", expected=f"one that keeps {_SHAPES}", found=kind)
    if stored is not None and stored.kind not in {each.__name__ for each in type(optimizer).__mro__}:
        todo = "Leave the optimizer out to begin anew from these weights"
        expected = f"{stored.kind}, which the checkpoint is of"
        raise BadInput(where, "optimizer", expected=expected, found=kind, todo=todo)


def _entries(
    where: str, name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, tuple[str, float] | None]]:
    """Yield what is kept of a parameter: a number with its dtype, or ``None`` for a moment."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        if _is_moment(key, value, parameter) and key.isidentifier():
            yield key, None
        elif isinstance(value, Tensor) and value.dim() == 0:
            yield key, (str(value.dtype).removeprefix("torch."), value.item())
        elif type(value) in (int, float):
            yield key, (type(value).__name__, value)
        else:
            form = [*value.shape] if isinstance(value, Tensor) else f"a {type(value).__name__}"
            actual = f"{type(optimizer).__name__}, whose {key} of {name} is {form}"
            raise BadInput(where, "optimizer", expected=f"one that keeps {_SHAPES}", found=actual)


def _is_moment(key: str, value: object, parameter: nn.Parameter) -> bool:
    alike = isinstance(value, Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
    return alike and key != "step"


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

    def here() -> dict[str, tuple[Kept, float | None]]:
        check_optimizer(where, model, optimizer)
        rates = {each: float(group["lr"]) for group in optimizer.param_groups for each in group["params"]}
        trained = [
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        entries = {
            name: (dict(_entries(where, name, parameter, optimizer)), rates.get(parameter))
            for name, parameter in trained
        }
        return entries if state.rank == state.layout.first_rank(state.at.pipeline) else {}

    gathered = {name: entries for rank in together(here, state) for name, entries in rank.items()}
    everywhere = {name: entries for name, (entries, _) in gathered.items()}
    moments: dict[str, tuple[str, ...]] = {}
    numbers: dict[str, StoredNumber] = {}
    for key in dict.fromkeys(key for entries in everywhere.values() for key in entries):
        values = {
            name: stored for name, entries in everywhere.items() if (stored := entries.get(key)) is not None
        }
        if any(key in entries and entries[key] is None for entries in everywhere.values()):
            moments[key] = tuple(
                name for name, entries in everywhere.items() if key not in entries or name in values
            )
        if values:
            (dtype, _), _ = Counter(values.values()).most_common(1)[0]
            each = {name: values[name][1] if name in values else None for name in everywhere}
            numbers[key] = _stored(dtype, each)
    rates = {name: rate for name, (_, rate) in gathered.items()}
    lr = _stored("float", rates) if any(rate is not None for rate in rates.values()) else None
    return StoredOptimizer(kind=type(optimizer).__name__, lr=lr, moments=moments, numbers=numbers)


def _stored(dtype: str, values: Mapping[str, float | None]) -> StoredNumber:
    """Record a number of each parameter: the most common one, and those of others."""
    known = [number for number in values.values() if number is not None]
    usual, _ = Counter(known).most_common(1)[0]
    of = {name: number for name, number in values.items() if number != usual}
    return StoredNumber(dtype=dtype, value=usual, of=of)
