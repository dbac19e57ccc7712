"""Models that the zoo does not know and wraps in nothing of its own, each with a loss and with samples.

``translator``: an encoder and a decoder whose blocks share tables of relative distances, as T5's do.
``gallery``: patches of an image and a class token, as ViT's. ``transcriber``: ``examples/``' recurrence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trilith.layers import (
    MLP,
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    attach_lora,
    gather_from_tensor,
    linears,
    merge_heads,
    split_heads,
    split_to_tensor,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from trilith.parallel_state import Cut, Declaration, Normal, ParallelState, alone_or, declare_parameter, local
from trilith.testing.layouts import random_rows
from trilith.training import FunctionLoss
from trilith.training.samples import Samples

WORDS, WIDTH, HEADS, HEAD_DIM, SAMPLES = 29, 8, 2, 3, 16
FARTHEST = 3
PATCH, IMAGE, CLASSES = 2, (3, 6, 10), 5
PATCHES = IMAGE[1] * IMAGE[2] // PATCH**2


class Gaze(nn.Module):
    """Look at each place of ``memory``, or of the input itself; ``bias`` (B, heads of a rank, S, S)."""

    def __init__(self, *, scale: float | None = None, state: ParallelState | None = None) -> None:
        super().__init__()
        inner, self.scale = HEADS * HEAD_DIM, scale
        self.ask = ColumnParallelLinear(WIDTH, inner, bias=False, unit=HEAD_DIM, state=state)
        both = {"k": inner, "v": inner}
        self.answer = ColumnParallelLinear(WIDTH, both, bias=False, unit=HEAD_DIM, state=state)
        self.tell = RowParallelLinear(inner, WIDTH, unit=HEAD_DIM, state=state)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (split_heads(part, HEAD_DIM) for part in (self.ask(x), *self.answer(memory)))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        return cast(Tensor, self.tell(merge_heads(mixed)))


class Distances(nn.Module):
    """Hold a number of each head for each distance between two places, near ones apart and far ones alike."""

    def __init__(self, *, state: ParallelState | None = None) -> None:
        super().__init__()
        shape = (2 * FARTHEST + 1, HEADS)
        table = Declaration(shape, Cut(1), initial=Normal(0.5))
        declare_parameter(self, "table", table, alone_or(state))

    def forward(self, places: Tensor) -> Tensor:
        """Return (B, heads of a rank, S, S), alike for all samples of ``places`` (B, S)."""
        at = torch.arange(places.shape[1], device=places.device)
        apart = (at[:, None] - at).clamp(-FARTHEST, FARTHEST) + FARTHEST
        bias: Tensor = local(cast(Tensor, self.table))[apart].permute(2, 0, 1)
        return bias.repeat(len(places), 1, 1, 1)


class Sentence(nn.Module):
    """A block of the translator; in the decoder it also looks at the memory, and not at later places."""

    def __init__(self, *, decodes: bool, state: ParallelState | None) -> None:
        super().__init__()
        self.first, self.within = RMSNorm(WIDTH, state=state), Gaze(scale=1.0, state=state)
        if decodes:
            self.second, self.across = RMSNorm(WIDTH, state=state), Gaze(scale=1.0, state=state)
        self.third = RMSNorm(WIDTH, state=state)
        self.think = MLP(WIDTH, 3 * WIDTH, act="relu", bias=False, state=state)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is not None:
            later = torch.full(bias.shape[-2:], -torch.inf, dtype=bias.dtype, device=bias.device).triu(1)
            bias = bias + later
        x = x + self.within(self.first(x), bias=bias)
        if memory is not None:
            x = x + self.across(self.second(x), memory)
        y: Tensor = x + self.think(self.third(x))
        return y


class Translator(nn.Module):
    """Two blocks that hear and two that speak; one table of distances for each two, and one of words for all.

    A table of distances lies on the stage that uses it first, which sends on what it gives.
    """

    heard = 2

    def __init__(self, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.stage = Stage.of(2 * self.heard, state=state)
        here = self.stage.blocks
        if self.stage.first or self.stage.last:
            self.words = VocabParallelEmbedding(WORDS, WIDTH, ends=True, initial=Normal(0.5), state=state)
        self.distances = nn.ModuleDict(
            {str(number): Distances(state=state) for number in (0, self.heard) if number in here}
        )
        self.sentences = nn.ModuleDict(
            {str(number): Sentence(decodes=number >= self.heard, state=state) for number in here}
        )
        if self.heard in here:
            self.memory = RMSNorm(WIDTH, state=state)
        if self.stage.last:
            self.end = RMSNorm(WIDTH, state=state)

    def forward(
        self,
        x: Any = None,
        y: Any = None,
        bias: Any = None,
        *,
        source: Tensor,
        tokens: Tensor,
        stage: Stage | None = None,
    ) -> Any:
        stage = stage or self.stage
        if stage.first:
            x, y = self.words(source), self.words(tokens)
        for number in stage.blocks:
            speaks, block = number >= self.heard, self.sentences[str(number)]
            if number % self.heard == 0:
                bias = self.distances[str(number)](tokens if speaks else source)
            if number == self.heard:
                x = self.memory(x)
            x, y = (x, block(y, bias, x)) if speaks else (block(x, bias), y)
        return self.words.project(self.end(y)) if stage.last else (x, y, bias)


class Hall(nn.Module):
    """A block of the gallery: each patch looks at all."""

    def __init__(self, *, state: ParallelState | None) -> None:
        super().__init__()
        self.calm, self.look = LayerNorm(WIDTH, state=state), Gaze(state=state)
        self.still, self.think = LayerNorm(WIDTH, state=state), MLP(WIDTH, 2 * WIDTH, state=state)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.look(self.calm(x))
        y: Tensor = x + self.think(self.still(x))
        return y


class Gallery(nn.Module):
    """Cut images into patches, look at them from a class token, and say which class each image is of."""

    def __init__(self, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.ranks, self.stage = alone_or(state), Stage.of(4, state=state)
        if self.stage.first:
            self.patches = nn.Linear(IMAGE[0] * PATCH**2, WIDTH)
            for name, rows in (("kind", 1), ("places", PATCHES + 1)):
                declared = Declaration((1, rows, WIDTH), initial=Normal(0.5))
                declare_parameter(self, name, declared, self.ranks)
        self.halls = nn.ModuleDict({str(number): Hall(state=state) for number in self.stage.blocks})
        if self.stage.last:
            self.calm, self.classes = LayerNorm(WIDTH, state=state), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Any = None, *, images: Tensor, stage: Stage | None = None) -> Tensor:
        stage = stage or self.stage
        if stage.first:
            pieces = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
            kind = local(cast(Tensor, self.kind)).expand(len(images), -1, -1)
            x = torch.cat([kind, self.patches(pieces)], 1) + local(cast(Tensor, self.places))
            x = split_to_tensor(x, self.ranks, dim=1) if self.ranks.sequence else x
        for number in stage.blocks:
            x = self.halls[str(number)](x)
        if not stage.last:
            return cast(Tensor, x)
        x = self.calm(x)
        x = gather_from_tensor(x, self.ranks, dim=1) if self.ranks.sequence else x
        return cast(Tensor, self.classes(x[:, 0]))


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

    def forward(self, x: Any, *, stage: Stage | None = None) -> Tensor:
        stage = stage or self.stage
        x = self.into(x) if stage.first else x
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


def kind_of_image(output: Tensor, samples: Samples) -> tuple[Tensor, int]:
    return F.cross_entropy(output, samples["kinds"], reduction="sum"), len(output)


def sentences(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens, labels = random_rows(SAMPLES, 6, WORDS, generator)
    source = torch.randint(WORDS, (SAMPLES, 4), generator=generator)
    return {"source": source, "tokens": tokens, "labels": labels}


def images(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "images": torch.randn(SAMPLES, *IMAGE, generator=generator, dtype=torch.float64),
        "kinds": torch.randint(CLASSES, (SAMPLES,), generator=generator),
    }


def example() -> ModuleType:
    """Import ``examples/custom_model.py``."""
    name = "custom_model_of_strangers"
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / "custom_model.py"
        spec = util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def transcriber(*, state: ParallelState | None = None) -> nn.Module:
    return cast(nn.Module, example().Transcriber(8, 2, state=state))


def speech(number: int) -> dict[str, Tensor]:
    samples = example().batch(number, samples=SAMPLES, frames=4, length=6)
    return {name: x.double() if x.is_floating_point() else x for name, x in samples.items()}


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
    "translator": Stranger(Translator, of_words, sentences),
    "gallery": Stranger(Gallery, lambda: kind_of_image, images),
    "transcriber": Stranger(transcriber, lambda: example().loss, speech),
}
