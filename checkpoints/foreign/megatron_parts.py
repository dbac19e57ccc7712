"""Say where a rank's part of a tensor lies in the whole one, for each kind of Megatron's layers.

A column-parallel layer is cut along its rows, a row-parallel one along its columns. A gated fc1 is cut twice:
each rank holds rows of the gate, then the same rows of the values, while the whole tensor has all rows of the
gate first. Experts become one stack. Source: ``megatron/core/tensor_parallel/layers.py``,
``transformer/mlp.py``, ``transformer/moe/experts.py``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ...parallel_state import BadInput, Box
from ...storage.strides import View
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
    ranks = arguments.size("tensor_model_parallel_size")
    if (match := _EXPERT.fullmatch(name)) or (grouped := _GROUPED.fullmatch(name)):
        tensor, ranks = _expert_tensor(tensor, ranks, arguments, where)
        each, rest = divmod(arguments.size("num_experts"), arguments.size("expert_model_parallel_size"))
        if rest:
            raise BadInput(where, "args.num_experts", expected="a multiple of the expert ranks", found=each)
        first = expert * each
        if match:
            layer, number = match[3] or match[4], int(match[2] or match[5])
            stacked = View.strided(view.dtype, (1, *view.shape), view.begin, (1, *view.strides))
            name = f"{match[1]}experts.{layer}.weight"
            for whole, box, part in _cut(name, stacked, 1, tensor, ranks, arguments):
                yield whole, box.shift((first + number, 0, 0)), part
            return
        assert grouped is not None
        name = f"{grouped[1]}experts.linear_fc{grouped[2]}.weight"
        stacked = _ungrouped(view, each, arguments.size("hidden_size"), grouped[2], where)
        for whole, box, part in _cut(name, stacked, 1, tensor, ranks, arguments):
            yield whole, box.shift((first, 0, 0)), part
        return
    yield from _cut(name, view, 0, tensor, ranks, arguments)


def _check_dims(name: str, view: View, where: Path) -> None:
    """Refuse a layer's tensor that has not the dims of its kind."""
    if _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name) or _COLUMNS.fullmatch(name):
        wanted = 2
    elif _ROWS.fullmatch(name):
        wanted = 1 if name.endswith(".bias") else 2
    else:
        return
    if len(view.shape) != wanted:
        raise BadInput(where, name, expected=f"{wanted} dims", found=[*view.shape])


def _cut(name: str, view: View, rows: int, tensor: int, ranks: int, arguments: Arguments) -> Iterator[Part]:
    """Yield the part of a tensor whose rows are its dim ``rows``."""
    if _COLUMNS.fullmatch(name):
        yield name, _shifted(Box.whole(view.shape), rows + 1, tensor * view.shape[rows + 1]), view
    elif not _ROWS.fullmatch(name):
        yield name, Box.whole(view.shape), view
    elif ".linear_fc1." in name and arguments.gated:
        half = view.shape[rows] // 2
        for number in range(2):
            piece = Box.whole(view.shape).narrow(rows, number * half, (number + 1) * half)
            box = _shifted(Box.whole(piece.shape), rows, (number * ranks + tensor) * half)
            yield name, box, view.narrow(piece)
    else:
        yield name, _shifted(Box.whole(view.shape), rows, tensor * view.shape[rows]), view


def _shifted(box: Box, dim: int, by: int) -> Box:
    return box.shift(tuple(by if d == dim else 0 for d in range(len(box.start))))


def _expert_tensor(tensor: int, ranks: int, arguments: Arguments, where: Path) -> tuple[int, int]:
    """Return the rank and the number of ranks that cut one expert."""
    own = arguments.size("expert_tensor_parallel_size", ranks)
    if own not in (1, ranks):
        expected = f"1 or {ranks}, the tensor ranks"
        raise BadInput(where, "args.expert_tensor_parallel_size", expected=expected, found=own)
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
    whole = View.row_major(view.dtype, (experts, *inner), view.begin)
    return View.strided(
        view.dtype,
        (experts, *inner[::-1]),
        view.begin,
        (whole.strides[0], whole.strides[2], whole.strides[1]),
    )
