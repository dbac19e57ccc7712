"""The vocabulary's two ends: ids, padding, positions and sizes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.layers import (
    VocabParallelEmbedding,
    VocabParallelHead,
    default_positions,
    padded_vocabulary,
)
from trilith.layers.embedding import check_ids
from trilith.parallel_state import Layout, ParallelState, declarations
from trilith.testing import Operators


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


def test_default_positions_are_those_of_the_whole_sequence():
    sequence = ParallelState.stand_in(Layout.of(tensor=2, sequence=True), 1)
    assert default_positions(torch.zeros(1, 8), sequence, embedded=False).tolist() == list(range(8))
    assert default_positions(torch.zeros(1, 4, 6), sequence, embedded=True).tolist() == list(range(8))
    assert default_positions(torch.zeros(1, 8, 6), ParallelState.alone(), embedded=True).numel() == 8


def test_on_a_gpu_the_device_itself_looks_at_ids_and_the_host_does_not_wait():
    """If the host read a number of a fake tensor, that would be an error."""
    with FakeTensorMode(), Operators() as operators:
        check_ids(torch.zeros(2, 3, dtype=torch.int64, device="cuda"), 7)
        check_ids(torch.zeros(2, 3, dtype=torch.int64, device="cuda"), 7, but=-100)
    assert sum("_assert_async" in name for name in operators.names) == 2
    assert operators.largest == 2 * 3
