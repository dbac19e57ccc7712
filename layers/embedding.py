"""Define the embedding and the output layer, whose vocabulary is cut over the tensor axis."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import DeclaredModule, ParallelState, alone_or, declare_parameter, engine, local
from ..parallel_state.declaration import Cut, Declaration, declarations, padded_rows
from ..parallel_state.engine.kernels import assert_on_device
from ..parallel_state.initial_weights import Constant, Initial, Normal
from .collectives import gather_from_tensor, leave_tensor
from .column_products import column_products

#: In memory, vocabularies are padded to a multiple of this that the layout can cut; checkpoints are not.
VOCABULARY_MULTIPLE = 128


def padded_vocabulary(vocab_size: int, tensor: int = 1) -> int:
    """Return the rows that ``tensor`` ranks together hold in memory for a vocabulary of this size."""
    return padded_rows(vocab_size, VOCABULARY_MULTIPLE, tensor)


class _Vocabulary(DeclaredModule):
    """Hold a weight with a row for each token id, cut over the tensor axis."""

    #: How the weight starts, unless something else is said.
    start: ClassVar[Initial]
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ends: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        # Without a state it is not padded: the layer is plain and loads plain weights.
        multiple = None if state is None else VOCABULARY_MULTIPLE
        shape, initial = (num_embeddings, embedding_dim), initial or self.start
        declaration = Declaration(shape, cut=Cut(0), multiple=multiple, ends=ends, initial=initial)
        self.rows = declaration.held_shape(self.state.layout)[0]
        declare_parameter(self, "weight", declaration, self.state)

    def extra_repr(self) -> str:
        of_rank = f"here=({self.rows // self.state.tensor.size}, {self.embedding_dim})"
        return f"{self.num_embeddings}, {self.embedding_dim}, padded={self.rows}, {of_rank}"


class VocabParallelEmbedding(_Vocabulary):
    """Look up token embeddings, as ``nn.Embedding``, with the rows cut over the tensor axis.

    Input: token ids (B, S). Output: (B, S, D) whole, or (B, S / tensor, D) with sequence parallelism.
    ``project`` uses the same weight as output layer (tied embeddings). ``ends``: both ends of a pipeline hold
    the weight. Raises ``IndexError`` on a CPU for an id outside it. Source: Shoeybi et al. 2019, section 3.
    """

    start = Normal(1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of the token ids."""
        weight = local(self.weight)
        if self.rows > self.num_embeddings or self.state.tensor.size > 1:  # else torch sees to it
            check_ids(tokens, self.num_embeddings)
        if self.state.tensor.size == 1:
            return F.embedding(tokens, weight)
        rows = weight.shape[0]
        ids = tokens - self.state.tensor.index * rows
        elsewhere = (ids < 0) | (ids >= rows)
        embedded = F.embedding(ids.masked_fill(elsewhere, 0), weight)
        return leave_tensor(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.state)

    def project(self, x: Tensor) -> Tensor:
        """Return the logits (B, S, padded / tensor) of hidden states, by the embedding's weight."""
        return column_products(x, [(local(self.weight), None)], self.state)[0]


class VocabParallelHead(_Vocabulary):
    """Compute logits (B, S, padded / tensor): this rank's part of the vocabulary, never gathered.

    Input: hidden states (B, S, D), or (B, S / tensor, D) with sequence parallelism. Columns after the
    vocabulary are padding; ``vocab_parallel_cross_entropy`` and ``gather_logits`` leave them out. The
    ``bias`` (GPT-J, Phi) is cut like the vocabulary.
    """

    start = Normal(0.02)
    bias: nn.Parameter | None

    def __init__(
        self,
        embedding_dim: int,
        num_embeddings: int,
        *,
        bias: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, initial=initial, state=state)
        of_bias = replace(declarations(self)["weight"], shape=(num_embeddings,), initial=Constant(0.0))
        declare_parameter(self, "bias", of_bias if bias else None, self.state)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's logits."""
        logits = column_products(x, [(local(self.weight), None)], self.state)[0]
        # Added in place: with its bias ``F.linear`` gives a view, which FSDP2 warns of.
        return logits if self.bias is None else logits.add_(local(self.bias))


class PositionEmbedding(DeclaredModule):
    """Add learned position embeddings to hidden states (GPT-2); the weight is whole on every rank.

    Input: hidden states (B, S, D), or (B, S / tensor, D) with sequence parallelism, and positions (S,) or (B,
    S) of the whole sequence. Output: their sum, of the shape of the hidden states.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        partial, initial = ("tensor",) if self.state.sequence else (), initial or Normal(0.02)
        self.declare("weight", (num_embeddings, embedding_dim), partial=partial, initial=initial)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states with their position embeddings added."""
        if self.state.sequence:
            length = x.shape[1]
            positions = positions.narrow(-1, self.state.tensor.index * length, length)
        return x + F.embedding(positions, local(self.weight))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def gather_logits(logits: Tensor, vocab_size: int, *, state: ParallelState | None = None) -> Tensor:
    """Return whole logits (..., vocab_size) from each rank's columns: to look at, not for the loss."""
    return gather_from_tensor(logits, alone_or(state))[..., :vocab_size]


def check_ids(ids: Tensor, size: int, *, but: int | None = None) -> None:
    """Raise ``IndexError`` for a token id (or a label other than ``but``) outside the vocabulary.

    ``nn.Embedding`` raises the same. For ids on another device the device checks, and stops with an assertion
    of its own: the host does not wait. ``torch.compile`` checks nothing: it would break the graph.
    """
    if torch.compiler.is_compiling() or ids.device.type == "meta" or not ids.numel():
        return
    wrong = (ids < 0) | (ids >= size)
    if but is not None:
        wrong &= ids != but
    if engine.accelerator.is_accelerator(ids.device):
        message = f"a token id is out of range: the vocabulary has {size}"
        assert_on_device(wrong.any().logical_not(), message)
        return
    if bool(wrong.any()):
        raise IndexError(f"token id {int(ids[wrong][0])} is out of range: the vocabulary has {size}")
