"""Check that wrong arguments to layers are refused in one line that says what to do."""

import pytest
import torch
from trilith.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    scatter_sequence,
    vocab_parallel_cross_entropy,
)
from trilith.parallel_state import BadInput, Layout, ParallelState

TWO = ParallelState.stand_in(Layout(tensor=2))


@pytest.mark.parametrize(
    "make",
    [
        lambda s: ColumnParallelLinear(4, 4, s),
        lambda s: RowParallelLinear(4, 4, s),
        lambda s: LayerNorm(4, s),
        lambda s: RMSNorm(4, s),
    ],
)
def test_a_state_by_position_is_no_bias(make):
    with pytest.raises(BadInput, match=r"expected no state, found a ParallelState. The state is a keyword"):
        make(TWO)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding])
def test_a_layout_is_no_state(layer):
    with pytest.raises(
        BadInput, match=r"expected a ParallelState or None, found Layout\. ParallelState\.start"
    ):
        layer(4, 4, state=Layout(tensor=2))


def test_an_input_of_another_width_is_refused_with_both_numbers():
    with pytest.raises(BadInput, match=r"ColumnParallelLinear: input: expected 4 .*found shape \(2, 3\)"):
        ColumnParallelLinear(4, 4)(torch.ones(2, 3))
    with pytest.raises(
        BadInput, match=r"expected 8 features on the last dim, found shape \(2, 16\). A rank takes its"
    ):
        RowParallelLinear(16, 4, state=TWO)(torch.ones(2, 16))


def test_gathered_logits_and_rows_that_do_not_divide_are_refused():
    with pytest.raises(BadInput, match=r"expected 64 columns: a part of 50, found 128\. Do not"):
        vocab_parallel_cross_entropy(
            torch.ones(1, 2, 128), torch.zeros(1, 2, dtype=torch.int64), 50, state=TWO
        )
    with pytest.raises(BadInput, match="a length that tensor=2 divides, found 3"):
        scatter_sequence(torch.ones(1, 3, 4), TWO)
