"""Cut transformers' modules over the tensor ranks: by the plan that comes with its model, or whole."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    Stage,
    gather_from_tensor,
    split_to_tensor,
)
from ...parallel_state import BadInput, Cut, ParallelState, alone_or
from ..base.keys import names
from .config import AdoptedConfig, text_of
from .layers import (
    GatheredColumn,
    LatentAndRope,
    PackedColumn,
    SplitRow,
    TiedHead,
    cut_embedding,
    cut_experts,
    declare_rest,
    head_of,
    placed,
    put,
)
from .meta import OnMeta
from .probe import Probed
from .proved import better_plans
from .sequence import drop_parts_apart, enter, leave, regions_of, without_sequence

#: Of transformers' tensors that we hold in pieces: our names, in order, and the dim along which they lie.
Fused = dict[str, tuple[tuple[str, ...], int]]


@dataclass
class Cutter:
    """Replace and declare the modules of one model, in place."""

    made: OnMeta
    cfg: AdoptedConfig
    state: ParallelState | None
    fused: Fused

    @property
    def here(self) -> ParallelState:
        return alone_or(self.state)

    def linear(self, path: str, module: nn.Linear, layer: type[Any], **options: Any) -> Any:
        """Put a linear of ours in the place of one of transformers', with its first values."""
        biased = module.bias is not None
        made = layer(module.in_features, module.out_features, biased, state=self.state, **options)
        self._with_initials(made, path)
        put(self.made.model, path, placed(module, made))
        return made

    def packed(self, path: str, module: nn.Linear, count: int = 2) -> None:
        """Put a linear in the place of one whose outputs are several products, one after the other."""
        each = module.out_features // count
        parts = {str(number): each for number in range(count)}
        made = PackedColumn(module.in_features, parts, module.bias is not None, state=self.state)
        for number in parts:
            self._with_initials(made.get_submodule(number), path)
        for leaf in ("weight", "bias") if module.bias is not None else ("weight",):
            self.fused[f"{path}.{leaf}"] = tuple(f"{path}.{number}.{leaf}" for number in parts), 0
        put(self.made.model, path, placed(module, made))

    def _with_initials(self, module: nn.Module, path: str) -> None:
        stated = module.__dict__["declared"]
        for leaf in stated:
            stated[leaf] = replace(stated[leaf], initial=self.made.initials[f"{path}.{leaf}"])


Style = Callable[[Cutter, str, Any, Any], object]


def _unit(owner: nn.Module, features: int) -> int:
    """Return the number of features that stay together: a head's in attention."""
    width = getattr(owner, "head_dim", None)
    return width if isinstance(width, int) and width > 0 and features % width == 0 else 1


def _column(cutter: Cutter, path: str, module: Any, owner: Any) -> None:
    cutter.linear(path, module, ColumnParallelLinear, unit=_unit(owner, module.out_features))


def _row(cutter: Cutter, path: str, module: Any, owner: Any) -> None:
    cutter.linear(path, module, RowParallelLinear, unit=_unit(owner, module.in_features))


def _latent(cutter: Cutter, path: str, module: Any, owner: Any) -> None:
    width = text_of(cutter.cfg.in_transformers()).qk_rope_head_dim
    cutter.linear(path, module, LatentAndRope).rope_width = width


#: What each style of transformers' plans does to a linear.
LINEARS: dict[str, Style] = {
    "colwise": _column,
    "rowwise": _row,
    "colwise_gather_output": lambda cutter, path, module, owner: cutter.linear(path, module, GatheredColumn),
    "rowwise_split_input": lambda cutter, path, module, owner: cutter.linear(path, module, SplitRow),
    "packed_colwise": lambda cutter, path, module, owner: cutter.packed(path, module),
    "mla_kv_a_proj": _latent,
    "replicate": lambda cutter, path, module, owner: cutter.linear(path, module, ReplicatedLinear),
}
#: Styles of modules that are no linears, and of the embedding and the output layer, which are always cut.
OTHERS = names("""
    replicated_with_grad_allreduce local_params moe_tp_experts packed_rowwise
    embedding_rowwise embedding_colwise
""")
#: Styles that no tensor axis is offered for, with the reason.
REFUSED = {
    "all_reduce": "a sum that its module makes itself is not known",
    "moe_identity_expert": "experts that give back their input are not cut yet",
}


