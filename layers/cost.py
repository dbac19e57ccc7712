"""Describe the cost of a module: bytes kept for its backward, collectives that it launches, FLOPs.

Each layer has a method ``cost(tokens) -> Cost``. A module counts its inputs, never its outputs: the output of
a product is counted by the module that keeps it. So nothing is counted twice, and a module that holds others
adds their costs (``cost_of``) to its own. Nothing is computed: the model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import nn

from ..parallel_state import BadInput, local
from .tokens import Tokens as Tokens


@dataclass(frozen=True, slots=True)
class Send:
    """Count collectives of one ``kind`` over an ``axis``; ``bytes``: the bytes that a rank gives to all of
    them.

    ``again``: when activation checkpointing repeats the collectives: ``never``; ``full``: only if it is full,
    because selective checkpointing keeps the results of sums; or ``always``. ``what``: what is sent; empty
    for hidden states.
    """

    axis: Literal["tensor", "context"]
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "exchange"]
    bytes: float
    forward: bool = True
    again: Literal["never", "full", "always"] = "never"
    count: int = 1
    what: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the cost of a module for some tokens; costs of several modules are added with ``+``, in the order
    in which the modules run.

    ``kept``: bytes that are kept from the forward until the backward. ``selective``: bytes that selective
    checkpointing keeps instead (products, attention, sums over the ranks). ``working``: the most bytes that
    the backward holds at once beside ``kept``: intermediate results, and the gradients of what the module is
    given and makes. ``with_gradient``: the same when a weight's gradient has been made, with it; it exists
    for a moment if it is added to that of earlier micro-batches. ``with_all_gradients``: the same if the
    gradients of weights stay until the end of the backward. ``gradients``, ``weights``: the bytes of the
    gradients of all trained weights, and of all weights, in the dtype of the products. ``cost_of`` fills in
    both; a module that adds up several products of its own weights states the ``gradients`` of all but the
    first, which ``+`` needs. ``making``: the most bytes that a forward holds at once beside ``kept``, as far
    as a recomputation may need more than the backward after it.
    ``outputs``: bytes of the outputs of norms and products; their gradients are kept for a while if a
    schedule splits the backward in two. ``moved``: bytes that are written and read and not kept; only time
    depends on them. ``sends`` are in the order of the forward. ``repeated``: how many of them come before the
    last tensor that the backward needs, where a recomputation ends; -1: it needs none; ``None``: all of them
    if something is kept.

    Two parts of ``kept`` tell what a block that is computed again does not hold at its worst moment.
    ``kept_input``: the bytes of the module's own input, which the block has kept by itself; 0 if the module
    keeps a copy of it or nothing, ``None`` if it is not stated. ``given_back``: the bytes of what its last
    operators kept, which are given back when ``working`` is needed. Without checkpointing they are not:
    autograd holds them until the gradients are cast.

    The backward of a sum comes to the last module first, and gives back what this one kept before it comes to
    the others.

    FLOPs are counted over all tensor ranks in one forward; a multiplication and an addition are two.
    ``matrices``: products with weights; ``trained``: the part of them whose weights are trained.
    ``attention``: scores, as if each token saw its whole sequence. ``other``: FLOPs that no convention of MFU
    counts.
    """

    kept: float = 0.0
    selective: float = 0.0
    working: float = 0.0
    with_gradient: float = 0.0
    with_all_gradients: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    making: float = 0.0
    kept_input: float | None = None
    given_back: float = 0.0
    outputs: float = 0.0
    moved: float = 0.0
    sends: tuple[Send, ...] = ()
    repeated: int | None = None
    matrices: float = 0.0
    trained: float = 0.0
    attention: float = 0.0
    other: float = 0.0

    def __add__(self, more: Cost) -> Cost:
        later = self.working - more.kept
        # The modules before run beside the gradients of the later ones, if these stay.
        staying = max(self._with_all, self.working) + more.gradients - more.kept if more.gradients else 0.0
        return Cost(
            self.kept + more.kept,
            self.selective + more.selective,
            max(more.working, later),
            max(more.with_gradient, self.with_gradient - more.kept),
            max(more._with_all, self._with_all - more.kept, staying),
            self.gradients + more.gradients,
            self.weights + more.weights,
            max(more.making, self.making - more.kept),
            more.kept_input if self.kept_input is None else self.kept_input,
            more.given_back if more.working >= later else self.given_back,
            self.outputs + more.outputs,
            self.moved + more.moved,
            self.sends + more.sends,
            self._repeated if more._repeated < 0 else len(self.sends) + more._repeated,
            self.matrices + more.matrices,
            self.trained + more.trained,
            self.attention + more.attention,
            self.other + more.other,
        )

    def beside(self, held: float) -> Cost:
        """Return the cost of a module during whose backward ``held`` bytes of other modules' gradients
        wait.
        """
        return replace(
            self,
            working=self.working + held,
            with_gradient=self.with_gradient + held,
            with_all_gradients=self._with_all + held,
        )

    def sent_again(self, mode: str) -> tuple[Send, ...]:
        """Return what is sent again when activation checkpointing of this mode computes the forward again."""
        whens = ("always",) if mode == "selective" else ("always", "full")
        return tuple(one for one in self.sends[: max(self._repeated, 0)] if one.again in whens)

    def under(self, tokens: Tokens) -> Cost:
        """Return the cost without what a backward sends and needs, if none comes to these tokens."""
        forward = tuple(one for one in self.sends if one.forward)
        return self if tokens.reached else replace(self, sends=forward, repeated=-1)

    @property
    def _with_all(self) -> float:
        return max(self.with_all_gradients, self.with_gradient)

    @property
    def _repeated(self) -> int:
        return (len(self.sends) if self.kept > 0 else -1) if self.repeated is None else self.repeated


