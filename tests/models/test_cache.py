"""The cache of keys and values: a sequence in pieces has the logits of the whole; memory is taken once."""

import pytest
import torch
from support.configs import MODELS as FAMILIES
from support.configs import TINY_GLM, TINY_GPT2, TINY_LLAMA, TINY_MIXTRAL
from trilith.layers import KeyValueCache, gather_logits
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.testing.layouts import roughen

PLAIN = {key: value for key, value in TINY_LLAMA.items() if key != "attention_bias"}
MODELS = {
    "llama": TINY_LLAMA,
    "llama-kv1": {**TINY_LLAMA, "num_key_value_heads": 1},
    "mistral": PLAIN | {"model_type": "mistral", "sliding_window": 5},
    "qwen3": PLAIN | {"model_type": "qwen3"},
    "mixtral": TINY_MIXTRAL,
    "glm4_moe": TINY_GLM,
    "gpt2": TINY_GPT2,
    # Biases by distance: of positions in the document, not of places in the cache.
    "bloom": {"model_type": "bloom", "vocab_size": 131, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    "qwen3_next": FAMILIES["qwen3_next"] | {"vocab_size": 131},
    "granitemoehybrid": FAMILIES["granitemoehybrid"] | {"vocab_size": 131, "mamba_n_groups": 1},
}
#: The pieces in which the 14 tokens arrive: a prompt, one token, several at once, one token.
PIECES = (6, 1, 6, 1)
ROWS = {
    "plain": torch.arange(14).expand(2, -1),
    # The second row begins with three tokens of padding; the first with another document.
    "packed": torch.stack([torch.cat((torch.arange(4), torch.arange(10))), (torch.arange(14) - 3).clamp(0)]),
}


def built(model, state):
    family = family_of(MODELS[model])
    made = family.build(family.from_hf(MODELS[model]), state=state, dtype=torch.float64)
    made.to_empty(device="cpu")
    initialize(made, 3, state=state)
    roughen(made, 3, state)
    return made.eval()


@torch.no_grad()
def whole_and_in_pieces(model, layout, rows):
    """Return the last logits of each piece, and the shapes and addresses of the cache after it."""
    state = ParallelState.start(layout) if layout.world > 1 else ParallelState.alone()
    made, positions = built(model, state), ROWS[rows]
    tokens = torch.randint(131, (2, 14), generator=torch.Generator().manual_seed(1))

    def logits(y):
        return gather_logits(y[:, -1], 131, state=state)

    cache, stop, whole, pieces = KeyValueCache(2, 20), 0, [], []
    for length in PIECES:
        start, stop = stop, stop + length
        whole.append(logits(made(tokens[:, :stop], positions=positions[:, :stop])))
        y = made(tokens[:, start:stop], positions=positions[:, start:stop], cache=cache)
        assert y.shape[1] == 1, "logits of more than the last token"
        pieces.append(logits(y))
    return whole, pieces


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [Layout(), Layout.of(tensor=2)], ids=str)
def test_a_sequence_in_pieces_has_the_logits_that_it_has_whole(model, layout, rows):
    for whole, pieces in run_parallel(whole_and_in_pieces, layout.world, model, layout, rows):
        for expected, found in zip(whole, pieces, strict=True):
            assert float((expected - found).abs().max()) <= 1e-10 * float(expected.abs().max())


def shapes(layout):
    """Return the shape of each block's keys; check that nothing is allocated after the first piece."""
    state = ParallelState.start(layout)
    made, cache = built("llama-kv1" if layout.tensor > 1 else "llama", state), KeyValueCache(2, 20)
    found = []
    for start in range(5):
        made(torch.ones(2, 1, dtype=torch.int64), positions=torch.full((2, 1), start), cache=cache)
        blocks = [block.attention for block in made.layers.values()]
        views = [cache.held(block) for block in blocks]
        found.append([(*keys.shape, keys.data_ptr(), values.data_ptr()) for keys, values in views])
    assert all(one == found[0] for one in found)
    return [one[:-2] for one in found[0]]


def test_each_block_takes_its_memory_once_for_the_heads_that_its_rank_computes():
    """Two key/value heads on one device; a single one, which both ranks need, under tensor parallelism."""
    assert shapes_alone() == [(2, 2, 20, 8)] * 3
    for rank in run_parallel(shapes, 2, Layout.of(tensor=2)):
        assert rank == [(2, 1, 20, 8)] * 3


def shapes_alone():
    (found,) = run_parallel(shapes, 1, Layout())
    return found


def test_more_tokens_than_it_was_made_for_are_an_error():
    cache = KeyValueCache(1, 4)
    cache.advance(torch.arange(3).unsqueeze(0))
    with pytest.raises(AssertionError, match="cannot hold 3 tokens and 2"):
        cache.advance(torch.arange(3, 5).unsqueeze(0))
