"""Cut transformers' modules over the tensor ranks: by the plan that comes with its model, or whole."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    Stage,
    copy_to_tensor,
    gather_from_tensor,
    reduce_from_tensor,
    split_to_tensor,
)
from ...parallel_state import BadInput, Cut, ParallelState, alone_or
from ..base.keys import names
from .config import AdoptedConfig
from .layers import (
    GATE_AND_UP,
    StandIn,
    cut_embedding,
    declare_own,
    draw_apart,
    enter,
    head_of,
    leave,
    leave_out,
    part_gate_and_up,
    put,
    without_sequence,
)
from .meta import initial_of
from .probe import Probed
from .proved import better_plans

#: By our name of an equal part of a tensor of transformers: its name, and the part's dim and number there.
Fused = dict[str, tuple[str, int, int]]
#: Changes what a linear takes or gives, on this rank and for the module that calls it.
Exchange = Callable[[Tensor, ParallelState, Any], Tensor]


def _latent_and_rope(x: Tensor, state: ParallelState, owner: Any) -> Tensor:
    """Return latents that all ranks use alike, and a rotated key that the rank's own heads alone use."""
    rope = owner.qk_rope_head_dim
    latent, key = x.split([x.shape[-1] - rope, rope], -1)
    return torch.cat([latent, copy_to_tensor(key, state)], -1)


class Style(NamedTuple):
    """State what a style of transformers' plans does to a linear, or to several whose outputs lie one after
    the other: the layer in its place, and what becomes of its input and output.
    """

    layer: type[Any] = ReplicatedLinear
    takes: Exchange | None = None
    gives: Exchange | None = None
    products: int = 1

    @property
    def inner(self) -> type[Any] | None:
        """Return the layer, if a rank has a part of what it takes or gives."""
        return None if self.takes or self.gives else self.layer


