"""Change transformers' modules in place: what each rank has of them, and what they read, take and give."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...layers import RowParallelLinear, Stage, VocabParallelEmbedding, VocabParallelHead, own_random
from ...parallel_state import BadInput, Cut, Declaration, ParallelState, declarations, declare_parameter
from ...parallel_state.engine import map_tensors
from .probe import Probed, initial_of

#: Makes another tensor of one that a module takes or gives.
Change = Callable[[Tensor], Tensor]


def surround(module: nn.Module, takes: Change | None, gives: Change | None = None) -> None:
    """Change the floating tensors that a module is given, and those that it gives, in place."""
    if takes is not None:
        module.register_forward_pre_hook(lambda _, *inputs: _changed(inputs, takes), with_kwargs=True)
    if gives is not None:
        module.register_forward_hook(lambda module, args, output: _changed(output, gives))


def _changed(nest: Any, change: Change) -> Any:
    return map_tensors(nest, lambda x: change(x) if x.is_floating_point() else x)


class StageEnd(Exception):
    """End transformers' forward behind the last block of a stage, with the hidden states that it made."""


class StandIn(nn.Module):
    """Stand in the place of a module that another rank computes.

    It gives ``received``, if that is given, or what it is given, or in the place of a table zeros; unless it
    ``ends`` the stage. ``outputs``: as in ``Probed``.
    """

    def __init__(
        self, module: nn.Module, *, outputs: int = 0, received: Tensor | None = None, ends: bool = False
    ) -> None:
        super().__init__()
        # What transformers' code reads of a module before it calls it, such as a block's kind of attention.
        self.__dict__.update({key: own for key, own in vars(module).items() if not key.startswith("_")})
        self.outputs, self.received, self.ends = outputs, received, ends

    def forward(self, *args: Any, **named: Any) -> Any:
        x: Any = args[0] if args else named.get("hidden_states")
        if self.ends:
            raise StageEnd(x)
        if "num_embeddings" in vars(self):
            # Tables of positions are given shapes, nothing or the mask first, which may have no memory.
            tensors = [argument for argument in (*args, *named.values()) if isinstance(argument, Tensor)]
            like = min(tensors, key=lambda tensor: tensor.is_meta)
            return torch.zeros(1, 1, vars(self)["embedding_dim"], device=like.device)
        x = x if self.received is None else self.received
        return (x, *[None] * (self.outputs - 1)) if self.outputs else x


def leave_out(model: Any, probe: Probed, stage: Stage, *, but: nn.Module | None) -> None:
    """Put stand-ins in the places of all that other ranks compute, ``but`` the embedding that is the output
    layer as well.
    """
    for number, block in enumerate(model.get_submodule(probe.blocks) if probe.blocks else ()):
        if number not in stage.blocks:
            model.set_submodule(f"{probe.blocks}.{number}", StandIn(block, outputs=probe.outputs))
    elsewhere: list[str] = []
    for path, module in around_blocks(model, probe).items():
        used_here = (stage.last if path in probe.exit else stage.first) or module is but
        if used_here or path.startswith(tuple(elsewhere)):
            continue
        if probe.blocks.startswith(f"{path}."):  # what is around the blocks has idle ones alone
            module._parameters.update(dict.fromkeys(module._parameters))
            continue
        model.set_submodule(path, StandIn(module))
        elsewhere.append(f"{path}.")


def around_blocks(model: Any, probe: Probed) -> dict[str, nn.Module]:
    """Return by path the modules with parameters of their own that are in no block."""
    return {
        path: module
        for path, module in model.named_modules()
        if path and not path.startswith(f"{probe.blocks}.") and [*module.parameters(recurse=False)]
    }


class Lookup(VocabParallelEmbedding, nn.Embedding):
    """Look up tokens, whose rows are cut; a subclass of transformers scales or norms them."""

    weight: nn.Parameter  # the bases state a Tensor and a Parameter

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings; that of padding has no gradient, as in ``nn.Embedding``."""
        x = super().forward(tokens)
        if self.padding_idx is None or not torch.is_grad_enabled():
            return x
        return torch.where((tokens == self.padding_idx).unsqueeze(-1), x.detach(), x)


class TiedHead(VocabParallelHead):
    """Compute logits with the embedding's weight, which stays the embedding's; a bias is its own."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # read-only: the embedding's parameter
        return cast(Tensor, self.__dict__["embedding"].weight)


