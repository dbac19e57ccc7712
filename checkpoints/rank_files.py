"""Know the files of a checkpoint: what a rank stores and writes into its own, and where tensors' parts are.

Every reader goes through here, so it does not matter whether a manifest lists its parts or states a grid.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor, nn

from ..parallel_state import (
    BadCheckpoint,
    BadInput,
    Box,
    Declaration,
    Layout,
    ParallelState,
    Piece,
    buffer_names,
    declarations,
    fault,
    stored_box,
)
from ..parallel_state.engine import local_data
from ..storage.catalog import Catalog, Key, LazyTensor, first_difference, listed
from ..storage.dtypes import name_of
from ..storage.file_names import rank_and_world, rank_file_name
from ..storage.safe_open import contained
from ..storage.safetensors_reader import TensorFile
from ..storage.safetensors_writer import TensorWriter
from ..storage.strict_json import StoredFile, shown
from .find import damaged
from .manifest import Manifest
from .optimizer_state import moment_name
from .stored_tensor import Grid, StoredTensor


def stored_tensors(
    stages: Sequence[Mapping[str, Declaration]],
    layout: Layout,
    dtype: str,
    *,
    frozen: frozenset[str],
    moments: Mapping[str, Collection[str]],
) -> dict[str, StoredTensor]:
    """Return the manifest's entry of every tensor, computed from declarations and layout alone.

    All tensors have one ``dtype``, except buffers, which have their own. Moments lie where their parameters
    lie; ``frozen`` parameters and buffers have none, nor has what ``moments`` names beside a moment.
    """
    tensors: dict[str, StoredTensor] = {}
    for pipeline, stage in enumerate(stages):
        for name, declaration in stage.items():
            if not (declaration.ends and pipeline):
                stored = name_of(declaration.dtype) if declaration.dtype else dtype
                grid = Grid.of(declaration, layout, pipeline)
                tensors[name] = StoredTensor(dtype=stored, shape=declaration.shape, grid=grid)
    still = frozen.union(*map(buffer_names, stages))
    trained = [name for name in tensors if name not in still]
    for moment, without in moments.items():
        tensors |= {moment_name(moment, name): tensors[name] for name in trained if name not in without}
    return tensors


def files_to_come(tensors: Mapping[str, StoredTensor], world: int) -> list[StoredFile]:
    """Return the files that the ranks will write; their sizes and checksums are not known yet."""
    kinds = {(tensor.grid, tensor.shape) for tensor in tensors.values()}
    ranks = {rank for grid, shape in kinds if grid is not None for rank, _ in grid.parts(shape)}
    return [StoredFile(name=rank_file_name(rank, world), size=0, crc32=0) for rank in sorted(ranks)]


def write_file(
    directory: Path, rank: int, world: int, step: int, tensors: Mapping[str, Tensor], fixed: frozenset[str]
) -> tuple[StoredFile, str] | None:
    """Write this rank's file; return it and the dtype of its tensors (``fixed`` ones aside), or ``None``.

    A rank that owns nothing writes no file.
    """
    if not tensors:
        return None
    spec = {name: (name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(directory / rank_file_name(rank, world), spec, overlap=True)
    try:
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                fault("checkpoint.amid_data", rank=rank, step=step)
            writer.write(name, Box.whole(tuple(tensor.shape)), tensor.cpu().contiguous())
        stored_file = writer.close()
    finally:
        writer.abandon()
    dtypes = {dtype for name, (dtype, _) in spec.items() if name not in fixed}
    assert len(dtypes) < 2, dtypes
    return stored_file, "".join(dtypes)


@dataclass(frozen=True, slots=True)
class Place:
    """Hold a parameter and the box of the whole tensor that this rank stores, padding left out."""

    name: str
    parameter: nn.Parameter
    box: Box
    padded: bool


def places(model: nn.Module, state: ParallelState) -> list[Place]:
    """List every parameter of the model; the box is empty if this rank stores only padding of it."""
    declared = declarations(model)
    rank_places = []
    for name, parameter in model.named_parameters():
        box = stored_box(parameter, declared[name], state)
        true = declared[name].true_part(box)
        rank_places.append(Place(name, parameter, true, true != box))
    return rank_places


def stored_parts(
    rank_places: Iterable[Place], choose: Callable[[nn.Parameter], Tensor | None] | None = None
) -> Iterator[tuple[str, Tensor, Box]]:
    """Yield, for each of these parameters, its name, this rank's part of the tensor, and this part's box.

    The part has no padding and shares the memory of the parameter. ``choose`` replaces a parameter by another
    tensor of its shape, such as a moment, or leaves it out with ``None``. Empty parts are left out.
    """
    for place in rank_places:
        chosen = place.parameter if choose is None else choose(place.parameter)
        if chosen is None:
            continue
        part = local_data(chosen)
        if place.padded:  # its rows of padding become zero, also if it has no others
            rows = place.box.shape[0]
            part[rows:].zero_()
            part = part[:rows]
        if place.box.size:
            yield place.name, part, place.box


class CheckpointFile(TensorFile):
    """Read a file of a checkpoint, which is opened when somebody asks what is in it.

    Its header is then compared with the manifest, and kept. ``listed``: its parts, of tensors without a grid.
    Safe to use from several threads at once.
    """

    def __init__(self, path: Path, manifest: Manifest, listed: Mapping[str, Box]) -> None:
        self.path, self._tensors, self._listed, self._lock = path, manifest.tensors, listed, Lock()

    def __getattr__(self, name: str) -> Any:
        """Open the file for one of those attributes that opening sets."""
        if name not in ("tensors", "data_begin", "size", "identity"):
            raise AttributeError(name)
        with self._lock:
            if name not in self.__dict__:
                self.__dict__.update(vars(self.open_anew()))
        return self.__dict__[name]

    def open_anew(self) -> TensorFile:
        """Open the file, and keep nothing of it: the headers of thousands are gigabytes."""
        path = contained(self.path.parent, self.path.name, kind=BadCheckpoint)
        try:
            file = TensorFile.open(path, expected=self._tensors)
        except BadInput as bad:  # what is bad input elsewhere is a damaged checkpoint here
            raise damaged(bad.where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
        promised = {name: (self._tensors[name].dtype, box.shape) for name, box in self.boxes.items()}
        present = {name: (entry.dtype, entry.shape) for name, entry in file.tensors.items()}
        if (difference := first_difference(promised, present)) is not None:
            name, *both = difference
            expected, actual = ("no such tensor" if x is None else x for x in both)
            raise damaged(path, shown(name), expected=expected, found=actual)
        return file

    @property
    def boxes(self) -> dict[str, Box]:
        """Return the box of each tensor that has a part, or a replica of one, in this file."""
        boxes = dict(self._listed)
        if (rank_of_world := rank_and_world(self.path.name)) is not None:
            for name, tensor in self._tensors.items():
                grid, shape = tensor.grid, tensor.shape
                if grid is not None and (box := grid.box_of(rank_of_world[0], shape)) is not None:
                    boxes[name] = box
        return boxes


def checkpoint_files(directory: Path, manifest: Manifest) -> list[CheckpointFile]:
    """Return the files of a checkpoint, in the manifest's order; none is opened."""
    listed: list[dict[str, Box]] = [{} for _ in manifest.files]
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            listed[part.file][name] = part.box
    files_and_boxes = zip(manifest.files, listed, strict=True)
    return [CheckpointFile(directory / file.name, manifest, boxes) for file, boxes in files_and_boxes]


def checkpoint_catalog(manifest: Manifest, files: Sequence[TensorFile]) -> Catalog:
    """Return every tensor with its owners' parts in ``files``; a grid's are computed when asked for."""
    catalog, by_rank = Catalog(), {rank: files[number] for rank, number in manifest.numbers.items()}
    for name, tensor in manifest.tensors.items():
        owners = (part for part in tensor.parts if part.role == "owner")
        near = listed(Piece.plain(part.box, Key(files[part.file], name)) for part in owners)
        if tensor.grid is not None:
            near = partial(_in_grid, name, tensor.shape, tensor.grid, by_rank)
        catalog[name] = LazyTensor(name, tensor.dtype, tensor.shape, near)
    return catalog


def _in_grid(
    key: str, shape: tuple[int, ...], grid: Grid, files: Mapping[int, TensorFile], box: Box
) -> Iterator[Piece[Key]]:
    """Yield the parts of tensor ``key`` that hold elements of ``box``; ``files``: the file of each rank."""
    for rank, part in grid.parts(shape, box):
        yield Piece.plain(part, Key(files[rank], key))