def style_of(plan: Mapping[str, str], path: str) -> str | None:
    """Return the style of a module's or parameter's path, in which each number is any."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path))


def plan_of(model: Any) -> dict[str, str]:
    """Return the tensor plan that transformers has for a model, by paths with ``*`` for numbers, and what
    ours has instead.
    """
    return dict(getattr(model, "_tp_plan", None) or {}) | better_plans().get(model.config.model_type, {})


def why_no_tensor(model: Any, kind: str) -> str:
    """Return which style of the plan of a model no tensor axis is offered for, or nothing."""
    for path, style in plan_of(model).items():
        if style in REFUSED:
            return f"{path}: {style}: {REFUSED[style]}"
        if style not in LINEARS and style not in OTHERS:
            return f"{path}: its plan's style {style} is not known"
    return ""


def cut_modules(
    made: OnMeta, cfg: AdoptedConfig, shown: Probed, stage: Stage, state: ParallelState | None
) -> Fused:
    """Cut all modules of a model on the meta device, in place; of blocks those of the stage alone."""
    model, kind, cutter = made.model, cfg.model_type, Cutter(made, cfg, state, {})
    here = cutter.here
    plan = plan_of(model)
    if here.tensor.size > 1 and (why := why_no_tensor(model, kind)):
        raise BadInput(kind, "tensor", expected="1", found=here.tensor.size, todo=why)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    if embedding is None or head is None:
        raise BadInput(kind, expected="a model with an embedding and an output layer", found="another")
    _check_shared(model, kind, embedding, head)
    tied = head.weight is embedding.weight
    ends = tied and not (stage.first and stage.last)
    initial = made.initials[f"{paths[embedding]}.weight"]
    head_initial = initial if tied else made.initials[f"{paths[head]}.weight"]
    whole = None if state is None or not here.sequence else without_sequence(state)
    # Positions are added to the embeddings of all tokens, and such code may view what blocks made likewise.
    at_ends = whole if whole and {*shown.entry} != {paths[embedding]} else state
    cut_embedding(embedding, kind, ends=ends, initial=initial, state=at_ends)
    own = None if tied and head.bias is None else head_of(head, kind, initial=head_initial, state=at_ends)
    put(model, paths[head], placed(head, TiedHead(embedding, own) if tied else own))
    inner = _inner(model, shown, stage)
    places = [f"{shown.blocks}.{number}" for number in stage.blocks] if shown.blocks and whole else []
    regions = [region for place in places for region in regions_of(model.get_submodule(place), place)]
    for path, module in [*model.named_modules()]:
        if path == paths[head] or module is embedding or module not in inner:
            continue
        in_region = any(f"{path}.".startswith(f"{region}.") for region in regions)
        outer = at_ends if not f"{path}.".startswith(f"{shown.blocks}.") else state
        cutter.state = whole if in_region else outer
        _cut_module(cutter, plan, path, module)
    for region in regions:
        enter(model.get_submodule(region), cfg.hidden_size, here, gather_from_tensor)
        leave(model.get_submodule(region), cfg.hidden_size, here, split_to_tensor)
    if at_ends is not state:
        if stage.first:
            enter(model.get_submodule(places[0]), cfg.hidden_size, here, split_to_tensor)
        if stage.last:
            leave(model.get_submodule(places[-1]), cfg.hidden_size, here, gather_from_tensor)
    if here.tensor.size > 1 and cfg.drops:
        for module in inner:
            drop_parts_apart(module, here)
    present = dict(model.named_parameters())
    for name in shown.idle:  # stays as files have it
        for part in cutter.fused.get(name, ((name,), 0))[0]:
            if part in present:
                present[part].requires_grad_(False)
    return cutter.fused


def _inner(model: nn.Module, shown: Probed, stage: Stage) -> set[nn.Module]:
    """Return all modules but those of blocks of other stages."""
    others = set[nn.Module]()
    if shown.blocks:
        for number, block in enumerate(model.get_submodule(shown.blocks).children()):
            others |= {*block.modules()} if number not in stage.blocks else set()
    return {*model.modules()} - others


def _cut_module(cutter: Cutter, plan: Mapping[str, str], path: str, module: nn.Module) -> None:
    style, here = style_of(plan, path), cutter.here
    owner = cutter.made.model.get_submodule(path.rpartition(".")[0])
    if type(module) is nn.Linear:
        LINEARS[style if style in LINEARS else "replicate"](cutter, path, module, owner)
        return
    packed = (style_of(plan, f"{path}.gate_up_proj") or "").startswith("packed")
    if style == "moe_tp_experts" and (
        dim := cut_experts(module, path, cutter.made.initials, here, packed=packed)
    ):
        parts = tuple(f"{path}.{name}" for name in ("gate_proj", "up_proj"))
        cutter.fused[f"{path}.gate_up_proj"] = parts, dim
        return
    cuts: dict[str, Cut] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if style_of(plan, f"{path}.{name}") in ["local_params", *["colwise"] * (parameter.dim() == 1)]:
            cuts[name] = Cut(0)
    partial = style == "replicated_with_grad_allreduce" or here.sequence
    if here.tensor.size > 1 and style in LINEARS and style != "replicate":
        expected, kind = f"a linear for the style {style}", cutter.cfg.model_type
        raise BadInput(kind, path, expected=expected, found=type(module).__name__, todo="Take tensor=1")
    declare_rest(module, path, cutter.made.initials, here, partial=partial, cut=cuts)


def _check_shared(model: Any, kind: str, embedding: Any, head: Any) -> None:
    """Refuse a parameter of several places, other than the embedding that is the output layer too.

    Of the output layer's bias, which the module around it names as well, the other name goes.
    """
    for module in model.modules() if getattr(head, "bias", None) is not None else ():
        if module is not head and module._parameters.get("bias") is head.bias:
            module._parameters["bias"] = None
    seen: dict[int, str] = {}
    ends = {id(getattr(embedding, "weight", None)), id(getattr(head, "weight", None))}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen and id(parameter) not in ends:
            expected, both = "one place for each parameter", f"{seen[id(parameter)]} is there again"
            raise BadInput(kind, name, expected=expected, found=both)
        seen[id(parameter)] = name
