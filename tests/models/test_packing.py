"""Documents packed into rows, and sequences in pieces with a cache, give what each gives alone, in fp64."""

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from support.configs import TINY_GLM, TINY_MIXTRAL, config
from support.families import model_of
from support.layout_cases import axes
from torch.nn import functional as F
from trilith.data import Batch
from trilith.layers import KeyValueCache, gather_logits, vocab_parallel_cross_entropy
from trilith.parallel_state import BadInput, Layout, ParallelState, finalize_gradients, initialize
from trilith.pipeline import Stages
from trilith.testing import Operators, run_parallel
from trilith.testing.layouts import assemble, pieces, roughen

VOCAB, SEED = 131, 5
NO_BIAS = {"without": ("attention_bias",), "tie_word_embeddings": False}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
PACKED = {
    "llama": config("tiny_llama", tie_word_embeddings=False),
    "llama-kv1-tied": config("tiny_llama", num_key_value_heads=1),
    "mistral": config("tiny_llama", model_type="mistral", sliding_window=4, **NO_BIAS),
    "gpt2": config("tiny_gpt2", **NO_DROPOUT),
    # Biases by distance: of positions in the document, not of places in the cache.
    "bloom": config("bloom", layers=2, vocab_size=VOCAB),
    "qwen3_next": config("qwen3_next", vocab_size=VOCAB),
    "granitemoehybrid": config("granitemoehybrid", vocab_size=VOCAB, mamba_n_groups=1),
}
CACHED = PACKED | {
    "qwen3": config("tiny_llama", model_type="qwen3", **NO_BIAS),
    "mixtral": TINY_MIXTRAL,
    "glm4_moe": TINY_GLM,
}
MODELS = CACHED | {"gpt2-dropout": PACKED["gpt2"] | {"attn_pdrop": 0.5}}


#: Lengths of the documents in each row: rows differ, so that a micro-batch must get its own row's.
ROWS = ((5, 11), (9, 1, 6))


def documents():
    """Return, for each row, the tokens of its documents, each with one token more, which is only a label."""
    generator = torch.Generator().manual_seed(SEED)
    return [[torch.randint(VOCAB, (n + 1,), generator=generator) for n in lengths] for lengths in ROWS]


def packed():
    rows = documents()
    ids = torch.stack([torch.cat([document[:-1] for document in row]) for row in rows])
    labels = torch.stack([torch.cat([document[1:] for document in row]) for row in rows])
    return ids, labels, torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS])


def built(model, state, dtype=torch.float64):
    made = model_of(MODELS[model], state=state, dtype=dtype)
    made.to_empty(device="cpu")
    initialize(made, SEED, state=state)
    roughen(made, SEED, state)
    return made


def whole_logits(model, logits):
    return gather_logits(logits.detach(), VOCAB, state=model.state)


@cache
def alone(model):
    """Return the reference: each document by itself, with no positions, on one device."""
    made = built(model, ParallelState.alone())
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for row in documents():
        found = [made(document[None, :-1])[0, :, :VOCAB] for document in row]
        loss = loss + sum(
            F.cross_entropy(y, document[1:], reduction="sum") for y, document in zip(found, row, strict=True)
        )
        logits.append(torch.cat(found).detach())
    loss.backward()
    gradients = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return torch.stack(logits), float(loss.detach()), gradients


def together(layout):
    """Return what each model's packed rows give: logits on the last stage, loss, gradients in pieces."""
    return {model: packed_rows(model, layout, ParallelState.start(layout)) for model in PACKED}


@cache
def on_ranks(function, layout):
    """Call ``function(layout)`` on its ranks, once for all models, and return what each rank gives."""
    return run_parallel(function, layout.world, layout, timeout=180)


def packed_rows(model, layout, state):
    made = built(model, state)
    ids, labels, positions = packed()
    losses = []

    def loss(logits, labels):
        return vocab_parallel_cross_entropy(logits, labels, VOCAB, state=state).sum()

    if layout.pipeline == 1:
        logits = made(ids, positions=positions)
        losses.append(loss(logits, labels))
        losses[0].backward()
    else:
        stages, rows, outputs = Stages(made, state, dtype=torch.float64), Batch(ids, labels, positions), []

        def noted(logits, samples):
            outputs.append(logits)
            losses.append(loss(logits, samples["labels"]))
            return losses[-1]

        stages.fit(rows.split(1)[0].samples())
        stages.train(rows.samples(), noted, schedule="1f1b", micro_batch=1)
        logits = torch.cat(outputs) if made.stage.last else None
    finalize_gradients(made, state=state)
    last = whole_logits(made, logits) if made.stage.last else None
    return last, sum(float(one.detach()) for one in losses), pieces(made, state, gradients=True)