class UnknownCost(BadInput):
    """Refuse a module that does not say what it costs."""

    def __init__(self, module: nn.Module, name: str = "") -> None:
        kind = type(module).__name__
        super().__init__(
            f"{name} ({kind})" if name else kind,
            "cost",
            expected="a method cost(tokens): what the module keeps for backward, sends and computes",
            found="none",
            todo="Let it return Cost(...) + sum_costs(self.children(), tokens); see docs/your_model.md",
        )
        self.module = module

    def __reduce__(self) -> tuple[object, ...]:
        return (BadInput, (str(self),))


def cost_of(module: nn.Module, tokens: Tokens) -> Cost:
    """Return the cost of a module for these tokens, by its own ``cost`` or by the table of torch's modules;
    raise ``BadInput`` for a module that has neither.
    """
    return with_weights(_cost_of(module, tokens), module, tokens).under(tokens.after(module))


def with_weights(cost: Cost, module: nn.Module, tokens: Tokens) -> Cost:
    """Return the cost with the bytes of the module's weights, and of their gradients."""
    weights, gradients = 0.0, 0.0
    for one in module.parameters():
        size = float(local(one).numel() * tokens.compute)
        weights, gradients = weights + size, gradients + size * one.requires_grad
    return replace(cost, weights=weights, gradients=gradients)


def _cost_of(module: nn.Module, tokens: Tokens) -> Cost:
    own: Callable[[nn.Module, Tokens], Cost] | None = getattr(type(module), "cost", None)
    if own is not None:
        return own(module, tokens)
    for kind, rule in _TORCH.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return rule(module, tokens)
    if isinstance(module, nn.Sequential):
        return _in_sequence(module, tokens)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return sum_costs(module.children(), tokens)
    raise UnknownCost(module)


def sum_costs(modules: Iterable[nn.Module], tokens: Tokens) -> Cost:
    """Return the cost of several modules in the order in which they run; the first is given these tokens."""
    found = Cost()
    for module in modules:
        found += cost_of(module, tokens)
        tokens = tokens.after(module)
    return found


