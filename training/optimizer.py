"""Make AdamW over the parameters that a rank stores, in groups that differ by patterns over names.

Only matrices have weight decay, unless a group says otherwise. A pattern finds our names or Hugging Face's.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ..layers import HeadsLayerNorm
from ..models import Family, ModelConfig
from ..models.patterns import checked
from ..parallel_state import BadInput, buffer_names, declarations, require
from ..recipes.section import ParameterGroup
from ..system import whole_number


def names_of(family: Family, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map our name of every parameter of the whole model to Hugging Face's, of which there may be several.

    Buffers, which no gradient moves, are left out.
    """
    names: dict[str, tuple[str, ...]] = {}
    (declared,) = family.declarations(config)
    fixed = buffer_names(declared)
    for link in family.links(config)[0]:
        if link.ours not in fixed:
            names[link.ours] = (*names.get(link.ours, ()), link.hf)
    return names


def groups_of(
    groups: Sequence[ParameterGroup], family: Family, config: ModelConfig
) -> dict[str, ParameterGroup]:
    """Map our names to a recipe's groups. Without groups no name is made: a large mixture has 45,000."""
    return assign(groups, names_of(family, config)) if groups else {}


def assign(
    groups: Sequence[ParameterGroup], names: Mapping[str, Sequence[str]], where: str = "recipe"
) -> dict[str, ParameterGroup]:
    """Map a parameter's name to its group: the first group whose pattern is found in one of its names.

    The names are those of the whole model, so that every rank gets the same result. Raises ``BadInput`` for
    an invalid pattern, for one that finds no parameter or only taken ones, and if all would be frozen.
    """
    assigned: dict[str, ParameterGroup] = {}
    for number, group in enumerate(groups):
        refused = partial(BadInput, where, key := f"optimizer.groups[{number}].match")
        pattern = checked(group.match, where, key)
        matched = [
            ours
            for ours, hf_names in names.items()
            if any(pattern.find("search", name) for name in (ours, *hf_names))
        ]
        if not matched:
            expected, todo = "a pattern that finds a parameter", f"Near names: {_near(group.match, names)}"
            raise refused(expected=expected, found=repr(group.match), todo=todo)
        unassigned = [ours for ours in matched if ours not in assigned]
        if not unassigned:
            taken, todo = f"which finds {len(matched)}, all taken", "Put the narrower pattern first"
            expected = "a parameter that no group before it takes"
            raise refused(expected=expected, found=f"{group.match!r}, {taken}", todo=todo)
        assigned |= dict.fromkeys(unassigned, group)
    trains = not names or not all(name in assigned and assigned[name].freeze for name in names)
    require(trains, where, "optimizer.groups", "a parameter that is not frozen", "all of them frozen")
    return assigned


def freeze(model: nn.Module, assigned: Mapping[str, ParameterGroup]) -> None:
    """Freeze the parameters of groups that say so; call it before FSDP."""
    for name, parameter in model.named_parameters():
        if name in assigned and assigned[name].freeze:
            parameter.requires_grad_(False)


def make_adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
    groups: Mapping[str, ParameterGroup] | None = None,
) -> torch.optim.AdamW:
    """Return PyTorch's AdamW over the trained parameters; matrices have weight decay, other parameters none.

    Works with any model. A parameter counts as a matrix by its whole shape, so the result is the same in
    every layout. ``groups``: for names of parameters, what is different for them. Source: Loshchilov and
    Hutter 2019.
    """
    declared = declarations(model)
    by_head = {name for name, module in model.named_modules() if isinstance(module, HeadsLayerNorm)}
    usual = ParameterGroup(match=".")
    sorted_out: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = (groups or {}).get(name, usual)
            # Biases of experts and norms of heads, which are stacked, are vectors too.
            dims = len(declared[name].shape) - (declared[name].experts or name.rpartition(".")[0] in by_head)
            decay = weight_decay if dims >= 2 else 0.0
            decay = decay if group.weight_decay is None else group.weight_decay
            sorted_out.setdefault((group.lr_scale, decay), []).append(parameter)
    parts = [
        {"params": params, "weight_decay": decay, "lr_scale": scale}
        for (scale, decay), params in sorted_out.items()
    ]
    # A pipeline stage of which nothing is trained has one group with nothing in it; torch refuses none.
    parts = parts or [{"params": [], "weight_decay": 0.0, "lr_scale": 1.0}]
    return torch.optim.AdamW(parts, lr=lr, betas=betas, eps=eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's rate for the next step: ``lr`` times its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _near(pattern: str, names: Mapping[str, Sequence[str]], most: int = 3) -> str:
    """Return names that are like the pattern, or have a part that is; one name stands for all blocks."""
    all_names = [name for ours, hf_names in names.items() for name in (*hf_names, ours)]
    plain = re.sub(r"\\\.", ".", pattern)
    plain = re.sub(r"\\d|[\^$*+?()\[\]{}|\\]", "", plain).strip(".")
    ends: dict[str, str] = {}
    for name in all_names:
        words = [word for word in name.split(".") if whole_number(word) is None]
        for first in range(len(words)):
            for last in range(first + 1, len(words) + 1):
                ends.setdefault(".".join(words[first:last]), name)
    near = difflib.get_close_matches(plain, ends, 2 * most, cutoff=0.4)
    return ", ".join(list(dict.fromkeys(ends[part] for part in near))[:most] or all_names[:most])
