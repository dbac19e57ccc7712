"""Make transformers' model without memory, whose tensors know how they start and what they hold."""

from collections.abc import Callable
from inspect import BoundArguments, signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ...parallel_state import OWN, BadInput, Constant, Initial, Normal, Uniform
from .attention import ATTENTION, attention
from .config import AdoptedConfig, in_one_line, model_class, quiet


def on_meta(cfg: AdoptedConfig, *, ours: bool) -> Any:
    """Make the model in torch's default dtype. ``ours``: whether our attention computes its attention.

    ``initial_of`` says how its parameters start, and ``constants`` of modules what buffers hold that no file
    does. Raises ``BadInput`` if it cannot be made on the meta device, or has tensors that cannot be declared.
    """
    from transformers import AttentionInterface

    config, kind, dtype = cfg.in_transformers(), cfg.model_type, torch.get_default_dtype()
    AttentionInterface.register(ATTENTION, attention)
    # torch's grouped products have no fp64.
    experts = "eager" if dtype == torch.float64 else "grouped_mm"
    with quiet(), in_one_line(kind, expected="a model that transformers makes without memory"):
        with torch.device("meta"):
            implementation = ATTENTION if ours else None
            model = model_class(kind)._from_config(config, dtype=dtype, attn_implementation=implementation)
        # After the model has checked it: most have none.
        model.config.get_text_config(decoder=True)._experts_implementation = experts
        with torch.device("cpu"), torch.no_grad():
            _initialize(model, kind)
    return model


def initial_of(tensor: Tensor) -> Initial:
    """Return how a tensor of the model starts; ``OWN`` where transformers does what no ``Initial`` does."""
    initial: Initial = vars(tensor).get("initial", OWN)
    return initial


def _initialize(model: Any, kind: str) -> None:
    """Let transformers' code initialize what it has made, which fills buffers and leaves notes elsewhere."""
    from transformers import initialization

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
    notes: dict[str, Any] = {
        name: _noting(name, function)
        for name, function in vars(initialization).items()
        if name.endswith("_") and not name.startswith("_")
    }
    with patch.multiple(initialization, **notes):
        model.initialize_weights()
    for module in model.modules():
        buffers, transient = dict(module.named_buffers(recurse=False)), module._non_persistent_buffers_set
        constants = vars(module)["constants"] = {name: buffers[name] for name in transient & buffers.keys()}
        for name, numbers in constants.items():
            if numbers.is_floating_point() and bool(numbers.isnan().any()):
                where = f"{type(module).__name__}.{name}"
                expected = "values that transformers' _init_weights sets"
                raise BadInput(kind, where, expected=expected, found="a buffer that it leaves as it is")
            module._buffers[name] = numbers.to("meta")


def _noting(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what stands for a function of ``transformers.initialization``: on a tensor without memory it
    notes what the function would do.
    """

    def note(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **named)
        vars(tensor)["initial"] = _law(name, signature(original).bind(tensor, *args, **named))
        return tensor

    return note


def _law(name: str, call: BoundArguments) -> Initial:
    """Return how the call of an initialization lets its tensor start."""
    call.apply_defaults()
    match name, call.arguments:
        case "zeros_" | "ones_", _:
            return Constant(float(name == "ones_"))
        case "constant_", {"val": value}:
            return Constant(float(value))
        case "normal_", {"mean": 0, "std": std}:
            return Normal(float(std))
        case "trunc_normal_", {"mean": 0, "std": std, "a": a, "b": b} if min(-a, b) >= 6 * std:
            return Normal(float(std))
        case "uniform_", {"a": a, "b": b} if a == -b:
            return Uniform(float(b))
        case "copy_", {"other": other} if not other.is_meta and len(other.unique()) == 1:
            return Constant(float(other.flatten()[0]))
    return OWN
