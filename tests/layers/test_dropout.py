"""Dropout masks: alike on ranks that hold the same activations, each rank's own where these are split;
in every family those of transformers.
"""

import pytest
import torch
import torch.distributed as dist
from support.configs import MODELS
from support.families import model_of, ours_from, transformers_model
from trilith.layers import Dropout, own_random
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.testing import run_parallel


def masks(sequence):
    """Return a block's draws: dropout of activations, a split region inside, then common numbers again."""
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.manual_seed(5)
    x = torch.ones(64, 64)
    found = {"between": Dropout(0.5, state=state)(x)}
    with own_random(state, split=True):
        found["heads"] = torch.rand(64)
    found["after"] = Dropout(0.5, state=state)(x)
    with own_random(state, split=True):
        found["heads again"] = torch.rand(64)
    found["generator"] = torch.get_rng_state()
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_masks_agree_exactly_where_activations_are_the_same(sequence):
    first, *others = run_parallel(masks, 4, sequence)
    assert not torch.equal(first["heads"], first["heads again"]) and not torch.equal(
        first["between"], first["after"]
    )
    for other in others:
        assert torch.equal(first["generator"], other["generator"]), "the common stream must go on alike"
        for name in ("between", "after"):
            assert torch.equal(first[name], other[name]) == (not sequence)
        for name in ("heads", "heads again"):
            assert not torch.equal(first[name], other[name])


def dropping():
    """Return a config of each family that names rates of dropout; that of attention weights is 0."""
    configs = {}
    for raw in MODELS.values():
        config = family_of(raw).config
        names = [name for name in config.model_fields if "drop" in name]
        rates = {config.spelled(name): 0.0 if "att" in name else 0.3 for name in names}
        rates = {key: rate for key, rate in rates.items() if key not in config.HARMLESS}
        if any(rates.values()):
            configs.setdefault(raw["model_type"], raw | rates)
    return configs


FAMILIES, IDS = dropping(), torch.arange(12)[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_training_is_that_of_transformers(family):
    theirs = transformers_model(FAMILIES[family])
    (_, _, ours), logits = ours_from(theirs), []
    for model in (theirs, ours):
        torch.manual_seed(5)
        logits.append(model.train()(IDS))
    torch.testing.assert_close(
        logits[1][..., : theirs.config.vocab_size], logits[0].logits, rtol=0, atol=1e-5
    )


def masks_of_families(layout):
    """Return what each dropout of each family left out."""
    state, masks = ParallelState.start(layout), {}
    for family, raw in FAMILIES.items():
        model = model_of(raw, state=state).to_empty(device="cpu")
        initialize(model, 1, state=state)
        found = masks[family] = []
        for module in model.modules():
            if isinstance(module, Dropout):
                module.register_forward_hook(lambda module, inputs, output, to=found: to.append(output == 0))
        torch.manual_seed(5)
        model.train()(IDS)
    return masks


def test_in_every_family_ranks_with_tokens_of_their_own_have_masks_of_their_own():
    (whole,) = run_parallel(masks_of_families, 1, Layout())
    for sequence in (False, True):
        ranks = run_parallel(masks_of_families, 2, Layout.of(tensor=2, sequence=sequence))
        for family, expected in whole.items():
            for mask, *others in zip(expected, *(rank[family] for rank in ranks), strict=True):
                assert sequence or all(torch.equal(mask, other) for other in others), family
                assert not sequence or not torch.equal(*others), family
