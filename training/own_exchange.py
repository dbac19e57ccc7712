"""Refuse ranks that share out tokens for a user's module whose code does not do its part, by its forward on
shapes alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers import find_blocks
from ..parallel_state import Layout, ParallelState, declarations, require
from ..parallel_state.engine import tensors_in
from ..pipeline import Stages
from ..simulation.ledger import Collective
from ..simulation.micro_batch import MicroBatch
from ..simulation.recorder import Recorder
from ..simulation.without_numbers import shapes_only
from ..system import literal
from ..system.user_errors import asked

if TYPE_CHECKING:
    from .own_module import OwnConfig, OwnFamily


def check_dims(samples: Mapping[str, Tensor], dims: Mapping[str, int], key: str) -> None:
    """Refuse a dim of the sequence that a sample lacks."""
    for name in dims.keys() & samples.keys():
        dim, count = dims[name], samples[name].ndim
        is_dim = type(dim) is int and -count <= dim < count
        require(is_dim, "recipe", key, f"a dim of {name}, which has {count}", literal(dim))


def check_exchange(
    family: OwnFamily,
    config: OwnConfig,
    layout: Layout,
    samples: Mapping[str, Tensor],
    dims: Mapping[str, int],
) -> None:
    """Refuse context ranks for a module with a block that sends nothing between them: its tokens would see
    only those of their own rank.
    """
    cut = Layout(tensor=layout.tensor, context=layout.context, sequence=layout.sequence, ring=layout.ring)
    forward = _forward(family, config, cut, samples, dims, "context rank's piece of the samples")
    blocks = [path for path, module in forward.model.named_modules() if module in find_blocks(forward.model)]
    calls = ((path, {sent.axis for sent in forward.sent[path]}) for path in blocks)
    apart = next((path for path, axes in calls if "context" not in axes), None)
    require(
        apart is None and blocks, "recipe", "layout.context",
        f"1: {apart or 'the model'} sends nothing between context ranks", layout.context,
        "A block's tokens see those of other ranks by trilith's causal_attention",
    )  # fmt: skip


def check_split(family: OwnFamily, config: OwnConfig, layout: Layout, samples: Mapping[str, Tensor]) -> None:
    """Refuse sequence parallelism for a module that gives its layers other tokens than they expect, by what
    they are given without it: their results, or their gradients, would be wrong.
    """
    cuts = [Layout(tensor=layout.tensor, sequence=sequence) for sequence in (False, True)]
    unsplit, split = (_forward(family, config, cut, samples, {}, "tensor rank's samples") for cut in cuts)
    whole, split_numbers, declared = unsplit.numbers, split.numbers, declarations(unsplit.model)
    problem, todo = "", "Split once what you make whole: split_to_tensor(x, state, dim=1) if state.sequence"
    for name, declaration in declarations(split.model).items():
        path = name.rpartition(".")[0]
        path = path if (path, 0) in split_numbers else path.rpartition(".")[0]  # of one of several products
        if problem or (path, 0) not in split_numbers or declaration.cut is not None:
            continue
        own = any(split_numbers[path, end] * layout.tensor == whole[path, end] > 0 for end in (0, 1))
        if "tensor" not in declaration.partial:
            if own and split.model.get_parameter(name).requires_grad:
                problem = f"{name} meets a rank's own tokens, and its gradient is not summed"
                todo = "Declare it with partial=('tensor',) if state.sequence, as trilith's norms do"
        elif not own and "tensor" not in declared[name].partial:
            problem = f"{path} is given all tokens, not a rank's own"
    if split.summed > unsplit.summed:
        problem = problem or "its linears are given all tokens, not a rank's own"
    require(not problem, "recipe", "layout.sequence", f"false: {problem}", "true", todo)


class _Forward(NamedTuple):
    """Hold what the modules of a rank see in a forward, by their paths."""

    model: nn.Module
    #: How many numbers each is given, and gives, by path and 0 or 1.
    numbers: Counter[tuple[str, int]]
    sent: dict[str, list[Collective]]

    @property
    def summed(self) -> int:
        """Return how many bytes the ranks sum."""
        return sum(sent.bytes for sent in self.sent[""] if sent.kind in ("all_reduce", "reduce_scatter"))


def _forward(
    family: OwnFamily,
    config: OwnConfig,
    cut: Layout,
    samples: Mapping[str, Tensor],
    dims: Mapping[str, int],
    what: str,
) -> _Forward:
    """Run the forward of a rank of ``cut`` on shapes alone; ``dims`` of the samples are cut over context."""
    state = ParallelState.stand_in(cut)
    model: nn.Module = family.build(config, state=state)  # one of its own, for the hooks
    forward, recorder, began = _Forward(model, Counter(), defaultdict(list)), Recorder(), dict[str, int]()

    def begin(path: str, *_: Any) -> None:
        began[path] = len(recorder.collectives)

    def note(path: str, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        forward.sent[path] += recorder.collectives[began[path] :]
        for end, nest in enumerate(((args, named), output)):
            forward.numbers[path, end] += sum(x.numel() for x in tensors_in(nest) if x.is_floating_point())

    for path, module in model.named_modules():
        module.register_forward_pre_hook(partial(begin, path))
        module.register_forward_hook(partial(note, path), with_kwargs=True)
    with shapes_only([model], MicroBatch(1, 1, gpu=False)), recorder, torch.no_grad():
        part = {}
        for name, x in samples.items():
            shape = [*x.shape]
            if name in dims:
                shape[dims[name]] //= cut.context
            part[name] = torch.zeros(shape, dtype=x.dtype)
        expected = f"a forward that runs on a {what}"
        asked(lambda: Stages(model, state).forward(part), "model.module", expected)  # it may raise anything
    return forward
