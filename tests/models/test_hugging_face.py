"""Each family against transformers on one device, in fp32: logits and every gradient, names, configs."""

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.configs import CASES, MODELS
from support.families import DELTA_NETS, close, config_of, on_disk, ours_from, transformers_model
from support.nightly import some
from torch import Tensor
from torch.nn import functional as F
from trilith.layers import IGNORE, gather_logits, valid_tokens, vocab_parallel_cross_entropy
from trilith.models import family_of

VOCAB = 503
#: transformers adds the loss of balance only to a loss of its own.
CASES = {
    name: raw | ({"output_router_logits": False} if "output_router_logits" in raw else {})
    for name, raw in CASES.items()
}


@cache
def transformers_of(name):
    """Return transformers' model of a row: only the first test below leaves gradients in it."""
    return transformers_model(CASES[name])


def batch():
    ids, labels = torch.randint(VOCAB, (2, 40)), torch.randint(VOCAB, (2, 40))
    labels[0, :5] = IGNORE
    return ids, labels


def gradients_in_fp64(model, ids, labels):
    again = deepcopy(model).double()
    again.zero_grad()
    loss = vocab_parallel_cross_entropy(again(ids), labels, VOCAB, label_smoothing=0.1).sum()
    (loss / valid_tokens(labels)).backward()
    return {name: one.grad for name, one in again.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_transformers(name):  # D7 of section 5, D15
    raw, theirs = CASES[name], transformers_of(name)
    family, config, model = ours_from(theirs)
    ids, labels = batch()
    logits, wanted = model(ids), theirs(ids).logits
    assert float(wanted.detach().abs().max()) > 0.5
    assert float((gather_logits(logits, VOCAB) - wanted).detach().abs().max()) <= close(raw)

    loss = vocab_parallel_cross_entropy(logits, labels, VOCAB, label_smoothing=0.1).sum() / valid_tokens(
        labels
    )
    other = F.cross_entropy(wanted.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert loss.item() == pytest.approx(other.item(), abs=2e-6)
    loss.backward()
    other.backward()
    grads = on_disk(theirs, {name: p.grad for name, p in theirs.named_parameters()})
    largest = max(float(grad.abs().max()) for grad in grads.values())
    parameters, exact = dict(model.named_parameters()), dict[str, Tensor]()
    for link in family.links(config)[0]:
        if not parameters[link.ours].requires_grad:
            assert link.hf not in grads and parameters[link.ours].grad is None
            continue
        wanted_grad = grads[link.hf][link.hf_box.slices]
        found = parameters[link.ours].grad[link.ours_box.slices]
        # A key bias shifts all scores alike (without rotation), so its gradient is zero but for rounding.
        scale = max(float(wanted_grad.abs().max()), 0.01 * largest)
        found = (found.T if link.transpose else found).view(wanted_grad.shape)
        if link.ours.endswith(("A_log", "dt_bias")) and raw["model_type"] in DELTA_NETS:
            # The decay of a head adds up parts of either sign, of all pairs of tokens, which transformers
            # takes as differences of long sums: ours is to 1e-5 what it is in fp64, transformers' to 2e-5.
            exact = exact or gradients_in_fp64(model, ids, labels)
            for one, bound in ((found, 1e-5), (wanted_grad, 2e-5)):
                assert float((one - exact[link.ours]).abs().max()) <= bound * scale, link
            continue
        assert float((found - wanted_grad).abs().max()) <= 1e-5 * scale, link


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_names_covers_every_element_of_both_sides_once(name):
    theirs = transformers_of(name)
    raw = config_of(theirs)
    family = family_of(raw)
    config = family.from_hf(raw)
    links, shapes = family.links(config)
    named = on_disk(theirs, theirs.state_dict())
    if theirs.config.tie_word_embeddings:
        del named[family.tied_head]
    assert shapes == {name: tuple(p.shape) for name, p in named.items()}
    ours = {name: stated.shape for name, stated in family.declarations(config)[0].items()}
    for side, wanted in (("ours", ours), ("hf", shapes)):
        counts = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in wanted.items()}
        for link in links:
            counts[getattr(link, side)][getattr(link, f"{side}_box").slices] += 1
        assert all(bool((count == 1).all()) for count in counts.values())
    for link in links:
        assert link.piece.reversed("ours").reversed("hf") == replace(link.piece, stored="hf")


@pytest.mark.parametrize("name", some(CASES, len(CASES) // 3))
def test_what_to_hf_writes_transformers_reads_as_the_same_model(name):
    theirs = transformers_of(name)
    family = family_of(config_of(theirs))
    config = family.from_hf(config_of(theirs))
    written = family.to_hf(config)
    assert family_of(written) is family and family.from_hf(written) == config
    again = type(theirs)(type(theirs.config).from_dict(written))
    again.load_state_dict(theirs.state_dict())
    ids, _ = batch()
    assert torch.equal(again.eval()(ids).logits, theirs.eval()(ids).logits)


def test_new_weights_have_the_spread_that_the_papers_state():
    family, config, _ = ours_from(transformers_model(MODELS["gpt2"]))
    parameters = dict(family.build(config, device="cpu").named_parameters())
    inner = parameters["layers.1.mlp.up.weight"].detach()
    residual = parameters["layers.1.mlp.down.weight"].detach()
    assert float(inner.std()) == pytest.approx(0.02, rel=0.05)
    assert float(residual.std()) == pytest.approx(0.02 / 10**0.5, rel=0.05)
    assert float(parameters["layers.1.mlp.up.bias"].detach().abs().max()) == 0.0
