"""Put parallel layers in the places of transformers' own, under their names, and declare all that is left."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_to_tensor,
    gather_from_tensor,
    reduce_from_tensor,
    split_to_tensor,
)
from ...parallel_state import BadInput, Cut, Declaration, Initial, ParallelState, declare_parameter, local


class Lookup(nn.Embedding):
    """Look up tokens as ``VocabParallelEmbedding`` does; a subclass of transformers scales or norms them."""

    state: ParallelState
    rows: int

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings; that of padding has no gradient, as in ``nn.Embedding``."""
        x = VocabParallelEmbedding.forward(cast(Any, self), tokens)
        if self.padding_idx is None or not torch.is_grad_enabled():
            return x
        padding = (tokens == self.padding_idx).unsqueeze(-1)
        if self.state.sequence:
            padding = split_to_tensor(padding, self.state, dim=1)
        return torch.where(padding, x.detach(), x)

    def project(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states, computed with the embedding's weight."""
        return VocabParallelEmbedding.project(cast(Any, self), x)


class TiedHead(nn.Module):
    """Compute logits with the embedding's weight, which stays the embedding's, and a bias of its own."""

    def __init__(self, embedding: Lookup, bias: VocabParallelHead | None = None) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding
        self.register_parameter("bias", None)
        if bias is not None:
            self._parameters["bias"] = bias.bias
            stated = {"bias": bias.__dict__["declared"]["bias"]}
            vars(self).update(declared=stated, declared_state=bias.__dict__["declared_state"])

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.__dict__["embedding"].weight)

    def forward(self, x: Tensor) -> Tensor:
        logits = cast(Tensor, self.__dict__["embedding"].project(x))
        return logits if self.bias is None else logits + local(cast(Tensor, self.bias))


class GatheredColumn(ColumnParallelLinear):
    """Give whole outputs on every rank, which all use them alike."""

    def forward(self, x: Tensor) -> Tensor:
        return gather_from_tensor(cast(Tensor, super().forward(x)), self.state)


def gives_parts(module: nn.Module) -> bool:
    """Tell whether a rank has only a part of what a linear makes."""
    return isinstance(module, ColumnParallelLinear) and not isinstance(module, GatheredColumn)


def has_part_of_outputs(module: nn.Module) -> bool:
    """Tell whether a rank has only a part of what some linear of the module makes: in attention, of heads."""
    return any(map(gives_parts, module.modules()))


class PackedColumn(ColumnParallelLinear):
    """Give the rank's parts of several products that transformers holds as one, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(cast(tuple[Tensor, ...], super().forward(x)), -1)


class SplitRow(RowParallelLinear):
    """Take whole inputs, of which each rank multiplies its piece."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, super().forward(split_to_tensor(x, self.state)))


class LatentAndRope(ReplicatedLinear):
    """Give the latents of keys and values, and a rotated key that the rank's own heads alone use."""

    rope_width: int

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = super().forward(x)
        latent, rope = both.split([both.shape[-1] - self.rope_width, self.rope_width], -1)
        return torch.cat([latent, copy_to_tensor(rope, self.state)], -1)


@contextmanager
def _reading(module: nn.Module) -> Iterator[None]:
    """Let the module's own code read parameters as the rank's own tensors; FSDP wants them as they are."""
    vars(module)["reads_local"] = True
    try:
        yield
    finally:
        vars(module)["reads_local"] = False


def _read(module: nn.Module, name: str) -> Tensor:
    parameter = cast(Tensor, module._parameters[name])
    return local(parameter) if vars(module).get("reads_local") else parameter


class CutExperts(nn.Module):
    """Compute, before transformers' class, with this rank's features of each expert; the sum is whole.

    Gate and up, one tensor in transformers, are parameters of their own, so that each is cut evenly.
    """

    state: ParallelState
    #: The dim of gate and up along which features lie.
    features_dim: int

    def forward(self, *inputs: Tensor) -> Tensor:
        entered = (copy_to_tensor(x, self.state) if x.is_floating_point() else x for x in inputs)
        with _reading(self):
            y = cast(Any, super()).forward(*entered)
        return reduce_from_tensor(y, self.state)

    @property
    def gate_up_proj(self) -> Tensor:
        return torch.cat([_read(self, "gate_proj"), _read(self, "up_proj")], dim=self.features_dim)

    @property
    def down_proj(self) -> Tensor:
        return _read(self, "down_proj")


