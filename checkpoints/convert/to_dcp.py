"""Write a source as a checkpoint of ``torch.distributed.checkpoint`` (DCP), for other projects to load.

torch's own writer makes the files, a tensor at a time: its planner is given tensors without memory, and reads
each one from the source when its turn comes. So memory grows with the largest tensor, not with the model.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models import shapes_of
from ...parallel_state import BadInput, Box, Piece, require
from ...storage.catalog import LazyTensor, Seen
from ...storage.disk import writing
from ...storage.dtypes import TORCH
from ...storage.staging import staged
from ..foreign.rules import table_named
from ..optimizer_state import adamw, moment_name
from ..source import Source, read_source
from ..verify import verifying

#: What some 1.2 kB of an archive and its directory take beside each tensor, and beside its numbers.
_BESIDE_A_TENSOR = 4096
Fill = Callable[[Seen], Tensor]
Parts = dict[str, list[tuple[str, Piece[str]]]]


def convert_to_dcp(
    src: str | Path, dst: str | Path, *, names: str | None = None, config: str | Path | None = None
) -> Source:
    """Write the weights of ``src``, and its moments if it has some, into a new folder as a DCP checkpoint.

    ``names``: a table (see ``foreign/rules.py``) by which the tensors are named and cut, such as ``titan``;
    without one they are ``model.NAME`` and ``optim.state.NAME.exp_avg`` with the names of Hugging Face's
    files; ``get_model_state_dict`` of transformers' model gives the same if its modules have no others
    (stacked experts). ``config``: for a source of another project. A checkpoint's checksums are compared, of
    what is read, before the new folder has its name; numbers that are not finite are refused. A failure
    leaves nothing behind; if the process is killed, the call begins anew.
    """
    source = read_source(src, config=config)
    todo = f"`trilith merge-lora BASE {source.path} OUT` makes a whole model of them and their base"
    require(source.adapter is None, source.path, "--to dcp", "a whole model", "LoRA adapters", todo)
    manifest = source.manifest
    if manifest is not None and (stored := manifest.optimizer) is not None:
        for key in (key for key, number in stored.numbers.items() if number.dtype in ("int", "float")):
            expected, actual = "tensors of an optimizer", f"{stored.kind}, whose {key} is no tensor"
            todo = "DCP pickles such a number, which trilith does not: save the weights without the optimizer"
            raise BadInput(source.path, "--to dcp", expected=expected, found=actual, todo=todo)
    nested, fills, need = _planned(source, names)
    with staged(Path(dst), inputs=[source.path], need=need, apart=True) as staging:
        with verifying(source) as checksums:
            _save(nested, fills, checksums, staging.directory)
        staging.publish()
    return source


def _save(nested: dict[str, Any], fills: Mapping[str, Fill], checksums: Seen, folder: Path) -> None:
    from torch.distributed import checkpoint as dcp  # takes a second to import
    from torch.distributed.checkpoint.api import CheckpointException

    class Planner(dcp.DefaultSavePlanner):
        """Give each tensor when it is written."""

        def lookup_object(self, index: Any) -> Any:
            return fills[index.fqn](checksums) if index.fqn in fills else super().lookup_object(index)

    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a save by one process, which this is
        try:
            dcp.save(nested, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as error:  # no ``Exception``; it holds that of each rank
            failure = error.failures[0][0]
            if type(failure) is RuntimeError and isinstance(failure.__context__, OSError):
                failure = failure.__context__  # torch's archive adds that its length is not the expected one
            with writing(folder):
                raise failure from None


def _planned(source: Source, names: str | None) -> tuple[dict[str, Any], dict[str, Fill], int]:
    """Return a state dict of tensors without memory, what makes each tensor by its name, and all bytes."""
    parts, shapes = _parts(source, names)
    prefix, optimizer = ("model.", "optim") if names is None else ("", "optimizer")
    weights: dict[str, Any] = {}
    state: dict[str, dict[str, Tensor]] = {}
    fills: dict[str, Fill] = {}
    nbytes = 0
    for name, shape in shapes.items():
        for moment in ("", *source.moments):
            stored = [(moment_name(moment, hf) if moment else hf, piece) for hf, piece in parts[name]]
            tensors = [(source.hf[key], piece) for key, piece in stored if key in source.hf]
            if len(tensors) < len(stored):
                continue  # the moment of a frozen weight
            dtypes = {tensor.dtype for tensor, _ in tensors}
            require(len(dtypes) <= 1, source.path, name, "one dtype", ", ".join(sorted(dtypes)))
            empty = torch.empty(shape, dtype=TORCH[dtypes.pop()], device="meta")
            nbytes += empty.nbytes + _BESIDE_A_TENSOR
            (state.setdefault(name, {}) if moment else weights)[moment or name] = empty
            key = f"{optimizer}.state.{name}.{moment}" if moment else prefix + name
            fills[key] = partial(_read, tensors, empty)
    nested: dict[str, Any] = {"model": weights} if prefix else weights
    if state:
        ours: dict[str, list[str]] = {}
        for link in source.described.links()[0]:
            ours.setdefault(link.hf, []).append(link.ours)
        for name, moments in state.items():
            moments |= _numbers(source, ours, [hf for hf, _ in parts[name]])
        nested[optimizer] = {"state": state}
    return nested, fills, nbytes


def _numbers(source: Source, ours: Mapping[str, list[str]], parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer's numbers of what is made of these tensors of Hugging Face."""
    of_manifest = None if source.manifest is None else source.manifest.optimizer
    stored, numbers = of_manifest or adamw(source.memory), {}
    for key, number in stored.numbers.items():
        values = {number.of.get(name, number.value) for part in parts for name in ours[part]}
        expected, todo = f"one number for {parts[0]}", "Save the weights without the optimizer"
        actual = ", ".join(map(str, values))
        require(len(values) <= 1, source.path, f"optimizer.{key}", expected, actual, todo)
        if (value := values.pop()) is not None:
            numbers[key] = torch.tensor(value, dtype=getattr(torch, number.dtype))
    return numbers


def _parts(source: Source, names: str | None) -> tuple[Parts, Mapping[str, tuple[int, ...]]]:
    """Return, for each tensor to write, the tensors of Hugging Face that it is made of, and its shape."""
    if names is None:
        _, hf = source.described.links()
        return {name: [(name, Piece.plain(Box.whole(shape), name))] for name, shape in hf.items()}, hf
    _, hf = source.family.links(source.model_config)
    links = table_named(names).links(source.family.model_type, hf, source.model_config)
    if missing := hf.keys() - {link.ours for link in links}:
        first = next(name for name in hf if name in missing)
        todo = "The table has no rule for it, so the checkpoint would be incomplete"
        raise BadInput("convert", f"--names {names}", expected=f"a name for {first}", found="none", todo=todo)
    parts: Parts = {}
    for link in links:
        parts.setdefault(link.hf, []).append((link.ours, link.piece))
    return parts, shapes_of(links)


def _read(stored: Sequence[tuple[LazyTensor, Piece[str]]], empty: Tensor, seen: Seen) -> Tensor:
    """Return a tensor, put together from the tensors of Hugging Face that it is made of."""
    whole = torch.empty(empty.shape, dtype=empty.dtype)
    for tensor, piece in stored:
        piece.of(whole).copy_(tensor.read(piece.box, seen=seen))
    return whole