LINEARS = {
    "colwise": Style(ColumnParallelLinear),
    "rowwise": Style(RowParallelLinear),
    "colwise_gather_output": Style(
        ColumnParallelLinear, gives=lambda x, state, owner: gather_from_tensor(x, state)
    ),
    "rowwise_split_input": Style(RowParallelLinear, takes=lambda x, state, owner: split_to_tensor(x, state)),
    "packed_colwise": Style(ColumnParallelLinear, products=2),
    "mla_kv_a_proj": Style(gives=_latent_and_rope),
    "replicate": Style(),
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


def plan_of(model: Any) -> dict[str, str]:
    """Return the tensor plan that transformers has for a model, by paths with ``*`` for numbers, and what
    ours has instead.
    """
    return dict(getattr(model, "_tp_plan", None) or {}) | better_plans().get(model.config.model_type, {})


def why_no_tensor(plan: Mapping[str, str]) -> str:
    """Return which style of a plan no tensor axis is offered for, or nothing."""
    for path, style in plan.items():
        if style in REFUSED:
            return f"{path}: {style}: {REFUSED[style]}"
        if style not in LINEARS and style not in OTHERS:
            return f"{path}: its plan's style {style} is not known"
    return ""


def cut_modules(
    model: Any, cfg: AdoptedConfig, shown: Probed, stage: Stage, state: ParallelState | None
) -> Fused:
    """Cut the modules of a model that the stage computes with, in place, and leave out all others."""
    kind, here, plan = cfg.model_type, alone_or(state), plan_of(model)
    if here.tensor.size > 1 and (why := why_no_tensor(plan)):
        raise BadInput(kind, "tensor", expected="1", found=here.tensor.size, todo=why)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise BadInput(kind, expected="a model with an embedding and an output layer", found="another")
    _check_shared(model, kind, embedding, head)
    tied = embedding if head.weight is embedding.weight else None
    leave_out(model, shown, stage, but=tied if stage.last else None)
    outside = without_sequence(here)
    of_ends = None if state is None else outside
    modules = {module: path for path, module in model.named_modules() if not isinstance(module, StandIn)}
    if embedding in modules:
        ends = tied is not None and not (stage.first and stage.last)
        cut_embedding(embedding, kind, ends=ends, state=of_ends)
    if head in modules:
        put(model, modules.pop(head), head_of(head, kind, tied_to=tied, state=of_ends))
    blocks = [f"{shown.blocks}.{number}" for number in stage.blocks] if shown.blocks else []
    regions = [region for block in blocks for region in _regions(model.get_submodule(block), block)]
    between = {module for block in blocks for module in model.get_submodule(block).modules()}
    between -= {module for region in regions for module in model.get_submodule(region).modules()}
    cutter = Cutter(model, plan)
    for module, path in modules.items():
        if module is not embedding:
            cutter.cut(path, module, here if module in between else outside)
    if here.sequence:
        gather = partial(_of_tokens, gather_from_tensor, cfg.hidden_size, here)
        keep = partial(_of_tokens, split_to_tensor, cfg.hidden_size, here)
        for region in map(model.get_submodule, regions):
            enter(region, gather)
            leave(region, keep)
        if stage.first:
            enter(model.get_submodule(blocks[0]), keep)
        if stage.last:
            leave(model.get_submodule(blocks[-1]), gather)
    if here.tensor.size > 1 and cfg.drops:
        for module in model.modules():
            draw_apart(module, here)
    for name, parameter in model.named_parameters():
        if cutter.fused.get(name, (name,))[0] in shown.idle:  # stays as files have it
            parameter.requires_grad_(False)
    return cutter.fused


def _of_tokens(change: Callable[..., Tensor], width: int, state: ParallelState, x: Tensor) -> Tensor:
    """Change hidden states, (B, S, D) or (tokens, D), along tokens; leave others as they are."""
    return change(x, state, dim=x.dim() - 2) if x.dim() in (2, 3) and x.shape[-1] == width else x


def _regions(block: nn.Module, path: str) -> list[str]:
    """Return the paths of a block's modules that hold matrices, or modules with parameters."""
    return [
        f"{path}.{name}"
        for name, child in block.named_children()
        if any(parameter.dim() > 1 for parameter in child.parameters())
    ]


def _check_shared(model: Any, kind: str, embedding: Any, head: Any) -> None:
    """Refuse a parameter of several places, other than the embedding that is the output layer too.

    Of the output layer's bias, which the module around it names as well, the other name goes.
    """
    for module in model.modules():
        if module is not head and head.bias is not None and module._parameters.get("bias") is head.bias:
            module._parameters["bias"] = None
    ends = {embedding.weight, head.weight}
    first = dict[nn.Parameter, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name and parameter not in ends:
            expected, both = "one place for each parameter", f"{first[parameter]} is there again"
            raise BadInput(kind, name, expected=expected, found=both)


@dataclass
class Cutter:
    """Replace and declare the modules of one model, in place.

    ``plan``: styles by paths, in which each number is any.
    """

    model: Any
    plan: Mapping[str, str]
    fused: Fused = field(default_factory=dict)

    def _style(self, path: str) -> str:
        return self.plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), "")

    def cut(self, path: str, module: nn.Module, state: ParallelState) -> None:
        """Put a layer of ours in the place of a linear; declare what another module has of its own."""
        style = self._style(path)
        if type(module) is nn.Linear:
            self._linear(path, module, LINEARS.get(style, LINEARS["replicate"]), state)
            return
        if style in LINEARS and style != "replicate" and state.tensor.size > 1:
            expected, actual = f"a linear for the style {style}", type(module).__name__
            raise BadInput(
                self.model.config.model_type, path, expected=expected, found=actual, todo="Take tensor=1"
            )
        sizes = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
        styles = {name: self._style(f"{path}.{name}") for name in sizes}
        whole = styles.get("gate_up_proj", "").startswith("packed")
        if style == "moe_tp_experts" and (dim := _features_dim(module, packed=whole)):
            part_gate_and_up(module, dim)
            for number, part in enumerate(GATE_AND_UP):
                self.fused[f"{path}.{part}"] = f"{path}.gate_up_proj", dim, number
            cuts = dict.fromkeys(GATE_AND_UP, Cut(dim)) | {"down_proj": Cut(3 - dim)}
            declare_own(module, state, cuts=cuts)
            enter(module, partial(copy_to_tensor, state=state))
            leave(module, partial(reduce_from_tensor, state=state))
            return
        alone = {("local_params", size) for size in sizes.values()} | {("colwise", 1)}
        cuts = {name: Cut(0) for name, size in sizes.items() if (styles[name], size) in alone}
        seen_in_part = style == "replicated_with_grad_allreduce" or state.sequence
        declare_own(module, state, cuts=cuts, partial=seen_in_part)

    def _linear(self, path: str, module: nn.Linear, style: Style, state: ParallelState) -> None:
        owner = self.model.get_submodule(path.rpartition(".")[0])
        inputs, outputs, biased = module.in_features, module.out_features, module.bias is not None
        heads = _unit(owner, inputs if style.layer is RowParallelLinear else outputs)
        unit = heads if style.inner and style.products == 1 else 1
        apart = {str(number): outputs // style.products for number in range(style.products)}
        made = style.layer(inputs, apart if style.products > 1 else outputs, biased, unit=unit, state=state)
        for number, part in enumerate(made.parts):
            stated = vars(part.holder)["declared"]
            for leaf in stated:
                stated[leaf] = replace(stated[leaf], initial=initial_of(getattr(module, leaf)))
                if style.products > 1:
                    self.fused[f"{path}.{number}.{leaf}"] = f"{path}.{leaf}", 0, number
        if style.products > 1:
            made.register_forward_hook(lambda module, args, outputs: torch.cat(outputs, -1))
        if (takes := style.takes) is not None:
            enter(made, lambda x: takes(x, state, owner))
        if (gives := style.gives) is not None:
            leave(made, lambda x: gives(x, state, owner))
        vars(made)["inner"] = style.inner
        put(self.model, path, made)


def _unit(owner: nn.Module, features: int) -> int:
    """Return the number of features that stay together: a head's in attention."""
    width = getattr(owner, "head_dim", None)
    return width if isinstance(width, int) and width > 0 and features % width == 0 else 1


def _features_dim(module: Any, *, packed: bool) -> int:
    """Return the dim of 2 F in stacks of experts, (E, 2 F, D) and (E, D, F) or both transposed, or 0 if they
    have another form. ``packed``: the plan says that gate and up lie one after the other.
    """
    stacks = dict(module.named_parameters(recurse=False))
    concatenated = getattr(module, "is_concatenated", packed)
    if stacks.keys() != {"gate_up_proj", "down_proj"} or not concatenated:
        return 0
    if getattr(module, "has_post_expert_norm", False):
        return 0
    both, down = list(stacks["gate_up_proj"].shape), list(stacks["down_proj"].shape)
    return next((dim for dim in (1, 2) if down[3 - dim] * 2 == both[dim] and down[dim] == both[3 - dim]), 0)
