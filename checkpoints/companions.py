"""The small files that travel with the weights unchanged: tokenizer, generation config, chat template."""

from __future__ import annotations

from pathlib import Path

from .crc import Checksum
from .disk import Disk
from .hf_export import copy_file
from .manifest import StoredFile


def store_companion(source: Path, directory: Path, disk: Disk | None = None) -> StoredFile:
    """Copy one into a checkpoint that is being written; what its manifest says of it."""
    target = directory / source.name
    copy_file(source, target, disk or Disk())
    data = target.read_bytes()
    checksum = Checksum()
    checksum.add(0, memoryview(data))
    return StoredFile(name=source.name, size=len(data), crc32=checksum.value(len(data)))
