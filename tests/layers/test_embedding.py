"""The vocabulary's two ends: ``nn.Embedding`` and a linear on one device, the same numbers in parts."""

import pytest
import torch
import torch.distributed as dist
from support.compare_layers import compare_with_one_device, made_alike
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.layers import (
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    default_positions,
    gather_logits,
    padded_vocabulary,
)
from trilith.layers.embedding import check_ids
from trilith.parallel_state import Layout, ParallelState, declarations
from trilith.testing import Operators, run_parallel


def test_on_one_device_it_is_nn_embedding():
    ours, theirs = VocabParallelEmbedding(130, 6), nn.Embedding(130, 6)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(130, (2, 7))
    ours(ids).pow(2).sum().backward()
    theirs(ids).pow(2).sum().backward()
    assert torch.equal(ours(ids), theirs(ids)) and torch.equal(ours.weight.grad, theirs.weight.grad)
    h = torch.randn(2, 7, 6)
    assert torch.equal(ours.project(h), nn.functional.linear(h, ours.weight))


def test_on_one_device_the_head_is_a_linear_without_bias():
    head, theirs = VocabParallelHead(6, 130), nn.Linear(6, 130, bias=False)
    head.load_state_dict(theirs.state_dict())
    h = torch.randn(2, 7, 6)
    assert torch.equal(head(h), theirs(h)) and torch.equal(gather_logits(head(h), 130), theirs(h))


@pytest.mark.parametrize("wrong", [-1, 130, 255, 256])
@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_an_id_outside_the_vocabulary_is_refused(tensor, wrong):
    state = ParallelState.stand_in(Layout.of(tensor=tensor)) if tensor else None
    with pytest.raises(IndexError, match="out of range"):
        VocabParallelEmbedding(130, 6, state=state)(torch.tensor([[3, wrong]]))


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [
        *(
            (vocab, size, padded)
            for size in (1, 2, 4)
            for vocab, padded in ((1, 128), (128, 128), (503, 512))
        ),
        *((503, 3, 768), (503, 5, 640), (503, 6, 768), (503, 7, 896), (50257, 3, 50304), (129, 256, 256)),
    ],
)
def test_a_vocabulary_is_padded_as_far_as_the_layout_needs_E4(vocab, tensor, padded):
    assert padded_vocabulary(vocab, tensor) == padded
    for rank in (0, tensor - 1):
        state = ParallelState.stand_in(Layout.of(tensor=tensor), rank)
        with torch.device("meta"):
            head = VocabParallelHead(6, vocab, state=state)
        assert head.weight.shape == (padded // tensor, 6)
        stated = declarations(head)["weight"]
        assert (stated.held_shape(state.layout), stated.shape) == ((padded, 6), (vocab, 6))


@pytest.mark.parametrize("layer", [VocabParallelEmbedding, VocabParallelHead])
def test_padding_starts_at_zero_E4(layer):
    sizes = (130, 6) if layer is VocabParallelEmbedding else (6, 130)
    weight = layer(*sizes, state=ParallelState.alone()).weight.detach()
    assert weight.shape == (256, 6)
    assert bool((weight[130:] == 0).all()) and bool((weight[:130] != 0).any(dim=1).all())


def test_positions_are_added():
    layer = PositionEmbedding(16, 6)
    x = torch.randn(2, 8, 6)
    assert torch.equal(layer(x, torch.arange(8)), x + layer.weight[:8])
    both = torch.stack((torch.arange(8), torch.arange(8, 16)))
    assert torch.equal(layer(x, both)[1], x[1] + layer.weight[8:])


def test_default_positions_are_those_of_the_whole_sequence():
    sequence = ParallelState.stand_in(Layout.of(tensor=2, sequence=True), 1)
    assert default_positions(torch.zeros(1, 8), sequence, embedded=False).tolist() == list(range(8))
    assert default_positions(torch.zeros(1, 4, 6), sequence, embedded=True).tolist() == list(range(8))
    assert default_positions(torch.zeros(1, 8, 6), ParallelState.alone(), embedded=True).numel() == 8


def test_the_repr_shows_whole_padded_and_local_sizes():
    state = ParallelState.stand_in(Layout.of(tensor=2))
    assert "130, 6, padded=256, here=(128, 6)" in repr(VocabParallelEmbedding(130, 6, state=state))
    assert "130, 6, padded=256, here=(128, 6)" in repr(VocabParallelHead(6, 130, state=state))


def padded(state):
    """The one-device layer with padding: in parts there is always some."""
    return state or ParallelState.alone()


#: Padded to 384 rows on 1 to 4 ranks, so that parts of the logits can be compared.
VOCAB = 300


class Both(nn.Module):
    """A tied pair of ends: embeds, adds positions, projects."""

    def __init__(self, state):
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, 6, ends=True, state=padded(state))
        self.position = PositionEmbedding(16, 6, state=state)

    def forward(self, ids):
        logits = self.embed.project(self.position(self.embed(ids), torch.arange(12)))
        return logits


def both_ends(sequence):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.set_default_dtype(torch.float64)
    between = 1 if sequence else None
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (3, 12))
    ids[0, :8] = torch.tensor([0, 95, 96, 127, 128, 191, 192, 299])  # edges of the ranks' parts
    h = torch.randn(3, 12, 6)

    def embedding(s):
        return VocabParallelEmbedding(VOCAB, 6, state=padded(s))

    def head(s):
        return VocabParallelHead(6, VOCAB, state=padded(s))

    whole, mine = made_alike(head, state)
    piece = h if not sequence else h.chunk(state.tensor_size, 1)[state.tensor_index]
    torch.testing.assert_close(
        gather_logits(mine(piece), VOCAB, state=state), whole(h)[..., :VOCAB], rtol=1e-12, atol=1e-12
    )
    return [
        compare_with_one_device(embedding, ids, state, output_dim=between),
        compare_with_one_device(head, h, state, input_dim=between, output_dim=-1),
        compare_with_one_device(Both, ids, state, output_dim=-1),
    ]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_in_parts_both_ends_equal_one_device(tensor, sequence):
    for worst in run_parallel(both_ends, tensor, sequence):
        assert max(worst) < 1e-13


def test_on_a_gpu_the_device_itself_looks_at_ids_and_the_host_does_not_wait():
    """If the host read a number of a fake tensor, that would be an error."""
    with FakeTensorMode(), Operators() as operators:
        check_ids(torch.zeros(2, 3, dtype=torch.int64, device="cuda"), 7)
        check_ids(torch.zeros(2, 3, dtype=torch.int64, device="cuda"), 7, but=-100)
    assert sum("_assert_async" in name for name in operators.names) == 2