def name_module(error: UnknownCost, model: nn.Module) -> UnknownCost:
    """Return the error with the name that the module has in this model."""
    name = next((name for name, module in model.named_modules() if module is error.module), "")
    return UnknownCost(error.module, name)


def matrix(tokens: Tokens, numbers: float, *, trained: bool) -> Cost:
    """Return the FLOPs of the product of each token with a matrix of this many numbers."""
    flops = 2.0 * tokens.count * numbers
    return Cost(matrices=flops, trained=flops * trained)


def norm_cost(tokens: Tokens, width: float, *, rms: bool, trained: bool, wide: bool = False) -> Cost:
    """Return the cost of a norm. ``wide``: its input is brought to fp32 first, and kept in it."""
    count, inner = tokens.count, tokens.inner
    working = 2 * width * tokens.compute  # the gradients of its output and of its input
    given = width * tokens.compute
    if not rms:
        kept = given + 2 * (inner if tokens.fused else tokens.compute)  # the input; mean and scale
    elif tokens.fused:
        given *= not wide or inner == tokens.compute
        kept = width * (inner if wide else tokens.compute) + inner
        working += 2 * width * inner * wide
    else:
        given *= inner == tokens.compute
        kept = (1 + trained) * width * inner + inner  # both inputs, normalised and not, in its dtype
        # One part of the input's gradient, and four tensors of which the other part is made; by then what the
        # weight multiplied is given back.
        working = (4 if trained else 5) * width * inner
    return Cost(
        kept=kept * count, working=working * count, kept_input=given * count, outputs=tokens.bytes(width)
    )


def dropout_cost(tokens: Tokens, width: float, p: float) -> Cost:
    """Return the cost of dropout: its mask."""
    return Cost(kept=tokens.count * width * tokens.mask, working=2 * tokens.bytes(width)) if p else Cost()


def _in_sequence(modules: nn.Sequential, tokens: Tokens) -> Cost:
    """Add up modules of which each is given what the one before makes."""
    found = Cost()
    for module in modules:
        found, tokens = found + cost_of(module, tokens), tokens.after(module)
        made = module.out_features if isinstance(module, nn.Linear) else 0
        tokens = replace(tokens, width=made) if made else tokens
    return found


def _linear(module: nn.Linear, tokens: Tokens) -> Cost:
    trained = module.weight.requires_grad
    kept = tokens.bytes(module.in_features) if trained else 0.0
    product = matrix(tokens, module.in_features * module.out_features, trained=trained)
    made = tokens.bytes(module.out_features)
    working = made + tokens.bytes(module.in_features)
    gradient = module.weight.numel() * tokens.compute * trained
    return product + Cost(kept=kept, working=working, with_gradient=working + gradient, outputs=made)


def _torch_norm(module: nn.LayerNorm | nn.RMSNorm, tokens: Tokens) -> Cost:
    trained = module.weight is not None and module.weight.requires_grad
    rms = isinstance(module, nn.RMSNorm)
    return norm_cost(tokens, prod(module.normalized_shape), rms=rms, trained=trained)


def _activation(module: nn.Module, tokens: Tokens) -> Cost:
    width = tokens.bytes(tokens.width or tokens.hidden)
    return Cost(kept=width, working=2 * width)


#: Torch's own modules; a subclass with a ``forward`` of its own is none of them.
_TORCH: dict[type[nn.Module], Callable[..., Cost]] = {
    nn.Linear: _linear,
    nn.Embedding: lambda module, tokens: Cost(other=2.0 * tokens.count * module.embedding_dim),
    nn.LayerNorm: _torch_norm,
    nn.RMSNorm: _torch_norm,
    nn.Dropout: lambda module, tokens: dropout_cost(tokens, tokens.width or tokens.hidden, module.p),
    **dict.fromkeys((nn.Identity, nn.Flatten, nn.Unflatten), lambda module, tokens: Cost()),
    **dict.fromkeys(
        (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Softmax),
        _activation,
    ),
}
