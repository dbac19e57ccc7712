"""Models that the zoo does not know and wraps in nothing of its own, each with a loss and with samples.

Those of ``examples/``: an encoder and a decoder whose blocks share tables of relative distances, and patches
of an image with a class token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from trilith.layers import (
    MLP,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    attach_lora,
    linears,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from trilith.parallel_state import Normal, ParallelState, alone_or
from trilith.testing.layouts import random_rows
from trilith.training import FunctionLoss
from trilith.training.samples import Samples

WORDS, WIDTH, SAMPLES = 31, 8, 16
SMALL = {"dim": WIDTH, "width": 4}


class Stub(nn.Module):
    """Have each name that a step, LoRA or a plan may ask a module for, and nothing else of a model's."""

    first_input, trains_all = "tokens", True

    def __init__(self, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.pieces = alone_or(state).tensor.size if alone_or(state).sequence else 1
        self.stage = Stage.of(4, state=state)
        if self.stage.first:
            self.into = VocabParallelEmbedding(WORDS, WIDTH, initial=Normal(0.5), state=state)
        self.nets = nn.ModuleDict(
            {str(number): MLP(WIDTH, 3 * WIDTH, state=state) for number in self.stage.blocks}
        )
        if self.stage.last:
            self.out_of = VocabParallelHead(WIDTH, WORDS, state=state)

    def hidden_shape(self, tokens: Tensor) -> tuple[int, ...]:
        return len(tokens), tokens.shape[1] // self.pieces, WIDTH

    def uses(self, stage: Stage) -> list[nn.Module]:
        ends = [("into", stage.first), ("out_of", stage.last)]
        here = [getattr(self, name) for name, is_here in ends if is_here]
        return [*here, *(self.nets[str(number)] for number in stage.blocks)]

    def forward(self, tokens: Any, *, stage: Stage | None = None, **others: Tensor) -> Tensor:
        """Take the first input under its own name, or what the stage before gave; the others go unused."""
        stage = stage or self.stage
        x = self.into(tokens) if stage.first else tokens
        for number in stage.blocks:
            x = x + self.nets[str(number)](x)
        return cast(Tensor, self.out_of(x) if stage.last else x)


def adapted_stub(*, state: ParallelState | None = None) -> nn.Module:
    """Return the stub with LoRA on each linear layer."""
    model = Stub(state=state).requires_grad_(False)
    for _, layer in linears(model):
        attach_lora(layer, r=2, alpha=4)
    return model


def next_word(logits: Tensor, samples: Samples, *, state: ParallelState | None = None) -> Tensor:
    return vocab_parallel_cross_entropy(logits, samples["labels"], WORDS, state=state).sum()


def words_that_count(samples: Samples) -> Tensor:
    return valid_tokens(samples["labels"])


def sentences(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens, labels = random_rows(SAMPLES, 6, WORDS, generator)
    source = torch.randint(WORDS, (SAMPLES, 4), generator=generator)
    return {"source": source, "tokens": tokens, "labels": labels}


def images(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    pictures = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    return {"images": pictures, "kind": torch.randint(5, (SAMPLES,), generator=generator)}


def imported(file: Path, name: str) -> ModuleType:
    """Import a file under a name of its own, as other processes find it."""
    if name not in sys.modules:
        spec = util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


EXAMPLES = Path(__file__).parents[2] / "examples"
T5, VIT = (
    imported(EXAMPLES / f"{name}.py", f"{name}_of_strangers") for name in ("t5_parallel", "vit_parallel")
)


@dataclass(frozen=True)
class Stranger:
    """State a model's factory, of ``state=``; its loss; and the whole batch of a number."""

    build: Callable[..., nn.Module]
    loss: Callable[[], Any]
    batch: Callable[[int], dict[str, Tensor]]


def of_words() -> FunctionLoss:
    return FunctionLoss(next_word, count=words_that_count)


STUBS: Mapping[str, Stranger] = {
    "stub": Stranger(Stub, of_words, sentences),
    "stub with LoRA": Stranger(adapted_stub, of_words, sentences),
}
STRANGERS: Mapping[str, Stranger] = {
    "translator": Stranger(partial(T5.T5, **SMALL), lambda: T5.loss, sentences),
    "gallery": Stranger(partial(VIT.ViT, **SMALL), lambda: VIT.loss, images),
}