def cut_embedding(module: Any, kind: str, *, ends: bool, state: ParallelState | None) -> None:
    """Cut the rows of an embedding over the tensor axis, in place.

    ``ends``: as in ``VocabParallelEmbedding``. Raises ``BadInput`` for another module, and for options of
    ``nn.Embedding`` that ``Lookup`` has not.
    """
    plain = isinstance(module, nn.Embedding) and module.max_norm is None
    if not plain or module.sparse or module.scale_grad_by_freq:
        expected = "nn.Embedding without max_norm, sparse or scale_grad_by_freq"
        actual = f"{type(module).__name__}({module.extra_repr()})"
        raise BadInput(kind, "embedding", expected=expected, found=actual)
    was, initial = type(module), initial_of(module.weight)
    embedding = VocabParallelEmbedding(*module.weight.shape, ends=ends, initial=initial, state=state)
    module.__class__ = Lookup if was is nn.Embedding else type(was.__name__, (was, Lookup), {})
    module.state, module.rows = embedding.state, embedding.rows
    # Plain, since Gemma 4's code reads a row of it itself.
    declare_parameter(module, "weight", declarations(embedding)["weight"], embedding.state, plain=True)


def head_of(
    module: nn.Module, kind: str, *, tied_to: nn.Module | None, state: ParallelState | None
) -> VocabParallelHead:
    """Return an output layer of our own for transformers'. ``tied_to``: the embedding whose weight it has."""
    if type(module) is not nn.Linear:
        raise BadInput(kind, "output layer", expected="nn.Linear", found=type(module).__name__)
    head = VocabParallelHead(
        module.in_features, module.out_features,
        bias=module.bias is not None, initial=initial_of(module.weight), state=state,
    )  # fmt: skip
    if tied_to is not None:
        del head._parameters["weight"], head.__dict__["declared"]["weight"]
        head.__class__, head.__dict__["embedding"] = TiedHead, tied_to
    return head


def declare_own(
    module: nn.Module, state: ParallelState, cuts: Mapping[str, Cut], partial: Collection[str] = ()
) -> None:
    """Declare a module's own parameters and persistent buffers, whole but for ``cuts``, in place.

    ``partial``: those of which each tensor rank has a part of the gradient.
    """
    transient = module._non_persistent_buffers_set
    stored = {name: x for name, x in module.named_buffers(recurse=False) if name not in transient}
    for name, tensor in (dict(module.named_parameters(recurse=False)) | stored).items():
        del (module._buffers if name in stored else module._parameters)[name]
        cut, still, initial = cuts.get(name), not tensor.requires_grad, initial_of(tensor)
        sums = name in partial and not cut and not still and state.tensor.size > 1
        declaration = Declaration(
            tuple(tensor.shape), cut, partial=("tensor",) * sums, initial=initial,
            buffer=still, integer=not tensor.is_floating_point(),
        )  # fmt: skip
        declare_parameter(module, name, declaration, state, plain=True)


GATE_AND_UP = ("gate_proj", "up_proj")


class GateAndUp(nn.Module):
    """Hold gate and up apart, that transformers' stacks of experts have as one: so each is cut evenly."""

    #: The dim along which one lies after the other.
    features_dim: int

    @property
    def gate_up_proj(self) -> Tensor:
        return torch.cat([getattr(self, name) for name in GATE_AND_UP], dim=self.features_dim)


def part_gate_and_up(module: Any, dim: int) -> None:
    """Hold gate and up of stacks of experts apart, in place."""
    both = module._parameters.pop("gate_up_proj")
    for name, part in zip(GATE_AND_UP, both.chunk(2, dim), strict=True):
        module._parameters[name] = nn.Parameter(part)
        vars(module._parameters[name])["initial"] = initial_of(both)
    module._parameters["down_proj"] = module._parameters.pop("down_proj")  # last, as it was
    module.features_dim = dim
    module.__class__ = type(type(module).__name__, (GateAndUp, type(module)), {})


def without_sequence(state: ParallelState) -> ParallelState:
    """Return the same rank's state in a layout whose activations are whole."""
    if not state.sequence:
        return state
    whole = copy(state)
    whole.layout, whole.around = replace(state.layout, sequence=False), state
    return whole


class OwnDraws:
    """Let each tensor rank draw from a stream of its own between a module's linears that give it a part and
    the one that takes it, or the module's end: what is dropped there is of numbers that no other rank has.
    """

    def __init__(self, owner: nn.Module, state: ParallelState) -> None:
        self.owner, self.state = owner, state
        self.open: AbstractContextManager[None] | None = None

    def of(self, layer: nn.Module) -> None:
        """Begin behind a column-parallel linear of the owner, and end before a row-parallel one."""
        if isinstance(layer, RowParallelLinear):
            layer.register_forward_pre_hook(self._end)
        else:
            layer.register_forward_hook(self._begin)
            self.owner.register_forward_hook(self._end, always_call=True)  # a recomputation may stop between

    def _begin(self, *_: Any) -> None:
        if self.owner.training and self.open is None:
            self.open = own_random(self.state, split=True)
            self.open.__enter__()

    def _end(self, *_: Any) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None
