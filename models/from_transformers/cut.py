"""Cut transformers' modules over the tensor ranks: by the plan that comes with its model, or whole."""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from .config import AdoptedConfig
from .layers import (
    GATE_AND_UP,
    OwnDraws,
    StandIn,
    cut_embedding,
    declare_own,
    head_of,
    leave_out,
    part_gate_and_up,
    surround,
    without_sequence,
)
from .probe import Probed, initial_of, plan_of


def _latent_and_rope(x: Tensor, state: ParallelState, owner: Any) -> Tensor:
    """Return latents that all ranks use alike, and a rotated key that the rank's own heads alone use."""
    rope = owner.qk_rope_head_dim
    latent, key = x.split([x.shape[-1] - rope, rope], -1)
    return torch.cat([latent, copy_to_tensor(key, state)], -1)


class Style(NamedTuple):
    """State what a style of transformers' plans does to a linear: the layer in its place, and what becomes of
    its input and output on this rank.
    """

    layer: type[Any] = ReplicatedLinear
    takes: Callable[..., Tensor] | None = None
    gives: Callable[..., Tensor] | None = None


#: By name; a text says why no tensor axis is offered.
STYLES: dict[str, Style | str] = {
    "colwise": Style(ColumnParallelLinear),
    "rowwise": Style(RowParallelLinear),
    "colwise_gather_output": Style(ColumnParallelLinear, gives=gather_from_tensor),
    "rowwise_split_input": Style(RowParallelLinear, takes=split_to_tensor),
    "mla_kv_a_proj": Style(gives=_latent_and_rope),
    # Of modules that are no linears, and of the embedding and the output layer, which are always cut.
    **dict.fromkeys(("replicate", "local_params", "moe_tp_experts"), Style()),
    **dict.fromkeys(("packed_colwise", "packed_rowwise"), Style()),
    **dict.fromkeys(("replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"), Style()),
    "all_reduce": "all_reduce: a sum that its module makes itself is not known",
    "moe_identity_expert": "moe_identity_expert: experts that give back their input are not cut yet",
}


