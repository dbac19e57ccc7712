"""Define ``manifest.json``: what a checkpoint holds, and which box of which tensor lies in which file.

It is written last, so a directory without one is no checkpoint. Everything in it is checked against the
directory before a tensor is read: a checkpoint is whole or it is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, JsonValue, ValidationError

from ..parallel_state import BadCheckpoint, BadInput, Box, Layout, from_validation
from ..storage.coverage import check_coverage
from ..storage.dtypes import BITS
from ..storage.file_names import MANIFEST, STEP_NAME
from ..storage.records import Count, StoredFile, StrictRecord
from ..storage.regular import check_plain_name, contained, open_regular, read_small
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import parse_object, shown
from .seal import open_seal, seal, text_of
from .user_module_family import StoredModule

VERSION: Final = 2
#: The version before, whose manifests have no seal.
_UNSEALED: Final = 1
_MAX_BYTES = 1 << 30
#: More ranks than any machine has: a layout beyond it is damage.
_MOST_RANKS = 1 << 24
_OF_WORLD = re.compile(r"rank-[0-9]{5,}-of-([0-9]{5,})\.safetensors")


class Damaged(BadCheckpoint):
    """Report a checkpoint with a byte that is not the one written; ``where`` is a file in it."""

    @property
    def checkpoint(self) -> Path:
        where = Path(str(self.where))
        return where if where.is_dir() else where.parent


Bounds = tuple[Count, ...]


class Part(StrictRecord):
    """Say that the box ``start`` to ``stop`` of a tensor lies under the tensor's name in ``files[file]``.

    Of several parts that hold the same elements one is the ``owner``; the others are ``replica``s, so that
    each file is complete by itself.
    """

    file: Count
    start: Bounds
    stop: Bounds
    role: Literal["owner", "replica"] = "owner"

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


class StoredTensor(StrictRecord):
    """Describe a whole tensor: its dtype by the format's name, its shape, and its parts."""

    dtype: str
    shape: Bounds
    parts: tuple[Part, ...]


class StoredAdapter(StrictRecord):
    """State that the tensors are LoRA adapters of ``lora`` (see ``models.LoraConfig``) for the weights in
    ``base``.

    ``fingerprint`` tells whether those weights are still the same (see ``fingerprint``); PEFT folders have
    none.
    """

    lora: dict[str, JsonValue]
    base: str | None
    fingerprint: str | None = None


