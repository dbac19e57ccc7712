"""Refuse ranks that share out tokens for a user's module whose code does not do its part, by its forward on
shapes alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..layers import find_blocks
from ..parallel_state import Layout, ParallelState, declarations, require
from ..parallel_state.engine import tensors_in
from ..pipeline import Stages
from ..simulation.micro_batch import MicroBatch
from ..simulation.recorder import Recorder
from ..simulation.without_numbers import shapes_only
from ..system.user_errors import asked
from .own.module import OwnConfig, OwnFamily


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
    model: nn.Module = family.stages_on_meta(config, cut)[0]
    blocks = {path: block for path, block in model.named_modules() if block in find_blocks(model)}
    sent, recorder = dict.fromkeys(blocks, 0), Recorder()

    def count(path: str, sign: int, *_: Any) -> None:
        sent[path] += sign * sum(collective.axis == "context" for collective in recorder.collectives)

    hooks = [block.register_forward_pre_hook(partial(count, path, -1)) for path, block in blocks.items()]
    hooks += [block.register_forward_hook(partial(count, path, 1)) for path, block in blocks.items()]
    part = {name: _cut(sample, dims.get(name), layout.context) for name, sample in samples.items()}
    _run(model, cut, part, "context rank's piece of the samples", recorder, hooks)
    apart = next((path for path, exchanges in sent.items() if not exchanges), None)
    require(
        apart is None and sent, "recipe", "layout.context",
        f"1: {apart or 'the model'} sends nothing between context ranks", layout.context,
        "A block's tokens see those of other ranks by trilith's causal_attention",
    )  # fmt: skip


def check_split(family: OwnFamily, config: OwnConfig, layout: Layout, samples: Mapping[str, Tensor]) -> None:
    """Refuse sequence parallelism for a module that gives its layers other tokens than they expect, by what
    they are given without it: their results, or their gradients, would be wrong.
    """
    cuts = [Layout(tensor=layout.tensor, sequence=sequence) for sequence in (False, True)]
    models: list[nn.Module] = [family.stages_on_meta(config, cut)[0] for cut in cuts]
    seen = [_numbers(model, cut, samples) for model, cut in zip(models, cuts, strict=True)]
    ((whole, summed), (here, summed_here)), stated = seen, declarations(models[0])
    problem, todo = "", "Split once what you make whole: split_to_tensor(x, state, dim=1) if state.sequence"
    for name, declaration in declarations(models[1]).items():
        path = name.rpartition(".")[0]
        path = path if (path, 0) in here else path.rpartition(".")[0]  # of one of several products
        if problem or (path, 0) not in here or declaration.cut is not None:
            continue
        own = any(here[path, end] * layout.tensor == whole[path, end] > 0 for end in (0, 1))
        if "tensor" not in declaration.partial:
            if own and models[1].get_parameter(name).requires_grad:
                problem = f"{name} meets a rank's own tokens, and its gradient is not summed"
                todo = "Declare it with partial=('tensor',) if state.sequence, as trilith's norms do"
        elif not own and "tensor" not in stated[name].partial:
            problem = f"{path} is given all tokens, not a rank's own"
    if summed_here > summed:
        problem = problem or "its linears are given all tokens, not a rank's own"
    require(not problem, "recipe", "layout.sequence", f"false: {problem}", "true", todo)


def _numbers(
    model: nn.Module, cut: Layout, samples: Mapping[str, Tensor]
) -> tuple[Counter[tuple[str, int]], int]:
    """Return how many numbers each module is given and gives, by its path and 0 or 1, and how many bytes the
    tensor ranks sum.
    """
    numbers, recorder = Counter[tuple[str, int]](), Recorder()

    def note(path: str, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        for end, nest in enumerate(((args, named), output)):
            numbers[path, end] += sum(x.numel() for x in tensors_in(nest) if x.is_floating_point())

    hooks = [
        module.register_forward_hook(partial(note, path), with_kwargs=True)
        for path, module in model.named_modules()
    ]
    part = {name: _cut(sample, None, 1) for name, sample in samples.items()}
    _run(model, cut, part, "tensor rank's samples", recorder, hooks)
    summed = (sent for sent in recorder.collectives if sent.kind in ("all_reduce", "reduce_scatter"))
    return numbers, sum(sent.bytes for sent in summed if sent.axis == "tensor")


def _run(
    model: nn.Module,
    cut: Layout,
    part: Mapping[str, Tensor],
    what: str,
    recorder: Recorder,
    hooks: Sequence[RemovableHandle],
) -> None:
    """Run the forward of a rank of ``cut`` on shapes alone, and remove the hooks."""
    expected = f"a forward that runs on a {what}"
    with shapes_only([model], MicroBatch(1, 1, gpu=False)), recorder, torch.no_grad():
        part = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in part.items()}
        try:  # whatever a user's code raises where numbers are missing
            asked(lambda: Stages(model, ParallelState.stand_in(cut)).forward(part), "model.module", expected)
        finally:
            for hook in hooks:
                hook.remove()


def _cut(sample: Tensor, dim: int | None, ranks: int) -> Tensor:
    shape = [*sample.shape]
    if dim is not None:
        shape[dim] //= ranks
    return torch.empty(shape, dtype=sample.dtype, device="meta")
