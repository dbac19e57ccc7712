"""Trace the pieces of a rank's stages: its blocks, what is beside them, and the loss.

A piece is traced when somebody first asks for it, once for each mode of activation checkpointing: its bytes,
collectives and FLOPs are read off the program, and nothing states them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ..layers import (
    AttentionInputs,
    Checkpointing,
    KeyValueCache,
    attention_kinds,
    checkpoint_blocks,
    chunked_cross_entropy,
    stacks_of_experts,
    vocab_parallel_cross_entropy,
)
from ..parallel_state import ParallelState
from .micro_batch import MicroBatch
from .recorder import Recorder, noted
from .trace import InTwo, Piece, Trace, of_more_rows
from .traced import trace
from .without_numbers import DTYPES, device_of, empty, ids_of, shapes_only

if TYPE_CHECKING:
    from ..models import CausalLM

#: The most rows of a micro-batch for which a block is traced.
_FEW_ROWS = 5


class Generation(NamedTuple):
    """Hold the bytes of each kind of block in a cache, and the most bytes of reading beside all caches."""

    caches: dict[int, int]
    reading: int


class ModelPieces:
    """Make the pieces of a model, of which blocks that are alike share one.

    ``model``: of any rank of a layout, with at least one block of each kind and the ends that are asked for,
    on the meta device. ``kind``: tells a block's kind; blocks of equal kinds are traced once.
    """

    def __init__(self, model: CausalLM, state: ParallelState) -> None:
        self.model, self.state = model, state
        self._known: dict[object, Piece] = {}

    def _piece(
        self,
        key: object,
        take: Callable[[Checkpointing, InTwo], Trace],
        *,
        what: str = "",
        silent: bool = False,
    ) -> Piece:
        """Return the piece that is known by this key, or which ``take`` traces."""
        return self._known.setdefault(key, Piece(take, what=what, silent=silent))

    def block(self, block: nn.Module, batch: MicroBatch, *, reached: bool, kind: object = None) -> Piece:
        """Return the piece of a block; ``reached``: whether a backward comes to what it is given."""
        kind = id(block) if kind is None else kind

        def take(mode: Checkpointing, in_two: InTwo) -> Trace:
            def of_rows(rows: int) -> Trace:
                fewer = replace(batch, rows=rows)
                return self.block(block, fewer, reached=reached, kind=kind).under(mode, in_two=in_two)

            if batch.rows > _FEW_ROWS:
                # From 2 and 4, or 3 and 5: who asks for 8 mostly asks for these, too.
                few = of_rows(least := _FEW_ROWS - 3 + batch.rows % 2)
                # Scores that come in slices come in more of them.
                if not few.sliced and (
                    whole := of_more_rows(few, of_rows(least + 2), (batch.rows - least) // 2)
                ):
                    return whole
            with shapes_only([block], batch), self._under(block, mode):
                inputs, own = self._inputs(batch, block), [*block.parameters()]
                return trace(
                    lambda x: block(x, inputs), self._hidden(batch), own,
                    apart=stacks_of_experts(block, self.state.layout), reached=reached, in_two=in_two,
                )  # fmt: skip

        return self._piece(("block", kind, batch, reached), take)

    def tables(self, blocks: Mapping[object, nn.Module], batch: MicroBatch) -> Piece:
        """Return the piece of what blocks of these kinds share: rotations and masks, as far as these keep
        them. It is the same for any number of rows, of which each is one document.
        """
        batch = replace(batch, rows=1)

        def take(mode: Checkpointing, in_two: InTwo) -> Trace:
            with shapes_only([*blocks.values()], batch):
                with Recorder() as shared:
                    inputs = self._inputs(batch, *blocks.values())
                with Recorder():  # dropout may draw a seed, which the host reads
                    outputs = [block(self._hidden(batch)(), inputs) for block in blocks.values()]
                del inputs
                kept_bytes = shared.now
                del outputs
                return Trace(kept=kept_bytes)

        return self._piece(("tables", tuple(blocks), batch), take, silent=True)

    def entry(self, batch: MicroBatch) -> Piece:
        """Return the piece of what comes before the first block."""
        model = self.model

        def take(mode: Checkpointing, in_two: InTwo) -> Trace:
            modules, embed = model.entry, model.embed
            with shapes_only(modules, batch):
                ids = ids_of(batch)
                own = _parameters(modules)
                return trace(
                    lambda _: model.embed_hook(embed(ids), None), lambda: torch.empty(0), own, reached=False
                )

        return self._piece(("entry", batch), take, what="embedding")

    def exit(self, batch: MicroBatch, *, reached: bool, in_loss: bool) -> Piece:
        """Return the piece of the last norm and the output layer, over what all predictions are made of;
        ``in_loss``: whether the loss computes the logits.
        """
        model, count = self.model, 1 + len(self.model.mtp)
        modules = [model.norm] if in_loss else [model.norm, _output_of(model)]

        def run(x: Tensor) -> Tensor:
            normed = model.norm(x)
            if count > 1:
                normed = torch.cat([normed, *(torch.empty_like(normed) for _ in range(count - 1))])
            return model.logits(normed)

        def take(mode: Checkpointing, in_two: InTwo) -> Trace:
            with shapes_only(modules, batch), mock.patch.object(model, "head_in_loss", in_loss):
                own = _parameters(modules)
                return trace(run, self._hidden(batch), own, reached=reached, in_two=in_two)

        return self._piece(("exit", batch, reached, in_loss), take, what="output layer")

    def prediction(self, place: int, batch: MicroBatch, *, reached: bool) -> Piece:
        """Return the piece of a block of multi-token prediction, with what joins its two inputs."""
        model, module = self.model, [*self.model.mtp.values()][place]
        last = place == len(model.mtp) - 1
        block = module.get_submodule("block")

        def take(mode: Checkpointing, in_two: InTwo) -> Trace:
            with shapes_only([module, model.embed], batch), self._under(block, mode):
                inputs = self._inputs(batch, block)
                ids = ids_of(batch)

                def run(x: Tensor) -> Any:
                    outputs = module(x, model.embed(ids), inputs)
                    return outputs[1] if last else outputs

                return trace(
                    run, self._hidden(batch), [*module.parameters()], others=[*model.embed.parameters()],
                    reached=reached, in_two=in_two,
                )  # fmt: skip

        return self._piece(("prediction", place, batch, reached), take)

    def loss(self, batch: MicroBatch, *, chunk: int, sums: int) -> Piece:
        """Return the piece of the loss over the logits, or, in chunks, over the hidden states."""
        batch = replace(batch, rows=1, length=batch.count)  # it reads tokens, whatever rows they are in
        model, head, state = self.model, _output_of(self.model), self.state
        size, count = model.config.vocab_size, 1 + len(model.mtp)

        def run(x: Tensor) -> Tensor:
            labels = ids_of(batch)
            if not chunk:
                labels = labels.repeat(count, 1)
                return vocab_parallel_cross_entropy(x, labels, size, overwrite=True, state=state).sum()
            settings: dict[str, Any] = {"bias": model.head_bias, "logit_cap": model.logit_cap}
            settings |= {"chunk": chunk, "sums": DTYPES[sums], "state": state}
            losses = [
                chunked_cross_entropy(part, model.head_weight, labels, size, **settings)
                for part in x.chunk(count)
            ]
            return sum(losses[1:], losses[0])

        def take(mode: Checkpointing, in_two: InTwo) -> Trace:
            with shapes_only([head], batch):
                # The ranks that share the tokens of a row between the blocks.
                cut_over = state.tensor.size if state.sequence and chunk else 1
                width = model.config.embedding_width if chunk else len(model.head_weight)
                make = partial(empty, (count, batch.length // cut_over, width), batch)
                return trace(run, make, [], others=[*head.parameters()], scalar=True)

        return self._piece(("loss", batch, chunk, sums), take, what="loss")

    def generation(self, blocks: Mapping[int, nn.Module], batch: MicroBatch) -> Generation:
        """Return what blocks of these kinds hold where prompts as long as the rows are read."""
        with shapes_only([*blocks.values()], batch), torch.no_grad():
            x, caches = self._hidden(batch)(), {}
            cache = KeyValueCache(batch.rows, batch.length)
            with Recorder() as recorder:
                positions = torch.arange(batch.length, device=device_of(batch)).expand(batch.rows, -1)
                inputs = self._attention_inputs(x, blocks.values(), positions, cache)
                # Prompts are of different lengths, which shows in numbers that a trace has not.
                cache.packed = batch.rows > 1
                for kind, block in blocks.items():
                    before = cache.bytes
                    y = block(x, inputs)
                    del y
                    caches[kind] = cache.bytes - before
            return Generation(caches, recorder.peak + x.nbytes - sum(caches.values()))

    def _hidden(self, batch: MicroBatch) -> Callable[[], Tensor]:
        """Return what makes hidden states as they are between the blocks."""
        length = batch.length // (self.state.tensor.size if self.state.sequence else 1)
        return lambda: empty((batch.rows, length, self.model.config.hidden_size), batch)

    def _inputs(self, batch: MicroBatch, *blocks: nn.Module) -> AttentionInputs:
        with Recorder():  # a mask is made from positions, which the host reads
            return self._attention_inputs(self._hidden(batch)(), blocks)

    def _attention_inputs(
        self,
        like: Tensor,
        blocks: Iterable[nn.Module],
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> AttentionInputs:
        layers = attention_kinds(nn.ModuleList(blocks))
        return AttentionInputs(
            positions, cache, like=like, layers=layers, rotary=self.model.rotary, state=self.state
        )

    @contextmanager
    def _under(self, block: nn.Module, mode: Checkpointing) -> Iterator[None]:
        """Let a block compute again what this mode drops."""
        block.forward = noted(block.forward)
        checkpoint_blocks([(0, block)], mode, keep_attention=self.state.context.size == 1)
        try:
            yield
        finally:
            vars(block).pop("forward", None)


def _parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [*dict.fromkeys(weight for module in modules for weight in module.parameters())]


def _output_of(model: CausalLM) -> nn.Module:
    """Return the module whose weight makes the logits."""
    return model.embed if model.config.tie_word_embeddings else model.head