class Manifest(StrictRecord):
    """Hold all of a checkpoint except its numbers. ``kind`` is ``weights`` (converted) or ``training``.

    ``config``: Hugging Face's configuration, unchanged. ``layout``: the layout that wrote the checkpoint; any
    other can read it. ``step``, ``data_position``, ``seeds`` and ``state`` (scheduler and the like) belong to
    a training run. ``module``: for a model that no family describes, how its tensors are cut.
    """

    version: Literal[1, 2] = VERSION
    kind: Literal["weights", "training"]
    model_type: str
    config: dict[str, JsonValue]
    layout: Layout
    step: Count | None = None
    data_position: JsonValue = None
    seeds: dict[str, int] = Field(default_factory=dict)
    state: dict[str, JsonValue] = Field(default_factory=dict)
    adapter: StoredAdapter | None = None
    module: StoredModule | None = None
    companions: tuple[StoredFile, ...] = ()
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]

    @classmethod
    def load(cls, directory: Path | str) -> Manifest:
        """Read the manifest of a complete checkpoint; ``BadCheckpoint`` names what is missing, foreign or
        altered.

        Checks names, sizes and coverage; ``verify`` also reads every byte.
        """
        directory = Path(directory)
        cls.check_there(directory)
        path = contained(directory, MANIFEST, kind=BadCheckpoint)
        if not path.exists():
            raise BadCheckpoint(directory, expected=f"a complete checkpoint with {MANIFEST}", found="none")
        manifest = cls.parse(read_small(path, _MAX_BYTES, kind=BadCheckpoint), path)
        manifest.check(path)
        manifest.check_place(Path(os.path.abspath(directory)))
        manifest._check_files(directory)
        return manifest

    @staticmethod
    def check_there(directory: Path) -> None:
        """Refuse what is no directory."""
        if not directory.is_dir():
            found = "a file" if directory.exists() else "no such directory"
            raise BadCheckpoint(directory, expected="a checkpoint", found=found)

    @classmethod
    def parse(cls, raw: bytes, where: object) -> Manifest:
        """Parse the manifest in these bytes; checks its form and its seal only."""
        version = parse_object(raw, where, kind=BadCheckpoint).get("version")
        if type(version) is not int or version not in (_UNSEALED, VERSION):
            todo = "It was written by another release" if isinstance(version, int) else ""
            raise BadCheckpoint(
                where, "version", expected=f"{_UNSEALED} or {VERSION}", found=shown(version), todo=todo
            )
        try:
            return cls.model_validate_json(raw if version == _UNSEALED else open_seal(raw, where))
        except ValidationError as error:
            raise from_validation(where, error, kind=BadCheckpoint) from None

    def to_bytes(self) -> bytes:
        """Return JSON with a line for each field, file and tensor, so that people and ``diff`` can read
        it.
        """
        fields = self.model_dump(mode="json", exclude_defaults=True) | {"version": VERSION}
        ordered = {"version": VERSION} | {
            name: fields[name] for name in type(self).model_fields if name in fields
        }
        return seal(text_of(ordered))

    def accepted_bytes(self, directory: Path) -> bytes:
        """Write the manifest as text for ``directory``; refuse one that a reader would not accept there."""
        raw = self.to_bytes()
        read = Manifest.parse(raw, directory)
        read.check(directory)
        read.check_place(directory)
        return raw

    @property
    def sealed(self) -> bool:
        """Tell whether damage to the manifest itself is noticed; checkpoints of earlier releases have no
        seal.
        """
        return self.version != _UNSEALED

    def check(self, where: object) -> None:
        """Refuse a manifest that contradicts itself: names, indices, boxes, or elements not owned once."""
        if self.config.get("model_type", self.model_type) != self.model_type:
            found = shown(self.config["model_type"])
            raise BadCheckpoint(where, "config.model_type", expected=self.model_type, found=found)
        for companion in self.companions:
            if companion.name.endswith(".safetensors"):
                raise BadCheckpoint(where, "companions", expected="no weights", found=shown(companion.name))
        names = [file.name for file in (*self.files, *self.companions)]
        for name in names:
            check_plain_name(name, where, "files", kind=BadCheckpoint)
        if len(set(map(str.lower, names))) != len(names) or MANIFEST in map(str.lower, names):
            raise BadCheckpoint(where, "files", expected="each file once", found="a name twice")
        self._check_layout(where)
        for name, tensor in self.tensors.items():
            self._check_tensor(where, name, tensor)

    def check_place(self, directory: Path) -> None:
        """Refuse a checkpoint whose directory is named as one of another step."""
        named = STEP_NAME.fullmatch(directory.name)
        if named is not None and self.step is not None and int(named[1]) != self.step:
            raise BadCheckpoint(
                directory,
                "step",
                expected=f"{int(named[1])}, as the directory is named",
                found=self.step,
                todo="Give the directory back the name that it was written under",
            )

    def _check_layout(self, where: object) -> None:
        """Check that each file has a rank, and that file names give the layout's number of ranks."""
        world = self.layout.world
        if not len(self.files) <= world <= _MOST_RANKS:
            expected = f"from {len(self.files):,} ranks, one a file, up to {_MOST_RANKS:,}"
            raise BadCheckpoint(where, "layout", expected=expected, found=f"{world:,}")
        for file in self.files:
            said = _OF_WORLD.fullmatch(file.name)
            if said is not None and int(said[1]) != world:
                raise BadCheckpoint(
                    where, "layout", expected=f"{int(said[1]):,} ranks, as {file.name} says", found=world
                )

    def _check_tensor(self, where: object, name: str, tensor: StoredTensor) -> None:
        if tensor.dtype not in BITS:
            raise BadCheckpoint(where, shown(name), expected="a dtype", found=shown(tensor.dtype))
        held = set()
        for part in tensor.parts:
            if part.file >= len(self.files) or part.file in held:
                expected = f"one part in each file below {len(self.files)}"
                raise BadCheckpoint(where, shown(name), expected=expected, found=f"file {part.file}")
            held.add(part.file)
            bounds = zip(part.start, part.stop, strict=False)
            if len(part.start) != len(part.stop) or any(a > b for a, b in bounds):
                found = f"start {list(part.start)}, stop {list(part.stop)}"
                raise BadCheckpoint(where, shown(name), expected="start up to stop", found=found)
        replicas = [part.box for part in tensor.parts if part.role == "replica"]
        owners = [part.box for part in tensor.parts if part.role == "owner"]
        check_coverage(where, shown(name), tensor.shape, owners)
        if any(
            len(b.stop) != len(tensor.shape) or any(s > n for s, n in zip(b.stop, tensor.shape, strict=True))
            for b in replicas
        ):
            raise BadCheckpoint(where, shown(name), expected=f"replicas inside {list(tensor.shape)}")

    def _check_files(self, directory: Path) -> None:
        for file in (*self.files, *self.companions):  # each is opened: it might be there and not readable
            path = contained(directory, file.name, kind=BadCheckpoint)
            with open_regular(path, kind=BadCheckpoint) as (_, status):
                size = status.st_size
            if size != file.size:
                raise BadCheckpoint(path, expected=f"{file.size:,} bytes", found=f"{size:,}")
        foreign = {path.name for path in directory.glob("*.safetensors")} - {file.name for file in self.files}
        if foreign:
            found, todo = (
                min(foreign),
                "Files of another checkpoint may be mixed in; move it away if you know it",
            )
            raise BadCheckpoint(
                directory, expected=f"only files that {MANIFEST} names", found=found, todo=todo
            )

    @property
    def frozen(self) -> frozenset[str]:
        """Return the parameters that the run does not train; they have no moments."""
        names = self.state.get("frozen")
        return frozenset(map(str, names)) if isinstance(names, list) else frozenset()

    def _by_file(self) -> list[dict[str, Part]]:
        table: list[dict[str, Part]] = [{} for _ in self.files]
        for name, tensor in self.tensors.items():
            for part in tensor.parts:
                table[part.file][name] = part
        return table

    def open_files(self, directory: Path) -> Iterator[TensorFile]:
        """Yield each file, opened, after comparing its header with the manifest."""
        for stored, parts in zip(self.files, self._by_file(), strict=True):
            path = contained(directory, stored.name, kind=BadCheckpoint)
            try:
                file = TensorFile.open(path, expected=self.tensors)
            except BadInput as bad:  # what is bad input elsewhere is a damaged checkpoint here
                raise Damaged(
                    bad.where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo
                ) from None
            promised = {name: (self.tensors[name].dtype, part.box.shape) for name, part in parts.items()}
            found = {name: (entry.dtype, entry.shape) for name, entry in file.tensors.items()}
            if found != promised:
                name = min(n for n in promised.keys() | found.keys() if promised.get(n) != found.get(n))
                expected = promised.get(name, "no such tensor")
                raise Damaged(path, shown(name), expected=expected, found=found.get(name, "no such tensor"))
            yield file
