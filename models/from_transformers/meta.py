"""Make transformers' model without memory, with how each parameter is initialized and what buffers hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...parallel_state import OWN, BadInput, Constant, Initial, Normal, Uniform
from .attention import registered
from .config import AdoptedConfig, quiet, text_of


@dataclass
class OnMeta:
    """Hold a model of transformers on the meta device.

    ``initials``: how each parameter is initialized; ``OWN`` where transformers does what no other ``Initial``
    does.
    ``constants``: values of the buffers that no file holds, by module and name.
    """

    model: Any
    initials: dict[str, Initial] = field(default_factory=dict)
    constants: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


def on_meta(cfg: AdoptedConfig, *, attention: str | None) -> OnMeta:
    """Make the model in torch's default dtype. ``attention``: transformers' ``attn_implementation``.

    Raises ``BadInput`` if it cannot be made on the meta device, or has tensors that cannot be declared.
    """
    config, kind, dtype = cfg.in_transformers(), cfg.model_type, torch.get_default_dtype()
    registered()
    # torch's grouped products have no fp64.
    experts = "eager" if dtype == torch.float64 else "grouped_mm"
    try:
        with quiet(), torch.device("meta"):
            model = auto_class(kind).from_config(config, dtype=dtype, attn_implementation=attention)
        # After the model has checked it: most have none.
        text_of(model.config)._experts_implementation = experts
        made = OnMeta(model)
        with quiet(), torch.device("cpu"), torch.no_grad():
            _initialize(made, kind)
    except BadInput:
        raise
    except Exception as error:  # whatever its code raises
        first = str(error).strip().partition("\n")[0][:160]
        expected = "a model that transformers makes without memory"
        raise BadInput(kind, expected=expected, found=f"{type(error).__name__}: {first}") from None
    return made


def auto_class(kind: str) -> Any:
    """Return what makes the model of a config: of one of several parts the whole, not its text part alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WHOLES

    return AutoModelForImageTextToText if kind in WHOLES else AutoModelForCausalLM


def _initialize(made: OnMeta, kind: str) -> None:
    model, initials = made.model, dict[int, Initial]()
    for path, module in model.named_modules():
        for name, member in vars(module).items():
            if isinstance(member, Tensor):
                todo = "transformers' code keeps a tensor that is neither parameter nor buffer"
                raise BadInput(kind, f"{path}.{name}", expected="no tensor", found="one", todo=todo)
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                numbers = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
                module._buffers[name] = numbers
                made.constants.append((module, name, numbers))
            elif not buffer.is_floating_point():
                expected = "floating numbers: transformers keeps others in its files"
                raise BadInput(kind, f"{path}.{name}", expected=expected, found=str(buffer.dtype))
    with _recording(initials):
        model.initialize_weights()
    made.constants = [
        (module, name, cast(Tensor, module._buffers[name])) for module, name, _ in made.constants
    ]
    for module, name, constant in made.constants:
        if constant.is_floating_point() and bool(constant.isnan().any()):
            where = f"{type(module).__name__}.{name}"
            expected = "values that transformers' _init_weights sets"
            raise BadInput(kind, where, expected=expected, found="a buffer that it leaves as it is")
    stored = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *stored]:
        made.initials[name] = initials.get(id(tensor), OWN)


def _unset(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else 0


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
def _recording(initials: dict[int, Initial]) -> Iterator[None]:
    """Note calls of ``transformers.initialization`` on meta tensors; let through those on other tensors."""
    from transformers import initialization

    originals = {
        name: getattr(initialization, name)
        for name in dir(initialization)
        if name.endswith("_") and not name.startswith("_") and callable(getattr(initialization, name))
    }

    def recorder(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
            read = _INITIALS.get(name)
            if tensor.is_meta:
                initials[id(tensor)] = OWN if read is None else read(tensor, *args, **named)
                return tensor
            return original(tensor, *args, **named)

        return record

    recorders: dict[str, Any] = {name: recorder(name, original) for name, original in originals.items()}
    with patch.multiple(initialization, **recorders):
        yield
