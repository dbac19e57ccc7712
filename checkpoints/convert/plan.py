"""Plan a conversion: the files to write, the tensors of each file, and the source bytes of each tensor.

A plan is computed from headers and declarations alone. It can be printed, also for a model far larger than
the memory of this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...models import AdaptedFamily
from ...parallel_state import Box, Layout, buffer_names, holdings
from ...storage.file_names import ADAPTER_MODEL
from ..copies import Links, copies
from ..hugging_face.writer import MAX_SHARD_SIZE, plan_shards
from ..moments import MOMENTS, moment_name
from ..source import Source
from ..stored_tensor import Part, StoredTensor
from .merge_lora import Merge
from .transfer import Transfer


@dataclass(frozen=True)
class Plan:
    """Hold all transfers of a conversion, by the file that they write.

    ``layout`` is ``None`` for a Hugging Face folder, and ``tensors`` is then empty; otherwise it has the
    manifest's entry of each tensor. ``merge``: LoRA adapters that are added to the weights.
    """

    source: Source
    files: dict[str, tuple[Transfer, ...]]
    layout: Layout | None
    split: tuple[int, ...] | None
    tensors: dict[str, StoredTensor]
    merge: Merge | None = None

    @property
    def transfers(self) -> Iterator[Transfer]:
        for transfers in self.files.values():
            yield from transfers

    @property
    def nbytes(self) -> int:
        return sum(transfer.nbytes for transfer in self.transfers)

    @property
    def keeps_moments(self) -> bool:
        return any(name.startswith("optimizer.") for name in self.tensors)


def plan_to_hf(source: Source, *, dtype: str | None = None, max_shard_size: int = MAX_SHARD_SIZE) -> Plan:
    """Plan a Hugging Face folder: weights only, under HF's names, sharded as transformers does.

    LoRA adapters become PEFT's folder, one file.
    """
    links, shapes = source.family.links(source.model_config)
    to_hf, fixed = source.links(to_hf=True), _fixed(source)
    fixed |= {link.hf for link in links if link.ours in fixed}
    tensors = {
        name: _transfer(source, name, Box.whole(shape), to_hf, dtype, fixed) for name, shape in shapes.items()
    }
    shards = plan_shards({name: (one.dtype, one.box.shape) for name, one in tensors.items()}, max_shard_size)
    if source.adapter is not None:
        assert isinstance(source.family, AdaptedFamily), source.family
        source.family.check_peft(source.model_config)
        shards = {ADAPTER_MODEL: [*tensors]}
    files = {file: tuple(tensors[name] for name in names) for file, names in shards.items()}
    return Plan(source, files, None, None, {})


def plan_to_sharded(
    source: Source,
    *,
    tensor: int,
    pipeline: int,
    split: Sequence[int] | None = None,
    dtype: str | None = None,
) -> Plan:
    """Plan ``tensor`` x ``pipeline`` files, each complete by itself; moments too if the source has them.

    Raises ``BadInput`` for a layout that the model cannot be cut into.
    """
    layout = Layout(tensor=tensor, pipeline=pipeline)
    stages = source.family.declarations(source.model_config, layout, split=split)
    weights = holdings(stages, layout, sharded=False, replicas=True)
    table = dict(weights)
    if source.trains:
        frozen = frozenset() if source.manifest is None else source.manifest.frozen
        trained = {name: held for name, held in weights.items() if name not in frozen}
        table |= {moment_name(moment, name): held for moment in MOMENTS for name, held in trained.items()}
    links, fixed = source.links(), _fixed(source)
    outputs: list[list[Transfer]] = [[] for _ in range(layout.world)]
    stored = {}
    for name, held in table.items():
        cast = dtype if name in weights else None
        made = {one.box: _transfer(source, name, one.box, links, cast, fixed) for one in held}
        for one in held:
            outputs[one.rank].append(made[one.box])
        stored[name] = StoredTensor(
            dtype=made[held[0].box].dtype,
            shape=tuple(max(stops) for stops in zip(*(one.box.stop for one in held), strict=True)),
            parts=tuple(
                Part(
                    file=one.rank,
                    start=one.box.start,
                    stop=one.box.stop,
                    role="owner" if one.owner else "replica",
                )
                for one in held
            ),
        )
    files = {file_name(rank, layout): tuple(made) for rank, made in enumerate(outputs)}
    return Plan(source, files, layout, None if split is None else tuple(split), stored)


def file_name(rank: int, layout: Layout) -> str:
    """Return a name such as ``pipeline-00-of-02.tensor-00-of-04.safetensors``."""
    at = layout.coordinates(rank)
    return (
        f"pipeline-{at.pipeline:02d}-of-{layout.pipeline:02d}."
        f"tensor-{at.tensor:02d}-of-{layout.tensor:02d}.safetensors"
    )


def _fixed(source: Source) -> frozenset[str]:
    """Return the names of buffers: no gradient moves them; casts leave them in fp32, as transformers does."""
    (stated,) = source.family.declarations(source.model_config)
    return buffer_names(stated)


def _transfer(
    source: Source, name: str, box: Box, links: Links, dtype: str | None, fixed: Collection[str]
) -> Transfer:
    made, stays = copies(name, box, source.catalog, links), name in fixed
    stored = source.dtype_of(name, links)
    return Transfer(name, box, tuple(made), stored if stays or dtype is None else dtype, stays)
