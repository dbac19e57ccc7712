"""Read checkpoints of ``torch.distributed.checkpoint`` (DCP): torchtitan, FSDP2, Accelerate, ``dcp.save``.

A folder holds ``.metadata``, a pickle that lists every tensor with its chunks and where each chunk lies, and
``*.distcp`` files, in which each chunk is an archive of ``torch.save``. Source:
``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput, Box, Piece, require
from ...storage.catalog import Catalog, Key, LazyTensor, listed
from ...storage.dtypes import TORCH
from ...storage.file_names import DCP_METADATA
from ...storage.safe_open import check_plain_name, contained, read_small
from ...storage.strict_json import shown
from ...storage.strides import View, check_coverage
from ...storage.torch_archive import Maker, Name, OrderedDict, Record, ViewFile, read_archive, read_records
from ...storage.torch_archive.archive import DTYPES, size_of
from .checkpoint import ForeignCheckpoint

FORM = "torch.distributed.checkpoint (DCP)"
#: The folders in which Accelerate's ``save_state`` writes model and optimizer.
_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
_MOST_BYTES = 1 << 29
#: Opcodes of ``.metadata``: some 40 for each chunk of a tensor.
_MOST_OPCODES = 50_000_000
_METADATA = "torch.distributed.checkpoint.metadata."
#: The names that DCP writes into ``.metadata``.
NAMES: dict[str, Maker | None] = {
    **dict.fromkeys(
        _METADATA + name
        for name in (
            *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
            *("BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": None,
    "torch.serialization._get_layout": None,
    "pathlib.PosixPath": None,
    "pathlib._local.PosixPath": None,
    "torch.Size": size_of,
    "collections.OrderedDict": OrderedDict.make,
    **dict.fromkeys(DTYPES),
}
#: AdamW's state in an optimizer's flattened state: the weight and the kind of state.
_STATE = re.compile(r"(?:.*\.)?optim(?:izer)?\.state\.(.+)\.(exp_avg|exp_avg_sq|step)")
#: What trainers save beside weights and an optimizer's state; it is left out, and told.
_BESIDE = re.compile(
    r"(?:.*\.)?(?:optim(?:izer)?|train_state|lr_schedulers?|scheduler|dataloader|rng_state)\..*"
)
_STEP = re.compile(r"(?:.*\.)?train_state\.step")


def recognise(path: Path) -> bool:
    """Return whether this is a folder of DCP, or the folder of Accelerate that holds two of them; a copy that
    lacks the hidden ``.metadata`` is one too.
    """
    return path.is_dir() and bool(_folders(path))


def _folders(path: Path) -> list[Path]:
    folders = (path, *(path / name for name in _ACCELERATE))
    return [folder for folder in folders if (folder / DCP_METADATA).is_file() or any(folder.glob("*.distcp"))]


def read(path: Path) -> ForeignCheckpoint:
    """Read the headers of a DCP checkpoint; ``BadInput`` names what is missing or of another kind."""
    tensors, objects = Catalog(), list[str]()
    for folder in _folders(path):
        folder_tensors, others = read_tensors(folder)
        tensors |= folder_tensors
        objects += others
    checkpoint = ForeignCheckpoint(path, FORM, Catalog())
    moments, updates = {"exp_avg": Catalog(), "exp_avg_sq": Catalog()}, Catalog()
    for name, tensor in tensors.items():
        if (match := _STATE.fullmatch(name)) is not None:
            (updates if match[2] == "step" else moments[match[2]])[match[1]] = tensor
        elif _STEP.fullmatch(name):
            checkpoint.step = read_count(tensor, path, name)
        elif _BESIDE.fullmatch(name):
            objects.append(name)
        else:
            checkpoint.tensors[name] = tensor
    checkpoint.skip(objects, "beside the weights")
    if any(moments.values()):
        weights = checkpoint.tensors
        checkpoint.moments = {kind: _by_weight(stored, weights) for kind, stored in moments.items()}
        counts = {name: read_count(step, path, name) for name, step in _by_weight(updates, weights).items()}
        checkpoint.updates = max(counts.values(), default=None)
        checkpoint.updates_of = {name: n for name, n in counts.items() if n != checkpoint.updates}
    return checkpoint


def read_tensors(path: Path, further: Mapping[str, Maker | None] | None = None) -> tuple[Catalog, list[str]]:
    """Return the tensors of a DCP checkpoint by their names there, and the names of other objects.

    ``further``: names that a writer adds to those of DCP in ``.metadata``.
    """
    where = path / DCP_METADATA
    todo = "Copy it too: `cp FOLDER/*` leaves out a name that begins with a dot"
    require(where.exists(), where, None, "the index of the *.distcp beside it", "no such file", todo)
    raw = read_small(contained(path, DCP_METADATA), _MOST_BYTES)
    top = read_records(raw, where, {**NAMES, **(further or {})}, opcodes=_MOST_OPCODES)
    listed, stored = _fields(top, "Metadata", where, "state_dict_metadata", "storage_data")
    if not isinstance(listed, dict) or not isinstance(stored, dict):
        raise BadInput(where, expected="tables of tensors and of places", found="something else")
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in stored.items():
        name, offset = _fields(index, "MetadataIndex", where, "fqn", "offset")
        file, begin, length, packed = _fields(
            info, "_StorageInfo", where, "relative_path", "offset", "length", "transform_descriptors"
        )
        if packed:
            todo = "Save without storage transforms (compression)"
            raise BadInput(where, shown(name), expected="chunks as they are", found="transformed", todo=todo)
        if not isinstance(name, str) or type(begin) is not int or type(length) is not int:
            raise BadInput(where, expected="a name, an offset and a length", found="something else")
        places[name, _sizes(offset, where, name) if offset is not None else ()] = (
            check_plain_name(file, where, shown(name)), begin, length,
        )  # fmt: skip
    tensors, objects, files = Catalog(), list[str](), dict[str, ViewFile]()
    for name, described in listed.items():
        if isinstance(described, Record) and described.name == f"{_METADATA}BytesStorageMetadata":
            objects.append(str(name))
        else:
            tensors[str(name)] = _tensor(str(name), described, places, files, where)
    return tensors, objects


def read_count(tensor: LazyTensor, path: Path, name: str) -> int:
    """Return the value of a tensor of one element that counts something, such as steps."""
    if Box.whole(tensor.shape).size != 1 or tensor.dtype not in TORCH:
        raise BadInput(path, shown(name), expected="one number", found=f"{tensor.dtype} {[*tensor.shape]}")
    number = float(tensor.read(finite=False).item())
    require(number.is_integer(), path, shown(name), "a whole number", number)
    return int(number)


def _view(
    files: dict[str, ViewFile], folder: Path, place: tuple[str, int, int], key: str
) -> tuple[ViewFile, View]:
    """Return the file and the tensor in the archive at a place: a file's name, its first byte and its length.

    No file stays open: there may be thousands.
    """
    name, begin, length = place
    file = files.get(name) or files.setdefault(name, ViewFile(contained(folder, name)))
    if not 0 <= begin <= begin + length <= file.size:
        expected, actual = f"{length:,} bytes from byte {begin:,} on", f"a file of {file.size:,} bytes"
        todo = "Copy it again: it was cut short"
        raise BadInput(file.path, shown(key), expected=expected, found=actual, todo=todo)
    view = read_archive(file, begin, begin + length)
    if not isinstance(view, View):
        raise BadInput(file.path, shown(key), expected="a tensor", found=type(view).__name__)
    return file, view


def _tensor(
    name: str,
    described: object,
    places: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]],
    files: dict[str, ViewFile],
    where: Path,
) -> LazyTensor:
    """Return one tensor; its chunks must cover it once and be what their archives hold."""
    size, chunks, properties = _fields(
        described, "TensorStorageMetadata", where, "size", "chunks", "properties"
    )
    shape = _sizes(size, where, name)
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Name) or dtype.text not in DTYPES or not isinstance(chunks, list):
        raise BadInput(where, shown(name), expected="a dtype and chunks", found="something else")
    stored, pieces = DTYPES[dtype.text], []
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata", where, "offsets", "sizes")
        offsets, sizes = (_sizes(field, where, name) for field in fields)
        if len(offsets) != len(sizes):
            raise BadInput(where, shown(name), expected=f"{len(sizes)} offsets", found=len(offsets))
        box = Box(offsets, tuple(a + n for a, n in zip(offsets, sizes, strict=True)))
        place = places.get((name, offsets))
        if place is None:
            expected = f"a place for the chunk at {[*offsets]}"
            raise BadInput(where, shown(name), expected=expected, found="none")
        if not box.size:
            continue
        file, view = _view(files, where.parent, place, name)
        if (view.dtype, view.shape) != (stored, sizes):
            actual = f"{view.dtype} {[*view.shape]}"
            raise BadInput(file.path, shown(name), expected=f"{stored} {[*sizes]}", found=actual)
        pieces.append(Piece.plain(box, Key(file, file.add(view))))
    check_coverage(where, shown(name), shape, [piece.box for piece in pieces], kind=BadInput)
    return LazyTensor(name, stored, shape, listed(pieces))


def _by_weight(moments: Catalog, weights: Catalog) -> Catalog:
    """Return moments by the full names of their weights, which may have a prefix (``model.``)."""
    first = next(iter(moments), "")
    prefixes = [name.removesuffix(first) for name in weights if name.endswith(first)]
    fitting = [prefix for prefix in prefixes if all(prefix + name in weights for name in moments)]
    prefix = min(fitting, key=len, default="")
    return Catalog({prefix + name: moment for name, moment in moments.items()})


def _fields(record: object, kind: str, where: Path, *names: str) -> list[Any]:
    """Return fields of a record of DCP's class ``kind``."""
    if not isinstance(record, Record) or record.name.rpartition(".")[2] != kind:
        record_kind = record.name if isinstance(record, Record) else type(record).__name__
        raise BadInput(where, expected=kind, found=record_kind, todo="The file is damaged, or not of DCP")
    return [record.field(name) for name in names]


def _sizes(value: object, where: Path, name: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64 or not all(type(number) is int for number in value):
        raise BadInput(where, shown(name), expected="a size", found=type(value).__name__)
    return value
