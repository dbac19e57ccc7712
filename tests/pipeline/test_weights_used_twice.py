"""Weights that enter a stage at two places have the gradients of one process under every schedule."""

from functools import partial

import pytest
import torch
from torch import nn
from trilith.layers import Stage, VocabParallelEmbedding, valid_tokens, vocab_parallel_cross_entropy
from trilith.parallel_state import Layout
from trilith.testing import assert_layout_invariant

LOOP = {"virtual_stages": 2}
SHAPED = {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {"interleaved": LOOP, "interleaved-zero-bubble": LOOP, "zbv": SHAPED, "dualpipev": SHAPED}
VOCAB, D, LENGTH, BLOCKS = 31, 8, 4, 8


class AddedTwice(nn.Module):
    """``c`` is added together with ``a`` and with ``b``."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(D)) for _ in range(3))

    def forward(self, x):
        x = x + (self.a + self.c) * x.cos()
        return x + (self.b + self.c) * x.sin()


class BiasAndGate(nn.Module):
    """A linear layer's bias also gates its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return x + self.linear(x) * self.linear.bias.sigmoid()


class RelativeBias(nn.Module):
    """T5: two blocks of a stage add the same table of distances to their scores."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, table):
        places = torch.arange(LENGTH)
        bias = table[places[:, None] - places + LENGTH - 1]
        scores = self.q(x) @ self.k(x).mT + bias
        return x + scores.softmax(-1) @ x


class Net(nn.Module):
    """Blocks of one kind between an embedding and an output layer."""

    def __init__(self, block, *, state=None):
        super().__init__()
        self.stage = Stage.of(BLOCKS, state=state)
        if self.stage.first or self.stage.last:
            self.embed = VocabParallelEmbedding(VOCAB, D, ends=True, state=state)
        self.blocks = nn.ModuleDict({str(number): block() for number in self.stage.blocks})
        pairs = sorted({number // 2 for number in self.stage.blocks}) if block is RelativeBias else []
        self.tables = nn.ParameterDict(
            {str(pair): nn.Parameter(torch.zeros(2 * LENGTH - 1)) for pair in pairs}
        )

    def forward(self, x=None, *, tokens, stage=None):
        stage = stage or self.stage
        x = self.embed(tokens) if stage.first else x
        for number in map(str, stage.blocks):
            pair = str(int(number) // 2)
            x = self.blocks[number](x, *([self.tables[pair]] if pair in self.tables else []))
        return self.embed.project(x) if stage.last else x


def loss(y, samples, *, state=None):
    labels = samples["labels"]
    return vocab_parallel_cross_entropy(y, labels, VOCAB, state=state).sum(), valid_tokens(labels)


BATCH = {
    name: torch.randint(VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("tokens", "labels"))
}


@pytest.mark.parametrize("block", [AddedTwice, BiasAndGate, RelativeBias])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="pipeline"),
        *(
            pytest.param({"data": 2, "zero": zero}, id=f"zero{zero}", marks=pytest.mark.slow)
            for zero in range(4)
        ),
    ],
)
def test_a_weight_used_at_two_places_trains_as_on_one_process(block, schedule, more):
    layout = Layout.of(pipeline=2, **SCHEDULES[schedule], **more)
    figures = assert_layout_invariant(
        partial(Net, block), BATCH, layouts=[layout], loss=loss, schedule=schedule, steps=2
    )
    assert figures[layout].weights < 1e-10
