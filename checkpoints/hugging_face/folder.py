"""Read a Hugging Face model folder: its config, the file of each tensor, and the files that are copied along.

Safetensors and JSON are opened, and archives of ``torch.save`` (the form before safetensors) by a reader that
runs nothing of them. Whatever makes the folder ambiguous — an index that disagrees with the
files, both an index and a single file, names that lead elsewhere — is refused before any tensor is read.
"""

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...parallel_state import BadInput, require
from ...storage.catalog import Catalog, first_difference, in_one_file
from ...storage.file_names import CONFIG, INDEX, OLD_INDEX, OLD_SINGLE, SINGLE
from ...storage.files_beside_weights import companions_in
from ...storage.safe_open import check_plain_name, contained
from ...storage.safetensors_header import MAX_TENSORS
from ...storage.safetensors_reader import TensorFile
from ...storage.small_files import read_json
from ...storage.strict_json import shown
from ...storage.torch_archive import open_state_dict
from ...system import literal
from .packed import ScaledFile, UnpackedFile, block_size

#: What is taken from the hub: weights as safetensors alone, and small files; never a pickle, never code.
FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_INDEX = 32 << 20
#: What transformers calls the weights, or their index, of a variant such as fp16.
_VARIANT = re.compile(r"model(\.safetensors\.index)?\.\w+\.(safetensors|json)")
#: Why the hub does not give a model, by the name of its error.
_REASONS = {
    "LocalEntryNotFoundError": "the model is not in the cache and the hub is not reachable",
    "OfflineModeIsEnabled": "the model is not in the cache and HF_HUB_OFFLINE is set",
    "RepositoryNotFoundError": "the hub has no such model, or not for you",
    "GatedRepoError": "the hub wants you to accept the model's terms first",
}


