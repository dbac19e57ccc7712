"""Define ``manifest.json``: what a checkpoint holds, and in which files.

It is written last, so a directory without one is no checkpoint. Everything in it is checked against the
directory before a tensor is read: a checkpoint is whole or it is refused.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError

from ..parallel_state import BadCheckpoint, Layout, from_validation, require
from ..storage.file_names import MANIFEST, STEP_NAME, rank_and_world
from ..storage.safe_open import check_plain_name, contained, open_regular, read_small
from ..storage.strict_json import Count, StoredFile, StrictRecord, parse_object, shown
from ..system import counted
from .optimizer_state import MOMENT_PREFIX, MOMENTS, StoredOptimizer
from .stored_tensor import StoredTensor
from .user_module_family import StoredModule

VERSION: Final = 2
#: What a run writes: the parts of its tensors follow grids.
WITH_GRIDS: Final = 3
MAX_BYTES = 1 << 30
#: More ranks than any machine has: a layout beyond it is damage.
_MOST_RANKS = 1 << 24


class StoredAdapter(StrictRecord):
    """State that the tensors are LoRA adapters of ``lora`` (a ``LoraConfig``) for the weights in ``base``.

    ``fingerprint``, which PEFT folders lack, tells whether those weights are still the same.
    """

    lora: dict[str, JsonValue]
    base: str | None
    fingerprint: str | None = None


class Manifest(StrictRecord):
    """Hold all of a checkpoint except its numbers. ``kind`` is ``weights`` (converted) or ``training``.

    ``config``: Hugging Face's configuration, unchanged. ``layout``: the layout that wrote the checkpoint; any
    other can read it. ``step``, ``data_position``, ``seeds`` and ``state`` (scheduler and the like) belong to
    a training run. ``extra``: the user's own. ``optimizer``: what ``save`` found of it; without, it is AdamW
    with both moments. ``module``: for a model that no family describes, how its tensors are cut.
    """

    version: Literal[2, 3] = VERSION
    kind: Literal["weights", "training"]
    model_type: str
    config: dict[str, JsonValue]
    layout: Layout
    step: Count | None = None
    data_position: JsonValue = None
    extra: JsonValue = None
    seeds: dict[str, int] = Field(default_factory=dict)
    state: dict[str, JsonValue] = Field(default_factory=dict)
    adapter: StoredAdapter | None = None
    module: StoredModule | None = None
    optimizer: StoredOptimizer | None = None
    companions: tuple[StoredFile, ...] = ()
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]

    @classmethod
    def load(cls, directory: Path | str, *, whole: bool = True) -> Self:
        """Read the manifest of a complete checkpoint; ``BadCheckpoint`` names what is wrong.

        Checks names, sizes and coverage; ``verify`` also reads every byte. Without ``whole`` no other file is
        looked at: a checkpoint has one of each rank, and one rank looks at all of them for the others.
        """
        directory = Path(directory)
        actual = "a file" if directory.exists() else "no such directory"
        require(directory.is_dir(), directory, None, "a checkpoint", actual, kind=BadCheckpoint)
        path = contained(directory, MANIFEST, kind=BadCheckpoint)
        if not path.exists():
            raise BadCheckpoint(directory, expected=f"a complete checkpoint with {MANIFEST}", found="none")
        manifest = cls.parse(read_small(path, MAX_BYTES, kind=BadCheckpoint), path)
        manifest.check(path)
        manifest.check_place(Path(os.path.abspath(directory)))
        if whole:
            manifest._check_files(directory)
        return manifest

    @classmethod
    def parse(cls, raw: bytes, where: object) -> Self:
        """Parse the manifest in these bytes; checks its form and its seal only."""
        version = parse_object(raw, where, kind=BadCheckpoint).get("version")
        if type(version) is not int or version not in (VERSION, WITH_GRIDS):
            todo = "It was written by another release" if isinstance(version, int) else ""
            if version == 1:
                todo = "A manifest of version 1 has no seal: with trilith 0.2.0, reshard writes it anew"
            expected = f"{VERSION} or {WITH_GRIDS}"
            raise BadCheckpoint(where, "version", expected=expected, found=shown(version), todo=todo)
        try:
            return cls.model_validate_json(open_seal(raw, where))
        except ValidationError as error:
            raise from_validation(where, error, kind=BadCheckpoint) from None

    def to_bytes(self) -> bytes:
        """Return JSON with a line for each field, file and tensor, which people and ``diff`` can read."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        fields["version"] = self.version
        names = (name for name in type(self).model_fields if name in fields)
        lines = [f"{json.dumps(name)}: {_lines(fields[name])}" for name in names]
        return seal(b"{\n" + ",\n".join(lines).encode() + _END)

    def accepted_bytes(self, directory: Path) -> bytes:
        """Return the text for ``directory``; refuse what a reader would not accept there as the same."""
        raw = self.to_bytes()
        read = Manifest.parse(raw, directory)
        read.check(directory)
        read.check_place(directory)
        for name in Manifest.model_fields:
            if getattr(read, name) != getattr(self, name):
                problem = "something else when it is read back"
                raise BadCheckpoint(directory, name, expected="what was written", found=problem)
        return raw

    def check(self, where: object) -> None:
        """Refuse a manifest that contradicts itself: names, indices, boxes, or elements not owned once."""
        if self.config.get("model_type", self.model_type) != self.model_type:
            model_type = shown(self.config["model_type"])
            raise BadCheckpoint(where, "config.model_type", expected=self.model_type, found=model_type)
        for companion in self.companions:
            if companion.name.endswith(".safetensors"):
                raise BadCheckpoint(where, "companions", expected="no weights", found=shown(companion.name))
        names = [file.name for file in (*self.files, *self.companions)]
        for name in names:
            check_plain_name(name, where, "files", kind=BadCheckpoint)
        if len(set(map(str.lower, names))) != len(names) or MANIFEST in map(str.lower, names):
            raise BadCheckpoint(where, "files", expected="each file once", found="a name twice")
        self._check_layout(where)
        numbers, checked = self.numbers, set[StoredTensor]()
        for name, tensor in self.tensors.items():
            if tensor.grid is not None and self.version < WITH_GRIDS:
                expected = f"parts in version {self.version}"
                raise BadCheckpoint(where, shown(name), expected=expected, found="a grid")
            if tensor not in checked:  # each layer's tensors lie as those of the layer before
                tensor.check(where, name, len(self.files), numbers)
                if tensor.grid is not None:
                    checked.add(tensor)

    def check_place(self, directory: Path) -> None:
        """Refuse a checkpoint whose directory is named as one of another step."""
        named = STEP_NAME.fullmatch(directory.name)
        if named is not None and self.step is not None and int(named[1]) != self.step:
            expected = f"{int(named[1])}, as the directory is named"
            todo = "Give the directory back the name that it was written under"
            raise BadCheckpoint(directory, "step", expected=expected, found=self.step, todo=todo)

    def _check_layout(self, where: object) -> None:
        """Check that each file has a rank, and that file names give the layout's number of ranks."""
        world = self.layout.world
        if not len(self.files) <= world <= _MOST_RANKS:
            expected = f"from {counted(len(self.files), 'rank')}, one a file, up to {_MOST_RANKS:,}"
            raise BadCheckpoint(where, "layout", expected=expected, found=f"{world:,}")
        for file in self.files:
            numbers = rank_and_world(file.name)
            if numbers is not None and numbers[1] != world:
                expected = f"{counted(numbers[1], 'rank')}, as {file.name} says"
                raise BadCheckpoint(where, "layout", expected=expected, found=world)

    def _check_files(self, directory: Path) -> None:
        for file in (*self.files, *self.companions):  # each is opened: it might be there and not readable
            path = contained(directory, file.name, kind=BadCheckpoint)
            todo = "Copy it again from where it is whole, or write the checkpoint again"
            with open_regular(path, kind=BadCheckpoint, todo=todo) as (_, status):
                size = status.st_size
            if size != file.size:
                raise BadCheckpoint(path, expected=f"{file.size:,} bytes", found=f"{size:,}", todo=todo)
        foreign = {path.name for path in directory.glob("*.safetensors")} - {file.name for file in self.files}
        if foreign:
            expected = f"only files that {MANIFEST} names"
            todo = "Files of another checkpoint may be mixed in; move it away if you know it"
            raise BadCheckpoint(directory, expected=expected, found=min(foreign), todo=todo)

    def shapes(self, *, moments: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights, or of the moments, by name."""
        names = (name for name in self.tensors if name.startswith(MOMENT_PREFIX) == moments)
        return {name: self.tensors[name].shape for name in names}

    @property
    def numbers(self) -> dict[int, int]:
        """Return the numbers of the files that ranks of a run wrote, by the rank in the file's name."""
        named = (rank_and_world(file.name) for file in self.files)
        return {pair[0]: number for number, pair in enumerate(named) if pair is not None}

    @property
    def moments(self) -> dict[str, frozenset[str]]:
        """Return the optimizer's moments, each with the parameters that have none."""
        if self.kind != "training":
            return {}
        if self.optimizer is None:
            return dict.fromkeys(MOMENTS, self.frozen)
        return {moment: self.frozen.union(names) for moment, names in self.optimizer.moments.items()}

    @property
    def updates(self) -> int:
        """Return how many updates the optimizer has made."""
        if self.optimizer is not None and "step" in self.optimizer.numbers:
            return int(self.optimizer.numbers["step"].value)
        memory = self.state.get("memory")
        updates = memory.get("updates") if isinstance(memory, dict) else None
        return updates if isinstance(updates, int) else self.step or 0

    @property
    def frozen(self) -> frozenset[str]:
        """Return the parameters that the run does not train; they have no moments."""
        names = self.state.get("frozen")
        return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


_MARK = b',\n"seal": '
_REST = re.compile(rb'"([0-9a-f]{64})"\n}\n')
_END = b"\n}\n"


def seal(text: bytes) -> bytes:
    """Add the seal to a JSON object that ends in a line with its closing brace."""
    assert text.endswith(_END), text[-20:]
    body = text.removesuffix(_END)
    return body + _MARK + f'"{hashlib.sha256(body).hexdigest()}"'.encode() + _END


def open_seal(raw: bytes, where: object) -> bytes:
    """Return the JSON object without its seal; ``BadCheckpoint`` if the seal is missing or wrong."""
    body, mark, rest = raw.rpartition(_MARK)
    match = _REST.fullmatch(rest)
    if not mark or match is None:
        expected, last_field = "a SHA-256 as the last field", "another text there" if mark else "none"
        raise BadCheckpoint(where, "seal", expected=expected, found=last_field, todo=_TODO)
    digest = hashlib.sha256(body).hexdigest()
    require(match[1].decode() == digest, where, "seal", match[1].decode(), digest, _TODO, kind=BadCheckpoint)
    return body + _END


def _lines(value: object) -> str:
    if isinstance(value, dict):
        inner = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(inner) + "\n}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n]"
    return json.dumps(value)


_TODO = "The manifest was altered or damaged since it was written"
