"""The small files that travel with the weights unchanged: tokenizer, generation config, chat template."""

from __future__ import annotations

from pathlib import Path

from .crc import Checksum
from .disk import Disk
from .hf_export import copy_file
from .manifest import StoredFile
from .plain_files import open_regular


def store_companion(source: Path, directory: Path, disk: Disk | None = None) -> StoredFile:
    """Copy one into a checkpoint that is being written; what its manifest says of it."""
    target = directory / source.name
    copy_file(source, target, disk or Disk())
    checksum, size = Checksum(), target.stat().st_size
    with open_regular(target) as (fd, _):
        checksum.fill_gaps(fd, [(0, size)])
    return StoredFile(name=source.name, size=size, crc32=checksum.value(size))