class Cutter:
    """Cut the modules of a model that the stage computes with, in place, and leave out all others.

    ``fused``: by our name of an equal part of a tensor of transformers its name, and the part's dim and
    number there.
    """

    def __init__(
        self, model: Any, cfg: AdoptedConfig, probe: Probed, stage: Stage, state: ParallelState | None
    ) -> None:
        kind, rank_state = cfg.model_type, alone_or(state)
        self.model, self.plan, self.in_part = model, plan_of(model), probe.in_part
        of_text = model.config.get_text_config(decoder=True).to_dict()
        shares = [share for key, share in of_text.items() if "drop" in key]
        self.drops = rank_state.tensor.size > 1 and any(isinstance(x, float | int) and x > 0 for x in shares)
        self.draws = dict[nn.Module, OwnDraws]()
        self.fused = dict[str, tuple[str, int, int]]()
        why = next(self._why_uncut(), "") if rank_state.tensor.size > 1 else ""
        if why:
            raise BadInput(kind, "tensor", expected="1", found=rank_state.tensor.size, todo=why)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is None or head is None:
            raise BadInput(kind, expected="a model with an embedding and an output layer", found="another")
        _check_shared(model, kind, embedding, head)
        tied = embedding if head.weight is embedding.weight else None
        leave_out(model, probe, stage, but=tied if stage.last else None)
        outside = without_sequence(rank_state)
        of_ends = None if state is None else outside
        modules = {module: path for path, module in model.named_modules() if not isinstance(module, StandIn)}
        if modules.pop(embedding, None) is not None:
            ends = tied is not None and not (stage.first and stage.last)
            cut_embedding(embedding, kind, ends=ends, state=of_ends)
        if head in modules:
            model.set_submodule(modules.pop(head), head_of(head, kind, tied_to=tied, state=of_ends))
        blocks = [model.get_submodule(probe.blocks)[i] for i in stage.blocks] if probe.blocks else []
        inside = {module for block in blocks for region in _regions(block) for module in region.modules()}
        between = {module for block in blocks for module in block.modules()} - inside
        for module, path in modules.items():
            self._cut(path, module, rank_state if module in between else outside)
        if rank_state.sequence:
            gather = partial(_of_tokens, gather_from_tensor, cfg.hidden_size, rank_state)
            keep = partial(_of_tokens, split_to_tensor, cfg.hidden_size, rank_state)
            for region in (region for block in blocks for region in _regions(block)):
                surround(region, gather, keep)
            surround(blocks[0], keep if stage.first else None)
            surround(blocks[-1], None, gather if stage.last else None)
        for name, parameter in model.named_parameters():
            if self.fused.get(name, (name,))[0] in probe.idle:  # stays as files have it
                parameter.requires_grad_(False)

    def _why_uncut(self) -> Iterator[str]:
        for path, name in self.plan.items():
            why = STYLES.get(name, f"its plan's style {name} is not known")
            if isinstance(why, str):
                yield f"{path}: {why}"
        for name, parameter in self.model.named_parameters():
            if (
                name in self.in_part
                and parameter.dim() > 1
                and not {name, name.rpartition(".")[0]} & self.plan.keys()
            ):
                yield f"{name} meets a rank's heads or features alone, and no plan says how it is cut"

    def _cut(self, path: str, module: nn.Module, state: ParallelState) -> None:
        """Put a layer of ours in the place of a linear; declare what another module has of its own."""
        name = self.plan.get(path, "")
        row = STYLES.get(name)  # on one tensor rank it may be any
        style = row if isinstance(row, Style) else Style()
        if type(module) is nn.Linear:
            self._linear(path, module, style, state)
            return
        if style != Style() and state.tensor.size > 1:
            kind, expected = self.model.config.model_type, f"a linear for the style {name}"
            raise BadInput(kind, path, expected=expected, found=type(module).__name__, todo="Take tensor=1")
        sizes = {leaf: parameter.dim() for leaf, parameter in module.named_parameters(recurse=False)}
        styles = {leaf: self.plan.get(f"{path}.{leaf}", "") for leaf in sizes}
        whole = styles.get("gate_up_proj", "").startswith("packed")
        if name == "moe_tp_experts" and (dim := _features_dim(module, packed=whole)):
            part_gate_and_up(module, dim)
            for number, part in enumerate(GATE_AND_UP):
                self.fused[f"{path}.{part}"] = f"{path}.gate_up_proj", dim, number
            cuts = dict.fromkeys(GATE_AND_UP, Cut(dim)) | {"down_proj": Cut(3 - dim)}
            declare_own(module, state, cuts)
            surround(module, partial(copy_to_tensor, state=state), partial(reduce_from_tensor, state=state))
            return
        apart = {leaf for leaf in sizes if styles[leaf] == "local_params"}
        apart |= {leaf for leaf, size in sizes.items() if (styles[leaf], size) == ("colwise", 1)}
        planned = name == "replicated_with_grad_allreduce" or state.sequence
        # A plan may forget these, above all norms that only some configs have.
        in_part = {leaf for leaf in sizes if planned or f"{path}.{leaf}" in self.in_part}
        declare_own(module, state, dict.fromkeys(apart, Cut(0)), partial=in_part)

    def _linear(self, path: str, module: nn.Linear, style: Style, state: ParallelState) -> None:
        owner = self.model.get_submodule(path.rpartition(".")[0])
        inputs, outputs, biased = module.in_features, module.out_features, module.bias is not None
        features = inputs if style.layer is RowParallelLinear else outputs
        head = getattr(owner, "head_dim", 0)
        of_heads = isinstance(head, int) and head > 0 and features % head == 0  # which stay together
        # Each rank has a part of what the linear takes or gives.
        in_part = style.layer is not ReplicatedLinear and not (style.takes or style.gives)
        unit = head if of_heads and in_part else 1
        linear = style.layer(inputs, outputs, biased, unit=unit, state=state)
        (part,) = linear.parts.values()
        declared = vars(part)["declared"]
        for leaf in declared:
            declared[leaf] = replace(declared[leaf], initial=initial_of(getattr(module, leaf)))
        called = {"owner": owner} if style.gives is _latent_and_rope else {}
        surround(linear, *(change and partial(change, state=state, **called) for change in style[1:]))
        if self.drops and in_part:
            self.draws.setdefault(owner, OwnDraws(owner, state)).of(linear)
        self.model.set_submodule(path, linear)


def _of_tokens(change: Callable[..., Tensor], width: int, state: ParallelState, x: Tensor) -> Tensor:
    """Change hidden states, (B, S, D) or (tokens, D), along tokens; leave others as they are."""
    return change(x, state, dim=x.dim() - 2) if x.dim() in (2, 3) and x.shape[-1] == width else x


def _regions(block: nn.Module) -> list[nn.Module]:
    """Return a block's modules that hold matrices, or modules with parameters."""
    return [child for child in block.children() if any(p.dim() > 1 for p in child.parameters())]


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


def _features_dim(module: Any, *, packed: bool) -> int:
    """Return the dim of 2 F in stacks of experts, (E, 2 F, D) and (E, D, F) or both transposed, or 0 if they
    have another form. ``packed``: the plan says that gate and up lie one after the other.
    """
    shapes = {name: [*parameter.shape] for name, parameter in module.named_parameters(recurse=False)}
    joined = getattr(module, "is_concatenated", packed) and not getattr(module, "has_post_expert_norm", False)
    if shapes.keys() != {"gate_up_proj", "down_proj"} or not joined:
        return 0
    both, down = shapes["gate_up_proj"], shapes["down_proj"]
    return next((dim for dim in (1, 2) if down[3 - dim] * 2 == both[dim] and down[dim] == both[3 - dim]), 0)
