"""Define a decoder-only language model, or the pipeline stage of it that this rank holds, and blocks behind
the last one that predict tokens after the next one.

B batch  S sequence  D hidden
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...layers import (
    AttentionInputs,
    Dropout,
    KeyValueCache,
    PinnedBackend,
    ReplicatedLinear,
    RotaryEmbedding,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    attention_kinds,
    bounded,
    set_attention_backend,
)
from ...parallel_state import ParallelState, alone_or, local
from .parts import rms_norm

if TYPE_CHECKING:
    from .family import Family


class CausalLM(nn.Module):
    """Stack a family's blocks between an embedding and a norm with an output layer; or hold a stage of that.

    ``forward(x)``: ``x`` is token ids (B, S) on the first stage, and the hidden states of the previous stage
    on the others. It returns hidden states, or on the last stage logits (B, S, padded vocabulary / tensor).
    ``positions``: (B, S), equal on every stage. Where they restart at 0 a new document starts, and no token
    sees another document's tokens. ``None``: each row is one document, 0 to S - 1.

    With ``head_in_loss`` the last stage returns normalised hidden states, and the loss uses ``head_weight``.
    With a ``cache`` the tokens follow the cached ones, positions are required, and the logits are those of
    the last token only: (B, 1, padded / tensor). With several context ranks, ids, hidden states and positions
    are this rank's chunks (``cut_sequence``), and S is their number of tokens. ``stage``: which of
    ``self.stage.parts`` to run, if this rank holds several.

    ``ahead``: (B, M, S), the ids that follow each token, for M blocks of multi-token prediction. The last
    stage then returns what predicts the next token, and after it along the batch what each block predicts.
    """

    #: What built the model; its checkpoints are this family's.
    family: Family
    #: A family's own: its class of blocks, ``Block(config, number, state)``, whose numbers count from 0 over
    #: the whole model, and what makes a norm over the hidden states, ``make_norm(config, state)``: as most
    #: have it, by their root mean square.
    Block: ClassVar[Any]
    make_norm: ClassVar[Callable[..., nn.Module]] = staticmethod(rms_norm)
    #: The config's field of the dropout after the embedding, if the family has it.
    embedding_dropout: ClassVar[str] = ""
    #: Whether the output layer has a bias (GPT-J, Phi).
    biased_head: ClassVar[bool] = False
    head_in_loss = False
    #: Whether blocks and ends can be called by themselves, as a plan does that traces one of each kind.
    in_pieces = True
    #: What ``pipeline.Stages`` is told: the sample that is ``x`` on the first stage, and that each forward
    #: uses all parameters of its stage.
    first_input = "input_ids"
    trains_all = True

    def __init__(
        self, cfg: Any, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        self.config, self.state = cfg, alone_or(state)
        self.stage = stage = Stage.of(cfg.num_hidden_layers, split=split, state=state)
        tied, vocabulary, width = cfg.tie_word_embeddings, cfg.vocab_size, cfg.embedding_width
        drawn = {"initial": cfg.initial, "state": state}
        shared = tied or cfg.mtp_blocks > 0  # both ends of a pipeline use the embedding
        if stage.first or (stage.last and shared):
            ends = shared and not (stage.first and stage.last)
            self.embed = VocabParallelEmbedding(vocabulary, width, ends=ends, **drawn)
        if stage.first:
            self.add_embedding_modules()
        self.rotary: dict[str, RotaryEmbedding] = {**cfg.rotations()}
        self.layers = nn.ModuleDict({str(number): self.block(number) for number in stage.blocks})
        ahead = cfg.mtp_numbers if stage.last else ()
        #: Blocks of multi-token prediction by their numbers, on the last stage, if the model has them.
        self.mtp = nn.ModuleDict({str(number): MultiTokenPrediction(self, number) for number in ahead})
        #: One attention layer of each kind, for what is made once a forward.
        self.attentions = attention_kinds(self.layers)
        if stage.last:
            self.norm = self.make_last_norm()
            if not tied:
                self.head = VocabParallelHead(width, vocabulary, bias=self.biased_head, **drawn)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Return logits on the last stage, hidden states on the others."""
        stage = stage or self.stage
        x_BSD = self.embed_hook(self.embed(x), positions) if stage.first else x
        inputs = AttentionInputs(
            positions, cache, like=x_BSD, layers=self.attentions, rotary=self.rotary, state=self.state
        )
        for block in self.blocks_of(stage):
            x_BSD = block(x_BSD, inputs)
        if not stage.last:
            return x_BSD
        x_BSD = self.norm(x_BSD if cache is None else x_BSD[:, -1:])  # with a cache the last token alone
        return self.logits(x_BSD if ahead is None else self.predict_ahead(x_BSD, ahead, inputs))

    def predict_ahead(self, x_BSD: Tensor, ahead_BMS: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return hidden states and, after them along the batch, those that predict one token further, two
        tokens further, and so on.
        """
        predictions = [x_BSD]
        for mtp, ids_BS in zip(self.mtp.values(), ahead_BMS.unbind(1), strict=True):
            x_BSD, normed_BSD = mtp(x_BSD, self.embed(ids_BS), inputs)
            predictions.append(normed_BSD)
        return torch.cat(predictions)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Compute the logits from normalised hidden states; with ``head_in_loss`` stop before the output
        layer.
        """
        if self.logit_scale != 1:  # here, so that a loss that computes the logits needs no other rule
            x_BSD = x_BSD * self.logit_scale
        if self.head_in_loss:
            if torch.is_grad_enabled() and not x_BSD.requires_grad:
                # Nothing before the head is trained. FSDP waits for a gradient of what the model gives, and
                # without one would never sum the head's over the data ranks.
                x_BSD = x_BSD.detach().requires_grad_()
            return x_BSD
        logits: Tensor = self.embed.project(x_BSD) if self.config.tie_word_embeddings else self.head(x_BSD)
        return logits if self.logit_cap is None else bounded(logits, self.logit_cap)

    # What a family may have of its own.

    def block(self, number: int) -> nn.Module:
        """Make the block of this number; those of multi-token prediction count on after the last one."""
        return cast(nn.Module, self.Block(self.config, number, self.state))

    def make_last_norm(self) -> nn.Module:
        """Make what comes between the last block and the output layer."""
        return type(self).make_norm(self.config, self.state)

    def add_embedding_modules(self) -> None:
        """Add the modules that ``embed_hook`` uses; the first stage alone has them."""
        if self.embedding_dropout:
            self.dropout = Dropout(getattr(self.config, self.embedding_dropout), state=self.state)

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        """Change the embedded tokens before the first block: learned positions, a scale, dropout."""
        return self.dropout(x_BSD) if self.embedding_dropout else x_BSD

    @property
    def logit_cap(self) -> float | None:
        """Return the bound of the logits (see ``layers.bounded``), a number because the loss needs its
        derivative.
        """
        return getattr(self.config, "final_logit_softcapping", None)

    @property
    def logit_scale(self) -> float:
        """Return the factor of the logits, before their bound (Cohere, Granite)."""
        return getattr(self.config, "logit_scale", 1.0)

    # What all families have.

    @property
    def can_cache(self) -> bool:
        """Tell whether ``forward`` takes a cache."""
        return True

    @property
    def entry(self) -> list[nn.Module]:
        """Return the modules before the first block: embedding, and those of ``add_embedding_modules``."""
        others = {"layers", "norm", "head", "mtp"}
        return [module for name, module in self.named_children() if name not in others]

    @property
    def rope_changes_at(self) -> set[int]:
        """Return the numbers of tokens above which all of a document's tokens are rotated otherwise."""
        return {rope.by_length for rope in self.rotary.values() if rope.by_length is not None}

    def check_attention(self, backend: PinnedBackend) -> None:
        """Refuse a backend where attention is not ours, as it always is in the zoo."""

    def pin_attention(self, backend: PinnedBackend) -> None:
        """Let ``backend`` compute all attention."""
        set_attention_backend(self, backend)

    def blocks_of(self, stage: Stage) -> Iterator[nn.Module]:
        """Yield the blocks of one stage, in order."""
        assert not stage.pieces, "of several stages one runs at a time: say which"
        return (self.layers[str(number)] for number in stage.blocks)

    def uses(self, stage: Stage) -> list[nn.Module]:
        """Return the modules whose parameters one stage of this rank computes with.

        On a V's first rank, which also holds the last stage, each end has all modules of both.
        """
        ends = [module for name, module in self.named_children() if name != "layers"]
        return [*self.blocks_of(stage), *(ends if stage.first or stage.last else ())]

    def hidden_shape(self, tokens_BS: Tensor) -> tuple[int, int, int]:
        """Return the shape of the hidden states that a stage sends for these ids, on one rank."""
        rows, length = tokens_BS.shape
        pieces = self.state.tensor.size if self.state.sequence else 1
        return rows, length // pieces, self.config.hidden_size

    def numbered_blocks(self) -> dict[int, nn.Module]:
        """Return all blocks on this rank by their numbers, those of multi-token prediction among them."""
        blocks = {int(number): block for number, block in self.layers.items()}
        return blocks | {int(number): mtp.get_submodule("block") for number, mtp in self.mtp.items()}

    @property
    def head_name(self) -> str:
        """Return the name of the output layer's weight, on the last stage."""
        return "embed.weight" if self.config.tie_word_embeddings else "head.weight"

    @property
    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, (padded / tensor, D); the gradient flows to the
        parameter.
        """
        return local(self.embed.weight if self.config.tie_word_embeddings else self.head.weight)

    @property
    def head_bias(self) -> Tensor | None:
        """Return this rank's part of the output layer's bias, (padded / tensor,), if it has one."""
        bias = None if self.config.tie_word_embeddings else self.head.bias
        return None if bias is None else local(bias)


class MultiTokenPrediction(nn.Module):
    """Compute the hidden states that predict one token further than those that are given.

    Input: hidden states (B, S, D) for the token after place t, and embeddings of that token, both (B, S /
    tensor, D) with sequence parallelism. Output: hidden states for the token after it, and the same
    normalised, for the output layer. Embedding and output layer are those of ``model``, a ``CausalLM``, and
    the block is made as its others are, with a ``number`` that counts on after the last one.
    Source: DeepSeek-V3 (2024), section 2.2; the embedding comes first in ``eh_proj``, as in its checkpoint.
    """

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        cfg, block, norm = model.config, model.block(number), model.make_last_norm
        self.enorm, self.hnorm = norm(), norm()
        width, starts = cfg.hidden_size, cfg.initial
        self.eh_proj = ReplicatedLinear(2 * width, width, False, initial=starts, state=model.state)
        self.block, self.norm = block, norm()

    def forward(self, x_BSD: Tensor, next_BSD: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return the hidden states, and the same normalised."""
        joined = torch.cat([self.enorm(next_BSD), self.hnorm(x_BSD)], dim=-1)
        x_BSD = self.block(self.eh_proj(joined), inputs)
        return x_BSD, self.norm(x_BSD)
