"""State what a manifest says about a file: its name, its size, its checksum."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class StrictRecord(BaseModel):
    """A part of a manifest: exact types, no unknown fields, never changed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StoredFile(StrictRecord):
    """One file of the checkpoint, its bytes and their CRC-32."""

    name: str
    size: Count
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]
