"""Write a source as a checkpoint of ``torch.distributed.checkpoint`` (DCP), for other projects to load.

torch's own writer makes the files, a tensor at a time: its planner is given tensors without memory, and reads
each one from the source when its turn comes. So memory grows with the largest tensor, not with the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.crc import Checksum
from ...storage.dtypes import TORCH
from ...storage.output_file import check_place
from ...storage.staging import check_output, staged
from ..foreign.rules import Piece, foreign_shapes, pieces, table_named
from ..optimizer_state import moment_name
from ..source import Source, read_source
from ..verify import checksum_of, verify_rest, verify_sums

#: What some 1.2 kB of an archive and its directory take beside each tensor.
_BESIDE_A_TENSOR = 4096
Fill = Callable[[], Tensor]
Parts = dict[str, list[tuple[str, Piece]]]


def convert_to_dcp(
    src: str | Path,
    dst: str | Path,
    *,
    names: str | None = None,
    config: str | Path | None = None,
) -> Source:
    """Write the weights of ``src``, and its moments if it has some, into a new folder as a DCP checkpoint.

    ``names``: a table (see ``foreign/rules.py``) by which the tensors are named and cut, such as ``titan``;
    without one they are ``model.NAME`` and ``optim.state.NAME.exp_avg`` with Hugging Face's names, as
    ``get_model_state_dict`` and ``get_optimizer_state_dict`` of such a model give them. ``config``: for a
    source of another project. A checkpoint's checksums are compared, of what is read, before the new folder
    has its name; numbers that are not finite are refused. A failure leaves nothing behind; if the process is
    killed, the call begins anew.
    """
    source = read_source(src, config=config)
    check_output(Path(dst), inputs=[source.path])
    check_place(Path(dst), [source.path])
    if source.adapter is not None:
        todo = f"`trilith merge-lora BASE {source.path} OUT` makes a whole model of them and their base"
        raise BadInput(source.path, "--to dcp", expected="a whole model", found="LoRA adapters", todo=todo)
    manifest = source.manifest
    stored = None if manifest is None else manifest.optimizer
    if stored is not None and stored.numbers.keys() - {"step"}:
        todo = "DCP has no place for its other numbers: save the weights without the optimizer"
        raise BadInput(source.path, "--to dcp", expected="moments and steps", found=stored.kind, todo=todo)
    seen = None if manifest is None else [checksum_of(file) for file in source.files]
    nested, made = _planned(source, names, seen)
    need = sum(tensor.nbytes + _BESIDE_A_TENSOR for tensor in _flat(nested))
    for file in source.files if manifest is None else ():
        verify_sums(file, checksum_of(file))
    with staged(Path(dst), inputs=[source.path], need=need) as staging:

        def verify() -> None:
            if manifest is not None and seen is not None:
                verify_rest(source.path, manifest, source.files, seen)

        try:
            _save(nested, made, staging.directory)
        except Exception:  # numbers that are not finite may be what a damaged file looks like
            verify()
            raise
        verify()
        staging.publish()
    return source


def _save(nested: dict[str, Any], made: Mapping[str, Fill], folder: Path) -> None:
    from torch.distributed import checkpoint as dcp  # takes a second to import
    from torch.distributed.checkpoint.api import CheckpointException

    class Planner(dcp.DefaultSavePlanner):
        """Give each tensor when it is written."""

        def lookup_object(self, index: Any) -> Any:
            return made[index.fqn]() if index.fqn in made else super().lookup_object(index)

    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a save by one process, which this is
        try:
            dcp.save(nested, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as error:  # no ``Exception``; it holds that of each rank
            raise error.failures[0][0] from None


def _planned(
    source: Source, names: str | None, seen: Sequence[Checksum] | None
) -> tuple[dict[str, Any], dict[str, Fill]]:
    """Return the state dict, of tensors without memory, and what makes each tensor, by its whole name."""
    parts, shapes = _parts(source, names)
    links = source.links(to_hf=True)
    prefix, optimizer = ("model.", "optim") if names is None else ("", "optimizer")
    weights: dict[str, Any] = {}
    state: dict[str, dict[str, Tensor]] = {}
    made: dict[str, Fill] = {}
    for name, shape in shapes.items():
        for moment in ("", *source.moments):
            stored = [(moment_name(moment, hf) if moment else hf, piece) for hf, piece in parts[name]]
            if not all(links.stored_name(key) in source.catalog for key, _ in stored):
                continue  # the moment of a frozen weight
            dtypes = {source.dtype_of(key, links) for key, _ in stored}
            if len(dtypes) > 1:
                raise BadInput(source.path, name, expected="one dtype", found=", ".join(sorted(dtypes)))
            empty = torch.empty(shape, dtype=TORCH[dtypes.pop()], device="meta")
            if moment:
                state.setdefault(name, {})[moment] = empty
                made[f"{optimizer}.state.{name}.{moment}"] = partial(_read, source, stored, empty, seen)
            else:
                weights[name] = empty
                made[prefix + name] = partial(_read, source, stored, empty, seen)
    updates = torch.tensor(float(source.updates))
    nested: dict[str, Any] = {"model": weights} if prefix else weights
    if state:
        nested[optimizer] = {"state": {name: moments | {"step": updates} for name, moments in state.items()}}
    return nested, made


def _parts(source: Source, names: str | None) -> tuple[Parts, dict[str, tuple[int, ...]]]:
    """Return, for each tensor to write, the tensors of Hugging Face that it is made of, and its shape."""
    _, hf = source.family.links(source.model_config)
    if names is None:
        return {name: [(name, Piece.whole(name, shape))] for name, shape in hf.items()}, hf
    kind, config, table = source.family.model_type, source.model_config, table_named(names)
    shapes = foreign_shapes(table, kind, hf, config)
    pieces_by_name = pieces(table, kind, shapes, hf, config, source.path)
    if missing := [name for name in hf if name not in pieces_by_name]:
        todo = "The table has no rule for it, so the checkpoint would be incomplete"
        raise BadInput(
            "convert", f"--names {names}", expected=f"a name for {missing[0]}", found="none", todo=todo
        )
    parts: Parts = {name: [] for name in shapes}
    for name, tensor_pieces in pieces_by_name.items():
        for piece in tensor_pieces:
            parts[piece.foreign].append((name, piece))
    return parts, shapes


def _read(
    source: Source, stored: Sequence[tuple[str, Piece]], empty: Tensor, seen: Sequence[Checksum] | None
) -> Tensor:
    """Return a tensor, put together from the tensors of Hugging Face that it is made of."""
    links = source.links(to_hf=True)
    whole = Box.whole(tuple(empty.shape))
    if len(stored) == 1 and stored[0][1] == Piece.whole(stored[0][1].foreign, whole.shape):
        return source.read(stored[0][0], whole, links, seen=seen)
    made = torch.empty(empty.shape, dtype=empty.dtype)
    for name, piece in stored:
        along = {dim: at for at, dim in enumerate(piece.dims) if dim is not None}
        region = made[
            tuple(
                slice(
                    begin,
                    begin + piece.steps[along[dim]] * piece.box.shape[along[dim]],
                    piece.steps[along[dim]],
                )
                if dim in along
                else begin
                for dim, begin in enumerate(piece.start)
            )
        ]
        numbers = source.read(name, piece.box, links, seen=seen)
        order = [at for _, at in sorted(along.items())]
        others = [at for at, dim in enumerate(piece.dims) if dim is None]
        region.copy_(numbers.permute(*others, *order).reshape(region.shape))
    return made


def _flat(nested: Mapping[str, Any]) -> Iterator[Tensor]:
    for child in nested.values():
        if isinstance(child, Tensor):
            yield child
        else:
            yield from _flat(child)
