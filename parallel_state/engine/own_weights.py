"""Refuse uses of a sharded model that would compute with other weights than its own, gathered ones."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
from torch import nn

from ...system.errors import BadInput
from .fully_sharded import fsdp_modules, groups_of

#: A parameter of a module by its name, and what FSDP keeps of it.
Place = tuple[str, Any]


def refuse_other_weights(root: nn.Module) -> None:
    """Let what FSDP shards in ``root`` refuse to be copied, to be called before or without ``root``, and to
    compute with tensors that ``torch.func.functional_call`` puts in the place of its parameters.
    """
    names = {module: name or "model" for name, module in root.named_modules()}
    for module in fsdp_modules(root):
        places: dict[nn.Module, list[Place]] = {}
        for group in groups_of([module]):
            for fsdp_param in group.fsdp_params:
                info = fsdp_param._module_info
                again = zip(info.shared_modules, info.shared_param_names, strict=True)
                for holder, leaf in ((info.module, info.param_name), *again):
                    places.setdefault(holder, []).append((leaf, fsdp_param))
        sharded = cast(nn.Module, module)
        sharded.__dict__["__deepcopy__"] = _refuse_copy
        # Before FSDP's own hook, which puts the gathered weights into their place, whatever is there.
        sharded.register_forward_pre_hook(_before_gathering(root, sharded, names, places), prepend=True)
        for holder, parameters in places.items():
            if holder is not sharded:
                holder.register_forward_pre_hook(_after_gathering(names[holder], parameters))


def _before_gathering(
    root: Any, sharded: nn.Module, names: dict[nn.Module, str], places: dict[nn.Module, list[Place]]
) -> Callable[..., None]:
    def check(*_: object) -> None:
        if torch.compiler.is_compiling():
            return
        began = root._get_fsdp_state()._is_root is not None
        if not began and sharded is not root:
            _refuse_call(names[sharded], "Call the model first, or this module within its forward")
        for holder, parameters in places.items():
            for leaf, fsdp_param in parameters:
                parameter = holder._parameters.get(leaf)
                own = (fsdp_param.sharded_param, getattr(fsdp_param, "_unsharded_param", None))
                ours = isinstance(parameter, nn.Parameter) and (not began or any(parameter is p for p in own))
                if parameter is not None and not ours:
                    expected = "the parameter that shard_over_data has sharded"
                    todo = "torch.func.functional_call takes a model before shard_over_data; afterwards copy "
                    todo += "values into the parameters (copy_, or load)"
                    raise BadInput(
                        names[holder], leaf, expected=expected, found="another tensor in its place", todo=todo
                    )

    return check


def _after_gathering(name: str, parameters: Iterable[Place]) -> Callable[..., None]:
    def check(module: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if any(module._parameters.get(leaf) is fsdp_param.sharded_param for leaf, fsdp_param in parameters):
            todo = "Call the model, or name this module in blocks= of shard_over_data"
            _refuse_call(name, todo)

    return check


def _refuse_call(name: str, todo: str) -> NoReturn:
    expected = "a call within the model's forward, which gathers its weights"
    raise BadInput("shard_over_data", name, expected=expected, found="a call of its own", todo=todo)


def _refuse_copy(memory: object) -> NoReturn:
    todo = "Copy it before shard_over_data, for an average of weights as AveragedModel(model) of "
    todo += "torch.optim.swa_utils does, and shard the copy (its .module) too"
    raise BadInput("copy", "model", expected="one that is not sharded", found="a sharded one", todo=todo)