def cut_experts(
    module: Any, path: str, initials: Mapping[str, Initial], state: ParallelState, *, packed: bool
) -> int:
    """Cut stacks of experts, (E, 2 F, D) and (E, D, F) or both transposed, in place; return the dim of 2 F,
    or 0 if they have another form. ``packed``: the plan says that gate and up lie one after the other.
    """
    stacks = dict(module.named_parameters(recurse=False))
    concatenated = getattr(module, "is_concatenated", packed)
    if stacks.keys() != {"gate_up_proj", "down_proj"} or not concatenated:
        return 0
    if getattr(module, "has_post_expert_norm", False):
        return 0
    both, down = list(stacks["gate_up_proj"].shape), list(stacks["down_proj"].shape)
    dim = next((dim for dim in (1, 2) if down[3 - dim] * 2 == both[dim] and down[dim] == both[3 - dim]), 0)
    if not dim:
        return 0
    module._parameters.clear()
    module.state, module.features_dim, both[dim] = state, dim, both[dim] // 2
    for name, shape, cut in (("gate_proj", both, dim), ("up_proj", both, dim), ("down_proj", down, 3 - dim)):
        initial = initials[f"{path}.{name if name == 'down_proj' else 'gate_up_proj'}"]
        declare_parameter(module, name, Declaration(tuple(shape), Cut(cut), initial=initial), state)
    module.__class__ = type(type(module).__name__, (CutExperts, type(module)), {})
    return dim


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of the one at ``path``."""
    above, _, leaf = path.rpartition(".")
    model.get_submodule(above)._modules[leaf] = module


def cut_embedding(
    module: Any, kind: str, *, ends: bool, initial: Initial, state: ParallelState | None
) -> None:
    """Cut the rows of an embedding over the tensor axis, in place.

    ``ends``: as in ``VocabParallelEmbedding``.
    Raises ``BadInput`` for another module, and for options of ``nn.Embedding`` that ``Lookup`` has not.
    """
    plain = isinstance(module, nn.Embedding) and module.max_norm is None
    if not plain or module.sparse or module.scale_grad_by_freq:
        expected = "nn.Embedding without max_norm, sparse or scale_grad_by_freq"
        actual = f"{type(module).__name__}({module.extra_repr()})"
        raise BadInput(kind, "embedding", expected=expected, found=actual)
    rows, width = module.weight.shape
    made = VocabParallelEmbedding(rows, width, ends=ends, initial=initial, state=state)
    was = type(module)
    module.__class__ = Lookup if was is nn.Embedding else type(was.__name__, (was, Lookup), {})
    module._parameters["weight"] = made.weight
    vars(module).update({key: made.__dict__[key] for key in ("state", "rows", "declared", "declared_state")})


def head_of(
    module: nn.Module, kind: str, *, initial: Initial, state: ParallelState | None
) -> VocabParallelHead:
    """Return an output layer of our own for transformers'."""
    if type(module) is not nn.Linear:
        raise BadInput(kind, "output layer", expected="nn.Linear", found=type(module).__name__)
    biased = module.bias is not None
    return VocabParallelHead(
        module.in_features, module.out_features, bias=biased, initial=initial, state=state
    )


def declare_rest(
    module: nn.Module,
    path: str,
    initials: Mapping[str, Initial],
    state: ParallelState,
    *,
    partial: bool = False,
    cut: Mapping[str, Cut] | None = None,
) -> None:
    """Declare a module's own parameters and persistent buffers, whole unless ``cut``, in place.

    ``partial``: each tensor rank sees a part of what they compute with. On several tensor ranks the module's
    code finds the rank's own tensors under their names.
    """
    parts = ("tensor",) if partial and state.tensor.size > 1 else ()
    transient, names = module._non_persistent_buffers_set, []
    stored = [(name, x) for name, x in module.named_buffers(recurse=False) if name not in transient]
    for name, tensor in [*module.named_parameters(recurse=False), *stored]:
        del (module._parameters if name in module._parameters else module._buffers)[name]
        initial, piece = initials[f"{path}.{name}" if path else name], (cut or {}).get(name)
        still = not tensor.requires_grad
        part = () if piece or still else parts
        stated = Declaration(tuple(tensor.shape), cut=piece, partial=part, buffer=still, initial=initial)
        declare_parameter(module, name, stated, state)
        names.append(name)
    if names and state.tensor.size > 1:
        made: Any = localized(cast(Any, type(module)), tuple(names))
        module.__class__ = made


@lru_cache(maxsize=256)
def localized(module_class: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass whose own code reads the parameters of these names as the rank's own tensors."""

    def reader(name: str) -> Callable[[nn.Module], Tensor]:
        return lambda module: _read(module, name)

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        with _reading(self):
            return module_class.forward(self, *args, **named)

    members = {name: property(reader(name)) for name in names} | {"forward": forward}
    return type(module_class.__name__, (module_class,), members)


def placed(module: nn.Module, made: Any) -> Any:
    """Give a layer of our own the training mode of the one that it replaces."""
    return made.train(module.training)
