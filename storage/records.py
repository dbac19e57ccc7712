"""State what strict records in JSON have in common, and what a manifest says about a file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class StrictRecord(BaseModel):
    """Define a record with exact types and no unknown fields, which cannot be changed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StoredFile(StrictRecord):
    """Describe one file of the checkpoint: its size in bytes and their CRC-32."""

    name: str
    size: Count
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]