LAYOUTS = [Layout.of(**axes(cut)) for cut in ("", "tp2-pp2-sp")]
LAYOUTS += [pytest.param(Layout.of(tensor=2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("model", PACKED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_documents_equal_each_alone(layout, model):
    logits, loss, gradients = alone(model)
    ranks = [rank[model] for rank in on_ranks(together, layout)]
    for found, found_loss, _ in ranks:
        if found is not None:
            assert float((found - logits).abs().max()) <= 1e-10 * float(logits.abs().max())
            assert found_loss == pytest.approx(loss, rel=1e-10)
    assert any(found is not None for found, _, _ in ranks)
    whole = assemble([held for _, _, held in ranks])
    assert whole.keys() == gradients.keys()
    # Without rotation a key bias shifts all scores alike: its gradient is zero but for rounding.
    largest = max(float(grad.abs().max()) for grad in gradients.values())
    for name, grad in gradients.items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        rows = min(len(grad), len(whole[name]))
        assert float((whole[name][:rows] - grad[:rows]).abs().max()) <= 1e-10 * scale, name


@pytest.mark.parametrize("model", ["llama", "llama-kv1-tied", "gpt2"])
def test_rows_of_one_document_are_bitwise_the_plain_path(model):
    """And the packed rows' mask is made once, not once a block."""
    made = built(model, ParallelState.alone(), torch.float32)
    ids, _, positions = packed()
    counts = {}
    for name, given in {"none": None, "plain": torch.arange(16).expand(2, -1), "packed": positions}.items():
        with Operators() as seen, torch.no_grad():
            logits = made(ids, positions=given)
        counts[name] = (Counter(seen.names), logits)
    assert torch.equal(counts["none"][1], counts["plain"][1])
    assert not torch.equal(counts["none"][1], counts["packed"][1])
    assert counts["packed"][0]["aten::bitwise_and"] == 1 and not counts["plain"][0]["aten::bitwise_and"]
    # One look at the positions a forward, and none where there are none (the other looks check the ids).
    looks = {name: found["aten::_local_scalar_dense"] for name, (found, _) in counts.items()}
    assert looks["packed"] == looks["plain"] == looks["none"] + 1


def with_dropout(layout):
    """Return logits under dropout: of the packed rows, with other first documents, and with another seed."""
    state = ParallelState.start(layout)
    model = built("gpt2-dropout", state, torch.float32)
    ids, _, positions = packed()
    others = torch.where((positions == 0).cumsum(1) == 1, 7, ids)
    found = []
    for seed, tokens in ((0, ids), (0, others), (1, ids)):
        torch.manual_seed(seed)
        found.append(whole_logits(model, model(tokens, positions=positions)))
    return found


def test_dropout_does_not_mix_packed_documents():
    first = torch.stack([torch.arange(16) < lengths[0] for lengths in ROWS])
    for plain, others, reseeded in run_parallel(with_dropout, 2, Layout.of(tensor=2)):
        assert torch.equal(plain[~first], others[~first])
        assert not torch.equal(plain[first], others[first]) and not torch.equal(plain, reseeded)


#: The pieces in which the 14 tokens arrive: a prompt, one token, several at once, one token.
PIECES = (6, 1, 6, 1)
IN_PIECES = {
    "plain": torch.arange(14).expand(2, -1),
    # The second row begins with three tokens of padding; the first with another document.
    "packed": torch.stack([torch.cat((torch.arange(4), torch.arange(10))), (torch.arange(14) - 3).clamp(0)]),
}


@torch.no_grad()
def whole_and_in_pieces(model, layout, rows):
    """Return the logits of the last token of each piece, among all tokens at once and after the cache's."""
    state = ParallelState.start(layout) if layout.world > 1 else ParallelState.alone()
    made, positions = built(model, state).eval(), IN_PIECES[rows]
    tokens = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))

    def logits(y, place):
        return gather_logits(y[:, place], VOCAB, state=state)

    cache, stop, whole, in_pieces = KeyValueCache(2, 20), 0, [], []
    at_once = made(tokens, positions=positions)
    for length in PIECES:
        start, stop = stop, stop + length
        whole.append(logits(at_once, stop - 1))
        y = made(tokens[:, start:stop], positions=positions[:, start:stop], cache=cache)
        assert y.shape[1] == 1, "logits of more than the last token"
        in_pieces.append(logits(y, 0))
    return whole, in_pieces


def all_in_pieces(layout):
    every = product(CACHED, IN_PIECES)
    return {(model, rows): whole_and_in_pieces(model, layout, rows) for model, rows in every}


@pytest.mark.parametrize("rows", IN_PIECES)
@pytest.mark.parametrize("model", CACHED)
@pytest.mark.parametrize("layout", [Layout(), Layout.of(tensor=2)], ids=str)
def test_a_sequence_in_pieces_has_the_logits_that_it_has_whole(layout, model, rows):
    for rank in on_ranks(all_in_pieces, layout):
        whole, in_pieces = rank[model, rows]
        for expected, found in zip(whole, in_pieces, strict=True):
            assert float((expected - found).abs().max()) <= 1e-10 * float(expected.abs().max())


def test_more_tokens_than_it_was_made_for_are_an_error():
    cache = KeyValueCache(1, 4)
    cache.advance(torch.arange(3).unsqueeze(0))
    with pytest.raises(BadInput, match="at most 4 tokens in a row, the cache's length, found 5"):
        cache.advance(torch.arange(3, 5).unsqueeze(0))
