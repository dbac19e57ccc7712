"""Read a Hugging Face model folder: its config, the file of each tensor, and the files that are copied along.

Safetensors and JSON are opened, and archives of ``torch.save`` (the form before safetensors) by a reader that
runs nothing of them. Whatever makes the folder ambiguous — an index that disagrees with the
files, both an index and a single file, names that lead elsewhere — is refused before any tensor is read.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from ...parallel_state import BadInput
from ...storage.catalog import Catalog, in_one_file
from ...storage.file_names import CONFIG, INDEX, OLD_INDEX, OLD_SINGLE, SINGLE
from ...storage.files_beside_weights import companions_in
from ...storage.safe_open import check_plain_name, contained
from ...storage.safetensors_header import MAX_TENSORS
from ...storage.safetensors_reader import TensorFile
from ...storage.small_files import read_json
from ...storage.strict_json import shown
from ...storage.torch_archive import open_state_dict
from .fp8 import ScaledFile, block_size
from .mxfp4 import UnpackedFile

_MAX_INDEX = 32 << 20
#: Ways to quantise, by transformers' names, whose files are known and not read.
_QUANTISED = ("awq", "bitsandbytes", "gptq")


class HFFolder:
    """Hold the checked contents of the Hugging Face folder at ``path``; ``BadInput`` names the file and
    tensor at fault.

    ``config``: ``config.json``, unchanged but for packed tensors (MXFP4, FP8), which are given as bf16.
    ``catalog``: its tensors. ``companions``: the paths of the files to copy along. Links may lead only into
    the folder or the Hugging Face cache that it belongs to, unless ``allow_symlinks``.
    """

    def __init__(self, path: Path | str, *, allow_symlinks: bool = False):
        self.path = Path(path)
        self._allow_symlinks = allow_symlinks
        if not self.path.is_dir():
            raise BadInput(
                self.path, expected="the folder of a Hugging Face model", found=_what_is(self.path)
            )
        names = {entry.name for entry in self.path.iterdir()}
        if CONFIG not in names:
            raise BadInput(self.path / CONFIG, expected="the model's configuration", found="no such file")
        self.config = read_json(self._at(CONFIG))
        tensors = self._weights(names)
        packing = self.config.get("quantization_config")
        if isinstance(packing, dict) and (plain := _plain(tensors, self.path, packing)) is not None:
            tensors = plain
            self.config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        self.catalog = Catalog({name: in_one_file(file, name) for name, file in tensors.items()})
        self.companions = companions_in(self.path, allow_symlinks=allow_symlinks)

    def _at(self, name: str) -> Path:
        return contained(self.path, name, allow_symlinks=self._allow_symlinks)

    def _weights(self, names: set[str]) -> dict[str, TensorFile]:
        if SINGLE in names and INDEX in names:
            raise BadInput(
                self.path,
                expected=f"{SINGLE} or {INDEX}",
                found="both, so it is ambiguous which weights are meant",
                todo="Remove the one that is out of date",
            )
        if SINGLE in names:
            file = TensorFile.open(self._at(SINGLE))
            return dict.fromkeys(file.tensors, file)
        if INDEX in names:
            return self._sharded(names, INDEX, ".safetensors", TensorFile.open)
        if OLD_INDEX in names:
            return self._sharded(names, OLD_INDEX, ".bin", lambda path, expected: open_state_dict(path))
        if OLD_SINGLE in names:
            file = open_state_dict(self._at(OLD_SINGLE))
            return dict.fromkeys(file.tensors, file)
        if pickled := [name for name in sorted(names) if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
            words = ["trilith", "convert", str(self.path / pickled[0]), "OUT", "--config", str(self.path)]
            todo = f"`{shlex.join(words)}` reads torch.save's"
            raise BadInput(
                self.path, expected=f"{SINGLE} or {INDEX}", found="only pickled weights", todo=todo
            )
        others = sorted(name for name in names if name.endswith(".safetensors"))
        present = f"only {', '.join(others[:3])}" if others else "neither"
        raise BadInput(self.path, expected=f"{SINGLE} or {INDEX}", found=present)

    def _sharded(
        self, names: set[str], index_name: str, ending: str, open_shard: Callable[..., TensorFile]
    ) -> dict[str, TensorFile]:
        where = self.path / index_name
        index = read_json(self._at(index_name), _MAX_INDEX)
        promised = _weight_map(index.get("weight_map"), where, ending)
        files = {}
        for shard in sorted(set(promised.values())):
            if shard not in names:
                raise BadInput(
                    self.path / shard, expected=f"the shard that {index_name} names", found="no such file"
                )
            files[shard] = open_shard(self._at(shard), expected=promised)
        _check_agreement(promised, files, where)
        return {name: files[shard] for name, shard in promised.items()}


def _plain(
    tensors: dict[str, TensorFile], path: Path, packing: dict[str, object]
) -> dict[str, TensorFile] | None:
    """Return the tensors as bf16, or ``None`` for a packing that is not read; the config then refuses it."""
    if packing.get("quant_method") == "mxfp4":
        return UnpackedFile(path, UnpackedFile.pairs(tensors, path)).among(tensors)
    if (method := packing.get("quant_method")) in _QUANTISED:
        todo = "Take the model that it was made of; its rounded numbers cannot be trained or cut"
        raise BadInput(
            path / CONFIG, "quantization_config", expected="none, mxfp4 or fp8", found=method, todo=todo
        )
    if (block := block_size(packing)) is None:
        return None
    return ScaledFile(path, ScaledFile.pairs(tensors, path), block).among(tensors)


def _weight_map(value: object, where: Path, ending: str) -> dict[str, str]:
    """Check and return the index's table of tensor -> shard; each shard has a plain name with this ending."""
    if not isinstance(value, dict):
        raise BadInput(where, "weight_map", expected="an object of tensor -> file", found=shown(value))
    if len(value) > MAX_TENSORS:
        most = f"at most {MAX_TENSORS:,} tensors"
        raise BadInput(where, "weight_map", expected=most, found=f"{len(value):,}")
    if not value:
        raise BadInput(where, "weight_map", expected="tensors", found="none")
    shards: dict[str, str] = {}  # lower case -> as written
    for name, shard in value.items():
        if isinstance(shard, str) and shards.get(shard.lower()) == shard:
            continue
        shard = check_plain_name(shard, where, f"weight_map {shown(name)}")
        if not shard.endswith(ending):
            key = f"weight_map {shown(name)}"
            todo = f"An index of pickled weights is called {OLD_INDEX}"
            raise BadInput(where, key, expected=f"a {ending} file", found=shown(shard), todo=todo)
        if (other := shards.setdefault(shard.lower(), shard)) != shard:
            clash = f"{shown(other)} and {shown(shard)}, one file on some systems"
            raise BadInput(where, "weight_map", expected="names that differ in more than case", found=clash)
    return value


def _check_agreement(promised: dict[str, str], files: dict[str, TensorFile], where: Path) -> None:
    """Check that every tensor lies in the shard that the index names, and shards hold nothing else."""
    holders = defaultdict(list)
    for shard, file in files.items():
        for name in file.tensors:
            holders[name].append(shard)
    for name, shards in holders.items():
        if len(shards) > 1:
            raise BadInput(where, shown(name), expected="one shard", found=f"it in {' and '.join(shards)}")
    for name, shard in promised.items():
        if holders[name] != [shard]:
            elsewhere = f"it in {holders[name][0]}" if holders[name] else "it in none"
            todo = "The index does not belong to these files"
            raise BadInput(where, shown(name), expected=f"it in {shard}", found=elsewhere, todo=todo)
    for name, shards in holders.items():
        if name not in promised:
            actual = "no such entry in weight_map"
            raise BadInput(where, shown(name), expected=f"the tensor that {shards[0]} holds", found=actual)


def _what_is(path: Path) -> str:
    if path.exists():
        return "a file"
    return "nothing there"
