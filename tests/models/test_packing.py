"""Documents packed into rows give what each gives alone: logits, loss, gradients, in fp64 to 1e-10."""

from collections import Counter

import pytest
import torch
from support.configs import MODELS as FAMILIES
from torch.nn import functional as F
from trilith.layers import gather_logits, vocab_parallel_cross_entropy
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState, finalize_gradients, initialize
from trilith.pipeline.runner import schedule_of_model
from trilith.testing import Operators, run_parallel
from trilith.testing.layouts import assemble, pieces, roughen

VOCAB, SEED = 131, 5
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "attention_bias": True,
}
MODELS = {
    "llama": LLAMA,
    "llama-kv1-tied": {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "mistral": {key: value for key, value in LLAMA.items() if key != "attention_bias"}
    | {"model_type": "mistral", "sliding_window": 4},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    },
    "bloom": {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 24, "n_layer": 2, "n_head": 4},
    "qwen3_next": FAMILIES["qwen3_next"] | {"vocab_size": VOCAB},
    "granitemoehybrid": FAMILIES["granitemoehybrid"] | {"vocab_size": VOCAB, "mamba_n_groups": 1},
}
DROPPING = {**MODELS["gpt2"], "attn_pdrop": 0.5}
#: Lengths of the documents in each row: rows differ, so that a micro-batch must get its own row's.
ROWS = ((5, 11), (9, 1, 6))


def documents():
    """Return, for each row, the tokens of its documents, each with one token more, which is only a label."""
    generator = torch.Generator().manual_seed(SEED)
    return [[torch.randint(VOCAB, (n + 1,), generator=generator) for n in lengths] for lengths in ROWS]


def packed():
    """Token ids, labels and positions, each (rows, 16)."""
    rows = documents()
    ids = torch.stack([torch.cat([document[:-1] for document in row]) for row in rows])
    labels = torch.stack([torch.cat([document[1:] for document in row]) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS])
    return ids, labels, positions


def built(model, state, dtype=torch.float64):
    raw = {**MODELS, "gpt2-dropout": DROPPING}[model]
    family = family_of(raw)
    made = family.build(family.from_hf(raw), state=state, dtype=dtype)
    made.to_empty(device="cpu")
    initialize(made, SEED, state=state)
    roughen(made, SEED, state)
    return made


def whole_logits(model, logits):
    return gather_logits(logits.detach(), VOCAB, state=model.state)


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


def together(model, layout):
    """Return logits on the last stage, loss, and gradients in pieces, of the packed rows in a layout."""
    state = ParallelState.start(layout)
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
        schedule = schedule_of_model(
            made, loss, name="1f1b", microbatches=2, shape=(1, ids.shape[1]), dtype=torch.float64
        )
        arguments = (ids,) if made.stage.first else ()
        target = labels if made.stage.last else None
        losses, logits = schedule.step(*arguments, positions=positions, target=target, return_outputs=True)
    finalize_gradients(made, state=state)
    last = whole_logits(made, logits) if made.stage.last else None
    return last, sum(float(one.detach()) for one in losses), pieces(made, state, gradients=True)


LAYOUTS = [
    Layout(),
    Layout.of(tensor=2),
    Layout.of(tensor=2, sequence=True),
    Layout.of(pipeline=2),
    Layout.of(tensor=2, pipeline=2, sequence=True),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_equals_alone(model, layout):
    logits, loss, gradients = alone(model)
    ranks = run_parallel(together, layout.world, model, layout)
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
def test_without_restarts_it_is_bitwise_the_plain_path(model):
    """And the packed rows' mask is made once, not once a block."""
    made = built(model, ParallelState.alone(), torch.float32)
    ids, _, positions = packed()
    counts = {}
    for name, given in {
        "none": None,
        "plain": torch.arange(16).expand(2, -1),
        "packed": positions,
    }.items():
        with Operators() as seen, torch.no_grad():
            logits = made(ids, positions=given)
        counts[name] = (Counter(seen.names), logits)
    assert torch.equal(counts["none"][1], counts["plain"][1])
    assert not torch.equal(counts["none"][1], counts["packed"][1])
    assert counts["packed"][0]["aten::cumsum"] == 1 and not counts["plain"][0]["aten::cumsum"]
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


def test_dropout_and_packing_go_together():
    first = torch.stack([torch.arange(16) < lengths[0] for lengths in ROWS])
    for plain, others, reseeded in run_parallel(with_dropout, 2, Layout.of(tensor=2)):
        assert torch.equal(plain[~first], others[~first])
        assert not torch.equal(plain[first], others[first]) and not torch.equal(plain, reseeded)
