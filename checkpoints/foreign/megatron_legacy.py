"""Read Megatron-LM's first format: ``iter_0001000/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.

Each file holds one rank's part of the model. Here the parts become chunks of whole tensors, under the names
and in the shapes of the distributed format, so that one table serves both. Source:
``megatron/training/checkpointing.py`` (folders), ``megatron/core/transformer`` (how layers are cut),
``megatron/legacy/model/language_model.py`` (older names).
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from ...parallel_state import BadInput, Box, Piece, require
from ...storage.catalog import Catalog, Key, LazyTensor, listed
from ...storage.safe_open import contained
from ...storage.strict_json import shown
from ...storage.strides import View
from ...storage.torch_archive import ViewFile, nested, read_archive
from ...system import counted
from .checkpoint import ForeignCheckpoint, refuse_copies
from .megatron_arguments import NAMES, Arguments, step_folder
from .megatron_dist import READABLE
from .megatron_parts import whole_parts

FORM = "Megatron legacy (mp_rank_XX)"
#: The second name is that of releases that wrote the optimizer beside it.
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d{0,6})")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
#: Names of the models before megatron-core, as patterns and what stands for them; each is applied once.
_OLDER = {
    r"^language_model\.": "",
    r"^word_embeddings_for_head\.": "output_layer.",
    r"^(encoder|transformer)\.final_(layer)?norm\.": "decoder.final_layernorm.",
    r"^(encoder|transformer)\.": "decoder.",
    r"\.(self_)?attention\.query_key_value\.": ".self_attention.linear_qkv.",
    r"\.(self_)?attention\.dense\.": ".self_attention.linear_proj.",
    r"\.input_norm\.": ".input_layernorm.",
    r"\.post_attention_(layer)?norm\.": ".pre_mlp_layernorm.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.linear_fc1.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.linear_fc2.",
}


@dataclass(frozen=True, slots=True)
class _Rank:
    """Say which part of the model a file holds: its tensor, pipeline and expert rank."""

    file: ViewFile
    tensor: int
    pipeline: int
    expert: int
    #: Its number among all ranks, as its file states it.
    number: int | None
    #: Tensors by their names in the file, for each virtual stage.
    models: list[dict[str, View]] = field(default_factory=list)

    @property
    def part(self) -> tuple[int, ...]:
        """Return what its part of the model depends on: without experts, on no expert rank."""
        has_experts = any(".experts." in name for model in self.models for name in model)
        return (self.tensor, self.pipeline, *([self.expert] if has_experts else []))


def recognise(path: Path) -> bool:
    """Return whether this is a folder of ranks, or of steps whose newest one is."""
    folder = step_folder(path) if path.is_dir() else path
    return folder.is_dir() and any(_rank_folders(folder))


def read(path: Path) -> ForeignCheckpoint:
    """Read the headers of all ranks; ``BadInput`` names a rank that is missing or of another model."""
    folder = step_folder(path)
    ranks: list[_Rank] = []
    checkpoint = ForeignCheckpoint(folder, FORM, Catalog(), names="megatron")
    extra, optimizer, first = list[str](), False, Arguments(None, folder)
    for rank_folder, matched in _rank_folders(folder):
        name = next(name for name in _FILES if (rank_folder / name).is_file())
        file = contained(folder, f"{rank_folder.name}/{name}")
        views = ViewFile(file)
        value = read_archive(views, allowed=NAMES)
        if not isinstance(value, dict):
            raise BadInput(file, expected="a dict", found=type(value).__name__)
        arguments = Arguments(value.get("args"), file)
        todo = "How the ranks cut the model cannot be known without them"
        require(arguments.known, file, "args", "Megatron's arguments", "none", todo)
        version = value.get("checkpoint_version", 0)  # as Megatron reads it: its first files state none
        if not isinstance(version, int | float) or version < 2:
            todo = "Older versions order queries, keys and values otherwise: save it again with a later one"
            raise BadInput(
                file, "checkpoint_version", expected="2.0 or later", found=shown(version), todo=todo
            )
        arguments.check()
        step = value["iteration"] if type(value.get("iteration")) is int else None
        if not ranks:
            first, checkpoint.stated, checkpoint.step = arguments, arguments.stated(), step
        todo = "The ranks' files are not of one checkpoint: copy all of them again"
        require(step == checkpoint.step, file, "iteration", checkpoint.step, step, todo)
        number = arguments.rank if type(arguments.rank) is int else None
        rank = _Rank(views, *_coordinates(matched, arguments, file), number)
        models = [match for key in value if isinstance(key, str) and (match := _MODEL.fullmatch(key))]
        for match in sorted(models, key=lambda match: int(match[1] or 0)):  # model10 comes behind model9
            tensors, unread = _flat(value[match[0]], file)
            rank.models.append(tensors)
            extra += unread
        optimizer = optimizer or "optimizer" in value
        ranks.append(rank)
    _check_ranks(ranks, first, folder)
    checkpoint.tensors, differing = _whole_tensors(ranks, first, folder)
    refuse_copies((rank.file, rank.part) for rank in ranks)
    if differing:
        checkpoint.skipped.append(
            f"the first rank's copy is taken of {counted(len(differing), 'tensor')} which the "
            f"ranks do not hold alike, such as {differing[0]}"
        )
    if first.untie_embeddings_and_output_weights is not True:
        checkpoint.tensors.pop("output_layer.weight", None)  # the last stage's copy of the embedding
    checkpoint.skip(extra, "_extra_state, without weights")
    if optimizer or any(folder.glob("mp_rank_*/*optim.pt")):
        checkpoint.skipped.append(
            "no moments: in this format they depend on the ranks that wrote them. Megatron writes readable "
            f"ones with --ckpt-format torch_dist {READABLE}"
        )
    return checkpoint


def _rank_folders(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.iterdir()):
        if (match := _RANK.fullmatch(path.name)) and any((path / name).is_file() for name in _FILES):
            yield path, match


def _coordinates(match: re.Match[str], arguments: Arguments, file: Path) -> tuple[int, int, int]:
    """Return the tensor, pipeline and expert rank; one number may be missing where its axis has size 1."""
    tensor, *others = (int(digits) for digits in match.groups() if digits is not None)
    is_cut = [arguments.size(f"{axis}_model_parallel_size") > 1 for axis in ("pipeline", "expert")]
    expected = f"a folder's name with {sum(is_cut)} numbers after the first"
    require(len(others) == sum(is_cut), file, "args", expected, match[0])
    pipeline, expert = (others.pop(0) if axis_is_cut else 0 for axis_is_cut in is_cut)
    return tensor, pipeline, expert


def _check_ranks(ranks: list[_Rank], arguments: Arguments, folder: Path) -> None:
    """Refuse a folder in which a rank is missing or in another's place, or ranks hold different numbers of
    virtual stages.
    """
    tensor = arguments.size("tensor_model_parallel_size")
    pipeline = arguments.size("pipeline_model_parallel_size")
    present = {(rank.tensor, rank.pipeline) for rank in ranks}
    for t, p in product(range(tensor), range(pipeline)):
        if (t, p) not in present:
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "")
            expected = f"{tensor} tensor ranks of {pipeline} pipeline ranks"
            actual = f"one without {_FILES[0]}" if (folder / name).is_dir() else "no such folder"
            raise BadInput(folder, name, expected=expected, found=actual, todo="Copy the ranks of all hosts")
    numbers = {rank.number: rank for rank in ranks if rank.number is not None}
    stages = [numbers[number].pipeline for number in sorted(numbers)]
    for number, rank in numbers.items() if len(numbers) == len(ranks) else ():  # converters write 0 into each
        right = number % tensor == rank.tensor and stages == sorted(stages)
        expected, todo = f"a rank at {rank.file.path.parent.name}", "Ranks are exchanged: copy them again"
        require(right, rank.file.path, "args.rank", expected, number, todo)
    if len({len(rank.models) for rank in ranks}) > 1 or not ranks[0].models:
        counts = ", ".join(str(len(rank.models)) for rank in ranks)
        raise BadInput(folder, expected="as many models in every rank's file", found=counts)


def _flat(stored: object, file: Path) -> tuple[dict[str, View], list[str]]:
    """Return a model's tensors by megatron-core's names, and the names of extra states."""
    tensors, extra = dict[str, View](), list[str]()
    for name, child in nested(stored, file):
        if "_extra_state" in name:
            extra.append(name)
        elif isinstance(child, View):
            name = name.removeprefix("module.")
            for pattern, new in _OLDER.items():
                name = re.sub(pattern, new, name, count=1)
            tensors[name] = child
    require(tensors, file, "model", "tensors", "none")
    return tensors, extra


def _whole_tensors(ranks: list[_Rank], arguments: Arguments, folder: Path) -> tuple[Catalog, list[str]]:
    """Return the whole tensors; a part that several ranks hold is taken from the first.

    The names of such tensors whose stated CRC-32 differ between ranks come with them.
    """
    before = _layers_before(ranks, arguments, folder)
    keys: dict[str, dict[Box, Key]] = defaultdict(dict)
    sums: dict[Key, int | None] = {}
    differing: dict[str, None] = {}
    for rank in ranks:
        for stage, model in enumerate(rank.models):
            first = before[stage, rank.pipeline]
            for local, view in model.items():
                match = _LAYER.fullmatch(local)
                name = local if match is None else f"decoder.layers.{int(match[1]) + first}.{match[2]}"
                at = rank.tensor, rank.expert
                for whole, box, part in whole_parts(name, view, arguments, at, rank.file.path):
                    key = Key(rank.file, rank.file.add(part))
                    sums[key] = rank.file.sum_of(key.key)
                    if sums[keys[whole].setdefault(box, key)] != sums[key]:
                        differing[whole] = None
    whole_tensors = Catalog()
    for name, parts in keys.items():
        kinds = {(file.tensors[key].dtype, len(box.stop)) for box, (file, key) in parts.items()}
        if len(kinds) > 1:
            seen_kinds = " and ".join(f"{dtype} of {dims} dims" for dtype, dims in sorted(kinds))
            raise BadInput(folder, name, expected="tensors of one kind on all ranks", found=seen_kinds)
        shape = tuple(max(stops) for stops in zip(*(box.stop for box in parts), strict=True))
        dtypes = {dtype for dtype, _ in kinds}
        pieces = listed(Piece.plain(box, key) for box, key in parts.items())
        whole_tensors[name] = LazyTensor(name, dtypes.pop(), shape, pieces)
    return whole_tensors, [*differing]


def _layers_before(ranks: list[_Rank], arguments: Arguments, folder: Path) -> dict[tuple[int, int], int]:
    """Return how many layers lie before each (virtual stage, pipeline rank), counted in the files.

    The model's layers run through all pipeline ranks with the first virtual stage, then with the second.
    """
    counted: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for stage, model in enumerate(rank.models):
            numbers = {int(match[1]) for name in model if (match := _LAYER.fullmatch(name))}
            count = counted.setdefault((stage, rank.pipeline), len(numbers))
            if count != len(numbers) or numbers != set(range(len(numbers))):
                expected = f"0 to {count - 1}"
                raise BadInput(rank.file.path, "layers", expected=expected, found=shown(sorted(numbers)))
    before, total = {}, 0
    for place in sorted(counted):
        before[place] = total
        total += counted[place]
    expected = f"{arguments.num_layers}, as args.num_layers says"
    require(total == arguments.num_layers, folder, "layers", expected, total)
    return before
