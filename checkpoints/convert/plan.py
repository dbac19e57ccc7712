"""Plan a conversion: the files to write, the tensors of each file, and the source bytes of each tensor.

A plan is computed from headers and declarations alone. It can be printed, however large the model.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...models import AdaptedFamily, Implementation
from ...parallel_state import BadInput, Box, Layout, Piece, dtype_named, require
from ...storage.catalog import Key, LazyTensor
from ...storage.dtypes import BITS, name_of
from ...storage.file_names import ADAPTER_MODEL
from ...system import no_garbage_search
from ..hugging_face.writer import plan_shards
from ..lora import Merge, base_implementation, read_adapter
from ..optimizer_state import moment_name
from ..source import Source, read_source
from ..stored_tensor import Part, Role, StoredTensor
from ..verify import verify

#: Part of a conversion's identity: another version may number or lay out its work otherwise.
_PLAN = 4

Form = Literal["hf", "peft", "sharded"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Say what one output tensor is made of: the pieces of ``box`` of the whole tensor ``name``.

    It is written as ``dtype``, the format's name. ``fixed``: a cast leaves it as it is.
    """

    name: str
    box: Box
    pieces: tuple[Piece[Key], ...]
    dtype: str
    fixed: bool = False

    @property
    def nbytes(self) -> int:
        return self.box.size * BITS[self.dtype] // 8


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


def plan_to_hf(source: Source, *, dtype: str | None = None) -> Plan:
    """Plan a Hugging Face folder: weights only, under HF's names, sharded as transformers does.

    LoRA adapters become PEFT's folder, one file.
    """
    _, shapes = source.described.links()
    fixed = source.described.buffers(of_hf=True)
    tensors = {name: _transfer(source.hf[name], source.hf[name].box, dtype, fixed) for name in shapes}
    shards = plan_shards({name: (transfer.dtype, transfer.box.shape) for name, transfer in tensors.items()})
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
    stages = source.described.declarations(layout, split=split)
    weights: dict[str, list[Part]] = {name: [] for stage in stages for name in stage}
    for rank, at in enumerate(layout.places()):
        for name, declaration in stages[at.pipeline].items():
            box = declaration.true_part(declaration.box(layout, at))
            role: Role = "owner" if declaration.owner(layout, at, sharded=False) else "replica"
            weights[name].append(Part(file=rank, start=box.start, stop=box.stop, role=role))
    table = dict(weights)
    for moment, without in source.moments.items():
        table |= {moment_name(moment, n): parts for n, parts in weights.items() if n not in without}
    fixed = source.described.buffers()
    outputs: list[list[Transfer]] = [[] for _ in range(layout.world)]
    stored = {}
    for name, parts in table.items():
        cast = dtype if name in weights else None
        whole = source.ours[name]
        transfers = {part.box: _transfer(whole, part.box, cast, fixed) for part in parts}
        for part in parts:
            outputs[part.file].append(transfers[part.box])
        stored_as = transfers[parts[0].box].dtype
        stored[name] = StoredTensor(dtype=stored_as, shape=whole.shape, parts=tuple(parts))
    files = {file_name(rank, layout): tuple(of_rank) for rank, of_rank in enumerate(outputs)}
    return Plan(source, files, layout, None if split is None else tuple(split), stored)


def file_name(rank: int, layout: Layout) -> str:
    """Return a name such as ``pipeline-00-of-02.tensor-00-of-04.safetensors``."""
    at = layout.coordinates(rank)
    stage = f"pipeline-{at.pipeline:02d}-of-{layout.pipeline:02d}"
    return f"{stage}.tensor-{at.tensor:02d}-of-{layout.tensor:02d}.safetensors"


def _transfer(tensor: LazyTensor, box: Box, dtype: str | None, fixed: Collection[str]) -> Transfer:
    stays = tensor.name in fixed
    stored = tensor.dtype if stays or dtype is None else dtype
    return Transfer(tensor.name, box, tuple(tensor.pieces(box)), stored, stays)


@no_garbage_search()
def plan_conversion(
    src: str | Path,
    *,
    to: Form | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    split: Sequence[int] | None = None,
    dtype: str | None = None,
    allow_symlinks: bool = False,
    config: str | Path | None = None,
    names: str | None = None,
    implementation: Implementation = "auto",
) -> Plan:
    """Return the plan of ``convert``, made from headers only; raises what ``convert`` would raise."""
    source = read_source(
        src, allow_symlinks=allow_symlinks, config=config, names=names, implementation=implementation
    )
    name = None if dtype is None else name_of(dtype_named(dtype, "convert", "--dtype"))
    whole: Form = "hf" if source.adapter is None else "peft"
    form = to or ("sharded" if source.manifest is None or tensor * pipeline > 1 else whole)
    if form == "sharded":
        return plan_to_sharded(source, tensor=tensor, pipeline=pipeline, split=split, dtype=name)
    if form != whole:
        actual = "the weights of a whole model" if whole == "hf" else "LoRA adapters"
        expected, todo = "a checkpoint of LoRA adapters", ""
        if whole == "peft":
            expected = "a whole model"
            todo = f"--to peft writes the adapters; `trilith merge-lora BASE {src} OUT` a whole model"
        raise BadInput(source.path, f"--to {form}", expected=expected, found=actual, todo=todo)
    actual = f"tensor {tensor}, pipeline {pipeline}" + ("" if split is None else f", split {[*split]}")
    todo = "A Hugging Face folder is whole: leave out --tensor, --pipeline and --split"
    require(tensor * pipeline <= 1 and split is None, "convert", f"--to {form}", "no layout", actual, todo)
    return plan_to_hf(source, dtype=name)


def plan_merge(base: str | Path, adapter: str | Path) -> Plan:
    """Return the plan of adding LoRA adapters to their base, as a Hugging Face folder, for ``carry_out``.

    ``base``: a Hugging Face folder or a checkpoint. ``adapter``: a PEFT folder, a LoRA run or a checkpoint of
    one. Dtypes stay, and tensors without adapters stay byte for byte. Raises ``BadInput`` or
    ``BadCheckpoint`` if they do not fit together (see ``read_adapter``).
    """
    source = read_source(base, implementation=base_implementation(adapter) or "auto")
    added = read_adapter(adapter, source)
    if added.manifest is not None:
        verify(added.path, added.manifest, files=added.files)
    return replace(plan_to_hf(source), merge=Merge(source, added))


def identify(plan: Plan, *, allow_nonfinite: bool) -> str:
    """Return 16 hexadecimal digits that differ if other bytes would be written, by plan or source files.

    The content of the source's files counts, not only names and times: they may have changed since a kill.
    """
    source, merged = plan.source, None if plan.merge is None else plan.merge.identity
    settings = (_PLAN, plan.layout, plan.split, allow_nonfinite, source.config, source.adapter, merged)
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(repr([file.state() for file in source.files]).encode())
    if source.manifest is not None:
        digest.update(source.manifest.to_bytes())
    for output in plan.files.items():
        digest.update(repr(output).encode())
    return digest.hexdigest()[:16]
