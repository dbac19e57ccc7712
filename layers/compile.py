"""A model's blocks through ``torch.compile``, each in one graph, collectives and all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..parallel_state import engine


def compile_blocks(blocks: Iterable[nn.Module], *, backend: str = "inductor") -> None:
    """Compile each block's forward with ``fullgraph=True``, in place; this happens when a block first runs.

    No module is added, so no parameter changes its name. FSDP's hooks and activation checkpointing, which
    must come after this call, stay outside the graph. On a CPU torch's inductor needs a C++ compiler.
    """
    blocks = [*blocks]
    # Blocks of one class share their code, and each may be a graph of its own: LoRA's ranks differ, say; and
    # with gradients, without, in training and in evaluation.
    engine.allow_graphs(4 * len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
