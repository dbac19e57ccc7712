"""List what a rank stores, write its file of a checkpoint, and describe its tensors for the manifest."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..parallel_state import (
    Box,
    Declaration,
    Layout,
    ParallelState,
    buffer_names,
    declarations,
    fault,
    stored_box,
)
from ..parallel_state.engine import local_data
from ..storage.dtypes import BUFFER, name_of
from ..storage.file_names import rank_file_name
from ..storage.safetensors_writer import TensorWriter
from ..storage.strict_json import StoredFile
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
    tensors = {
        name: StoredTensor(
            dtype=BUFFER if stated.buffer else dtype,
            shape=stated.shape,
            grid=Grid.of(stated, layout, pipeline),
        )
        for pipeline, stage in enumerate(stages)
        for name, stated in stage.items()
        if not (stated.ends and pipeline)
    }
    still = frozen.union(*map(buffer_names, stages))
    trained = [name for name in tensors if name not in still]
    return tensors | {
        moment_name(moment, name): tensors[name]
        for moment, without in moments.items()
        for name in trained
        if name not in without
    }


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
    file = rank_file_name(rank, world)
    spec = {name: (name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(directory / file, spec, overlap=True)
    try:
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                fault("checkpoint.amid_data", rank=rank, step=step)
            writer.write(name, Box.whole(tuple(tensor.shape)), tensor.cpu().contiguous())
        written = writer.close()
    finally:
        writer.abandon()
    dtypes = {dtype for name, (dtype, _) in spec.items() if name not in fixed}
    assert len(dtypes) < 2, dtypes
    return StoredFile(name=file, size=written.size, crc32=written.crc), "".join(dtypes)


@dataclass(frozen=True, slots=True)
class Place:
    """Hold a parameter and the box of the whole tensor that this rank stores, padding left out."""

    name: str
    parameter: nn.Parameter
    box: Box
    padded: bool

    def part(self, tensor: Tensor) -> Tensor:
        """Return the local part of the parameter, or of one of its moments. It shares the tensor's memory.

        Rows of padding are set to zero and left out.
        """
        local_part = local_data(tensor)
        if self.padded:
            rows = self.box.shape[0]
            local_part[rows:].zero_()
            local_part = local_part[:rows]
        return local_part


def places(model: nn.Module, state: ParallelState) -> list[Place]:
    """List every parameter of the model; the box is empty if this rank stores only padding of it."""
    stated = declarations(model)
    rank_places = []
    for name, parameter in model.named_parameters():
        box = stored_box(parameter, stated[name], state)
        true = stated[name].true_part(box)
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
        if chosen is not None:
            part = place.part(chosen)
            if place.box.size:
                yield place.name, part, place.box
