"""Say where a rank's part of a tensor lies in the whole one, for each kind of Megatron's layers.

A column-parallel layer is cut along its rows, a row-parallel one along its columns. A gated fc1 is cut twice:
each rank holds rows of the gate, then the same rows of the values, while the whole tensor has all rows of the
gate first. Experts become one stack. Source: ``megatron/core/tensor_parallel/layers.py``,
``transformer/mlp.py``, ``transformer/moe/experts.py``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ...parallel_state import BadInput, Box, require
from ...storage.strides import View, contiguous
from .megatron_arguments import Arguments

_ROWS = re.compile(r".*(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)")
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")
#: Experts in modules of their own, or numbered weights of one layer (Transformer Engine).
_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.)(?:local_experts\.(\d{1,6})\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d{1,6}))"
)
_GROUPED = re.compile(r"(.+\.mlp\.experts\.)weight([12])")
Part = tuple[str, Box, View]


def whole_parts(
    name: str, view: View, arguments: Arguments, at: tuple[int, int], where: Path
) -> Iterator[Part]:
    """Yield the whole tensors that a rank's tensor is part of, each with its box there and its view.

    ``at``: the tensor rank and the expert rank. Shapes are (out, in), and (expert, out, in) for experts.
    """
    tensor, expert = at
    _check_dims(name, view, where)
    ranks, rows, shift = arguments.size("tensor_model_parallel_size"), 0, (0,) * len(view.shape)
    if (match := _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name)) is not None:
        tensor, ranks = _expert_tensor(tensor, ranks, arguments, where)
        experts = arguments.size("num_experts")
        rank_experts, rest = divmod(experts, arguments.size("expert_model_parallel_size"))
        require(not rest, where, "args.num_experts", "a multiple of the expert ranks", experts)
        if match.re is _EXPERT:
            layer, number = match[3] or match[4], int(match[2] or match[5])
            view = View.strided(view.dtype, (1, *view.shape), view.begin, (1, *view.strides))
        else:
            layer, number = f"linear_fc{match[2]}", 0
            view = _ungrouped(view, rank_experts, arguments.size("hidden_size"), match[2], where)
        name, rows, shift = f"{match[1]}experts.{layer}.weight", 1, (expert * rank_experts + number, 0, 0)
    for box, part in _cut(name, view, rows, tensor, ranks, arguments):
        yield name, box.shift(shift), part


def _check_dims(name: str, view: View, where: Path) -> None:
    """Refuse a layer's tensor that has not the dims of its kind."""
    dims = 1 if name.endswith(".bias") else 2
    is_layer = any(pattern.fullmatch(name) for pattern in (_EXPERT, _GROUPED, _COLUMNS, _ROWS))
    require(not is_layer or len(view.shape) == dims, where, name, f"{dims} dims", [*view.shape])


def _cut(
    name: str, view: View, rows: int, tensor: int, ranks: int, arguments: Arguments
) -> Iterator[tuple[Box, View]]:
    """Yield the part of a tensor whose rows are its dim ``rows``."""
    whole = Box.whole(view.shape)

    def piece(dim: int, size: int, number: int) -> Box:
        return whole.narrow(dim, number * size, (number + 1) * size)

    if _COLUMNS.fullmatch(name):
        yield piece(rows + 1, view.shape[rows + 1], tensor), view
    elif not _ROWS.fullmatch(name):
        yield whole, view
    elif ".linear_fc1." in name and arguments.gated:
        half = view.shape[rows] // 2
        for number in range(2):
            yield piece(rows, half, number * ranks + tensor), view.narrow(piece(rows, half, number))
    else:
        yield piece(rows, view.shape[rows], tensor), view


def _expert_tensor(tensor: int, ranks: int, arguments: Arguments, where: Path) -> tuple[int, int]:
    """Return the rank and the number of ranks that cut one expert."""
    own = arguments.size("expert_tensor_parallel_size", ranks)
    expected = f"1 or {ranks}, the tensor ranks"
    require(own in (1, ranks), where, "args.expert_tensor_parallel_size", expected, own)
    return (0, 1) if own == 1 else (tensor, ranks)


def _ungrouped(view: View, experts: int, hidden: int, number: str, where: Path) -> View:
    """Return the stack in a weight of the grouped form, as (expert, out, in).

    Its elements lie as (expert, hidden, out) for fc1 and (expert, in, hidden) for fc2, whatever its shape is.
    """
    elements = Box.whole(view.shape).size
    if elements % (experts * hidden) or view != View.row_major(view.dtype, view.shape, view.begin):
        expected = f"{experts} experts of hidden size {hidden} in one piece"
        raise BadInput(where, f"weight{number}", expected=expected, found=[*view.shape])
    wide = elements // (experts * hidden)
    inner = (hidden, wide) if number == "1" else (wide, hidden)
    of_expert, *steps = contiguous((experts, *inner))
    return View.strided(view.dtype, (experts, *inner[::-1]), view.begin, (of_expert, *steps[::-1]))
