"""Verify a checkpoint on many ranks: each reads some of the files, all learn of a damaged byte."""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from ..parallel_state import BadCheckpoint, ParallelState
from ..parallel_state.collective_errors import together
from .manifest import Manifest
from .source import Source
from .verify import verify_companions, verify_files


def check_bytes(source: Source, state: ParallelState) -> None:
    """Refuse a checkpoint if one of its bytes has changed; a Hugging Face folder has no checksums to compare.

    Collective. The error is the same on every rank and names the newest older checkpoint that is good. It is
    also an error if the ranks opened different checkpoints, because a run saved a new one meanwhile.
    """
    manifest = source.manifest
    if manifest is None:
        return

    def check() -> tuple[str, str]:
        verify_share(source, manifest, state)
        stated = repr((manifest.step, manifest.files))  # grows with the ranks, so not sent as it is
        return source.path.name, hashlib.sha256(stated.encode()).hexdigest()

    _, world, group = _ranks(state)
    opened = together(check, world=world, group=group)
    if len(set(opened)) > 1:
        raise BadCheckpoint(
            source.path.parent,
            expected="the same checkpoint on every rank",
            found=" and ".join(sorted({name for name, _ in opened})),
            todo="A run saved meanwhile: name one of its checkpoints, or try again",
        )


def verify_share(source: Source, manifest: Manifest, state: ParallelState) -> None:
    """Compare this rank's share of the files with their checksums; rank 0 also checks the companions."""
    rank, world, _ = _ranks(state)
    if rank == 0:
        verify_companions(source.path, manifest)
    verify_files(source.path, manifest, range(rank, len(manifest.files), world), source.files)


def _ranks(state: ParallelState) -> tuple[int, int, dist.ProcessGroup | None]:
    """Return this rank, the number of ranks, and their group; a stand-in without groups works by itself."""
    group = state.file_group
    return (0, 1, None) if group is None else (state.rank, state.layout.world, group)
