"""Several documents a row: positions that start again are not ignored, and are split with their rows."""

from dataclasses import replace

import pytest
import torch
from support.short_training import Case, batch
from trilith.data import Batch


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_positions_are_not_ignored(one_device, models, model):
    """Or the runs with documents in ``test_combinations.py`` would say nothing."""
    joined = Case(models[model])
    assert one_device(joined).losses[0] != one_device(replace(joined, documents=True)).losses[0]


def test_a_case_with_documents_has_rows_that_restart_at_different_places():
    positions = batch(Case({}, documents=True), 0, 100).positions
    assert positions is not None and bool((positions[:, 0] == 0).all())
    starts = positions == 0
    assert int(starts.sum()) > len(positions) + 2 and not torch.equal(starts[0], starts[1])
    steps = positions[:, 1:] - positions[:, :-1]
    assert bool(((steps == 1) | starts[:, 1:]).all())


def test_a_batch_splits_into_its_rows_in_order():
    ids = torch.arange(24).reshape(6, 4)
    for whole in (Batch(ids, ids + 1), Batch(ids, ids + 1, ids + 2)):
        parts = whole.split(2)
        assert [part.input_ids[0, 0].item() for part in parts] == [0, 8, 16]
        for index, tensor in enumerate(whole):
            pieces = [part[index] for part in parts]
            if tensor is None:
                assert pieces == [None] * 3
            else:
                assert torch.equal(torch.cat([piece for piece in pieces if piece is not None]), tensor)
