"""Samples packed into rows train as they do one a row; positions of documents are not ignored."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.configs import MODELS
from support.layout_cases import one_device
from support.short_runs import built
from support.short_training import Case
from support.token_files import batch_at
from trilith.data import TokenFile
from trilith.data.batches import GlobalBatches
from trilith.data.token_writer import TokenWriter
from trilith.parallel_state import Layout
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, pieces, roughen
from trilith.training import Precision, Step, TokenLoss

LENGTH, SAMPLES, ROWS = 24, 16, 8


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Write 16 samples of uneven lengths for 8 rows; some tokens of each are to be learnt."""
    name, random = tmp_path_factory.mktemp("chat") / "sft", np.random.default_rng(0)
    with TokenWriter(name, vocab_size=503, template_sha256="t") as writer:
        for length in (25, 22, 20, 19, 17, 15, 13, 12, 11, 9, 7, 6, 5, 4, 3, 2):
            learnt = random.integers(0, 2, length)
            writer.add_documents(random.integers(0, 503, length), [length], learnt)
        writer.commit()
    return name


def one_epoch(config, layout, name, samples):
    """Return the loss and the gradients of a step over every sample."""
    model = built(layout, Precision(*[torch.float64] * 3), config)
    state = model.state
    roughen(model, 3, state)
    count = SAMPLES if samples == "single" else ROWS
    data = GlobalBatches(TokenFile.open(name), LENGTH, count, 0, samples=samples)
    assert data.samples == count
    step = Step(model, TokenLoss(model), micro_batch=2)
    loss = step(batch_at(data, 0, state.data_index, layout.data))
    return float(loss), pieces(model, state, gradients=True)


def gathered(ranks):
    assert len({loss for loss, _ in ranks}) == 1
    return ranks[0][0], assemble([held for _, held in ranks])


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_packed_equals_one_a_row(model, chat):
    config = MODELS[model] | {"n_layer" if model == "gpt2" else "num_hidden_layers": 2}
    single = gathered(run_parallel(one_epoch, 1, config, Layout(), chat, "single"))
    for layout in (Layout(), Layout.of(tensor=2, sequence=True), Layout.of(pipeline=2, data=2, zero=1)):
        packed = gathered(run_parallel(one_epoch, layout.world, config, layout, chat, "packed"))
        assert packed[0] == pytest.approx(single[0], rel=1e-10)
        # A key bias has no gradient but for rounding where positions are learnt: one scale for all.
        scale = max(float(tensor.abs().max()) for tensor in single[1].values())
        for name, tensor in single[1].items():
            assert float((packed[1][name] - tensor).abs().max()) <= 1e-10 * scale, name


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_positions_are_not_ignored(model):
    """Or the runs with documents in ``test_array.py`` would say nothing."""
    joined = Case(MODELS[model])
    whole, apart = one_device([joined, replace(joined, documents=True)])
    assert whole.losses[0] != apart.losses[0]
