"""Make transformers' model without memory, whose tensors know how they start and what they hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...parallel_state import OWN, BadInput, Constant, Initial, Normal, Uniform
from .attention import register
from .config import AdoptedConfig, in_one_line, model_class, quiet, text_of


def on_meta(cfg: AdoptedConfig, *, attention: str | None) -> Any:
    """Make the model in torch's default dtype. ``attention``: transformers' ``attn_implementation``.

    ``initial_of`` says how its parameters start, and ``constants_of`` what buffers hold that no file does.
    Raises ``BadInput`` if it cannot be made on the meta device, or has tensors that cannot be declared.
    """
    config, kind, dtype = cfg.in_transformers(), cfg.model_type, torch.get_default_dtype()
    register()
    # torch's grouped products have no fp64.
    experts = "eager" if dtype == torch.float64 else "grouped_mm"
    with quiet(), in_one_line(kind, expected="a model that transformers makes without memory"):
        with torch.device("meta"):
            model = model_class(kind)._from_config(config, dtype=dtype, attn_implementation=attention)
        # After the model has checked it: most have none.
        text_of(model.config)._experts_implementation = experts
        with torch.device("cpu"), torch.no_grad():
            _initialize(model, kind)
    return model


def initial_of(tensor: Tensor) -> Initial:
    """Return how a tensor of the model starts; ``OWN`` where transformers does what no ``Initial`` does."""
    initial: Initial = vars(tensor).get("initial", OWN)
    return initial


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the values of the module's own buffers that no file holds."""
    constants: dict[str, Tensor] = vars(module).get("constants", {})
    return constants


def _initialize(model: Any, kind: str) -> None:
    """Let transformers' code initialize what it has made, which fills buffers and leaves notes elsewhere."""
    for path, module in model.named_modules():
        for name, member in vars(module).items():
            if isinstance(member, Tensor):
                todo = "transformers' code keeps a tensor that is neither parameter nor buffer"
                raise BadInput(kind, f"{path}.{name}", expected="no tensor", found="one", todo=todo)
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                unset = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, unset, device="cpu")
            elif not buffer.is_floating_point():
                expected = "floating numbers: transformers keeps others in its files"
                raise BadInput(kind, f"{path}.{name}", expected=expected, found=str(buffer.dtype))
    with _noting_initials():
        model.initialize_weights()
    for module in model.modules():
        buffers, transient = dict(module.named_buffers(recurse=False)), module._non_persistent_buffers_set
        constants = {name: numbers for name, numbers in buffers.items() if name in transient}
        for name, numbers in constants.items():
            if numbers.is_floating_point() and bool(numbers.isnan().any()):
                where = f"{type(module).__name__}.{name}"
                expected = "values that transformers' _init_weights sets"
                raise BadInput(kind, where, expected=expected, found="a buffer that it leaves as it is")
            module._buffers[name] = numbers.to("meta")
        vars(module)["constants"] = constants


def _normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Initial:
    return Normal(float(std)) if mean == 0 else OWN


def _truncated(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> Initial:
    return Normal(float(std)) if mean == 0 and min(-a, b) >= 6 * std else OWN


def _uniform(tensor: Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> Initial:
    return Uniform(float(b)) if a == -b else OWN


def _copied(tensor: Tensor, other: Tensor) -> Initial:
    if other.is_meta or not other.numel() or bool((other != other.flatten()[0]).any()):
        return OWN
    return Constant(float(other.flatten()[0]))


#: By the name of a function of ``transformers.initialization``: makes the ``Initial`` from its arguments.
_INITIALS: dict[str, Callable[..., Initial]] = {
    "normal_": _normal,
    "trunc_normal_": _truncated,
    "uniform_": _uniform,
    "copy_": _copied,
    "constant_": lambda tensor, val: Constant(float(val)),
    "zeros_": lambda tensor: Constant(0.0),
    "ones_": lambda tensor: Constant(1.0),
}


@contextmanager
def _noting_initials() -> Iterator[None]:
    """Let functions of ``transformers.initialization`` note on meta tensors what they would do with them."""
    from transformers import initialization

    def noting(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def note(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, **named)
            vars(tensor)["initial"] = _INITIALS[name](tensor, *args, **named) if name in _INITIALS else OWN
            return tensor

        return note

    notes: dict[str, Any] = {
        name: noting(name, function)
        for name, function in vars(initialization).items()
        if name.endswith("_") and not name.startswith("_")
    }
    with patch.multiple(initialization, **notes):
        yield