class HFFolder:
    """Hold the checked contents of the Hugging Face folder at ``path``; ``BadInput`` names what is at fault.

    ``config``: ``config.json``, unchanged but for packed tensors (MXFP4, FP8), which are given as bf16.
    ``catalog``: its tensors. ``companions``: the paths of the files to copy along. Links may lead only into
    the folder or the Hugging Face cache that it belongs to, unless ``allow_symlinks``.
    """

    def __init__(self, path: Path | str, *, allow_symlinks: bool = False):
        self.path = Path(path)
        self._at = partial(contained, self.path, allow_symlinks=allow_symlinks)
        actual = "a file" if self.path.exists() else "nothing there"
        require(self.path.is_dir(), self.path, None, "the folder of a Hugging Face model", actual)
        names = {entry.name for entry in self.path.iterdir()}
        todo = "Name the folder of a model or a checkpoint, or copy here the config.json of the model"
        require(CONFIG in names, self.path / CONFIG, None, "the model's configuration", "no such file", todo)
        self.config = read_json(self._at(CONFIG))
        tensors = self._weights(names)
        packing = self.config.get("quantization_config")
        if isinstance(packing, dict) and packing:
            tensors = _plain(tensors, self.path, packing)
            self.config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        self.catalog = Catalog({name: in_one_file(file, name) for name, file in tensors.items()})
        self.companions = companions_in(self.path, allow_symlinks=allow_symlinks)

    def _weights(self, names: set[str]) -> dict[str, TensorFile]:
        if SINGLE in names and INDEX in names:
            todo = "Remove the one that is out of date"
            actual = "both, so it is ambiguous which weights are meant"
            raise BadInput(self.path, expected=f"{SINGLE} or {INDEX}", found=actual, todo=todo)
        for index, single, ending, open_file in (
            (INDEX, SINGLE, ".safetensors", TensorFile.open),
            (OLD_INDEX, OLD_SINGLE, ".bin", open_state_dict),
        ):
            if index in names:
                return self._sharded(names, index, ending, open_file)
            if single in names:
                file = open_file(self._at(single))
                return dict.fromkeys(file.tensors, file)
        if pickled := [name for name in sorted(names) if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
            words = ["trilith", "convert", str(self.path / pickled[0]), "OUT", "--config", str(self.path)]
            actual, todo = "only pickled weights", f"`{shlex.join(words)}` reads torch.save's"
            raise BadInput(self.path, expected=f"{SINGLE} or {INDEX}", found=actual, todo=todo)
        others = sorted(name for name in names if name.endswith(".safetensors"))
        present = f"only {', '.join(others[:3])}" if others else "neither"
        todo = "Copy here the file that is missing, or download the model again"
        if variant := next(filter(_VARIANT.fullmatch, sorted(names)), None):
            todo = f"Rename the variant {variant} to {INDEX if variant.endswith('.json') else SINGLE}"
        raise BadInput(self.path, expected=f"{SINGLE} or {INDEX}", found=present, todo=todo)

    def _sharded(
        self, names: set[str], index_name: str, ending: str, open_shard: Callable[..., TensorFile]
    ) -> dict[str, TensorFile]:
        where = self.path / index_name
        index = read_json(self._at(index_name), _MAX_INDEX)
        promised = _weight_map(index.get("weight_map"), where, ending)
        files = {}
        for shard in sorted(set(promised.values())):
            expected = f"the shard that {index_name} names"
            todo = "Copy it here, or download the model again"
            require(shard in names, self.path / shard, None, expected, "no such file", todo)
            files[shard] = open_shard(self._at(shard), expected=promised)
        _check_agreement(promised, files, where)
        return {name: files[shard] for name, shard in promised.items()}


def _plain(tensors: dict[str, TensorFile], path: Path, packing: dict[str, object]) -> dict[str, TensorFile]:
    """Return the tensors as bf16; refuse a packing that is not read."""
    if packing.get("quant_method") == "mxfp4":
        return UnpackedFile(path, tensors).among(tensors)
    if (block := block_size(packing)) is not None:
        return ScaledFile(path, tensors, block).among(tensors)
    key, expected = "quantization_config", "none, mxfp4, or fp8 with weight_block_size"
    todo = "Take the model that it was made of; its rounded numbers cannot be trained or cut"
    raise BadInput(path / CONFIG, key, expected=expected, found=literal(packing), todo=todo)


def _weight_map(value: object, where: Path, ending: str) -> dict[str, str]:
    """Check and return the index's table of tensor -> shard; each shard has a plain name with this ending."""
    if not isinstance(value, dict) or not value:
        raise BadInput(where, "weight_map", expected="an object of tensor -> file", found=shown(value))
    most = f"at most {MAX_TENSORS:,} tensors"
    require(len(value) <= MAX_TENSORS, where, "weight_map", most, f"{len(value):,}")
    shards: dict[str, str] = {}  # lower case -> as written
    for name, shard in value.items():
        if isinstance(shard, str) and shards.get(shard.lower()) == shard:
            continue  # checked for another tensor; an index may have 100,000 of them
        shard = check_plain_name(shard, where, f"weight_map {shown(name)}")
        key = f"weight_map {shown(name)}"
        todo = f"An index of safetensors is called {INDEX}, one of pickled weights {OLD_INDEX}"
        require(shard.endswith(ending), where, key, f"a {ending} file", shown(shard), todo)
        if (other := shards.setdefault(shard.lower(), shard)) != shard:
            clash = f"{shown(other)} and {shown(shard)}, one file on some systems"
            raise BadInput(where, "weight_map", expected="names that differ in more than case", found=clash)
    return value


def _check_agreement(promised: dict[str, str], files: dict[str, TensorFile], where: Path) -> None:
    """Check that every tensor lies in the shard that the index names, and shards hold nothing else."""
    holders: dict[str, str] = {}
    for shard, file in files.items():
        for name in file.tensors:
            holders[name] = f"{holders[name]} and {shard}" if name in holders else shard
    if (difference := first_difference(promised, holders)) is not None:
        name, promise, holder = difference
        expected, actual = f"it in {promise}", f"it in {holder or 'none'}"
        if promise is None:
            expected, actual = f"an entry for the tensor that {holder} holds", "no such entry in weight_map"
        todo = "The index does not belong to these files"
        raise BadInput(where, shown(name), expected=expected, found=actual, todo=todo)


def from_hub(name: str | Path) -> Path | None:
    """Return the cached snapshot of the hub's model with this id (``org/model``); ``None`` if it is no id.

    Where there is a folder ``org``, a path is meant. Files that the cache lacks are fetched, unless
    ``HF_HUB_OFFLINE`` is set. Raises ``BadInput`` if the model is neither here nor there.
    """
    path = Path(name)
    if not _ID.fullmatch(str(name)) or Path(path.parts[0]).exists():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    except (LocalEntryNotFoundError, OSError, HfHubHTTPError, HFValidationError) as error:
        kind = type(error).__name__
        reason = _REASONS.get(kind, f"{kind}: {str(error).splitlines()[0]}")
        expected = "a folder, or a model in the Hugging Face cache or on the hub"
        todo = "Check the name, your access and the network, or download it elsewhere and give its folder"
        raise BadInput(name, expected=expected, found=f"no such folder, and {reason}", todo=todo) from error
