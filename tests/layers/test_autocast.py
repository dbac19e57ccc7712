"""Check that layers which promise fp32 inside keep it in a user's autocast region."""

import pytest
import torch
from trilith.layers import (
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    TopKRouter,
    chunked_cross_entropy,
    vocab_parallel_cross_entropy,
)
from trilith.layers.attention.blockwise import BlockAttentionOptions, attend, attend_backward
from trilith.layers.column_products import column_products
from trilith.parallel_state import ParallelState

D, VOCAB = 16, 31


def made(layer):
    torch.manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def attention(x):
    q = x.detach().view(1, 2, -1, D // 2)
    how = BlockAttentionOptions(0.5, True, fused=False)
    out, sums = attend(q, q, q, how)
    grads = attend_backward(out, q, q, q, out, sums, how)
    return torch.cat([out, *grads]) + 0 * x.sum()


def rotated(x):
    rope = RotaryEmbedding(D, 1e4)(torch.arange(1000, 1000 + len(x[0])), x.dtype)
    return rope(x.unsqueeze(1))


LABELS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))
HEAD = torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(4))
LAYERS = {
    "rms norm": made(RMSNorm(D)),
    "layer norm": made(LayerNorm(D)),
    "router": lambda x: made(TopKRouter(D, 8, 2))(x)[0],
    "rotary": rotated,
    "loss": lambda x: vocab_parallel_cross_entropy(x, LABELS % D, D),
    "chunked loss": lambda x: chunked_cross_entropy(x, HEAD, LABELS, VOCAB, chunk=5),
    "attention over context ranks": attention,
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_the_same_inside_autocast(name):
    layer, results = LAYERS[name], []
    for on in (False, True):
        x = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(2), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            y = layer(x)
        y.square().sum().backward()
        assert y.dtype == torch.float32 and x.grad is not None
        results.append((y.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_head_and_hidden_states_that_autocast_set_apart_meet_in_the_wider_dtype():
    x = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(x, HEAD, LABELS, VOCAB, chunk=5)
    assert torch.equal(found, chunked_cross_entropy(x.float(), HEAD, LABELS, VOCAB, chunk=5))


def test_compiled_layers_do_not_ask_whether_a_device_has_autocast(monkeypatch):
    """Torch 2.11's compiler cannot trace the question."""

    def untraceable(kind):
        raise AssertionError("asked while compiling")

    norm = made(RMSNorm(D))

    def layers(x):
        return norm(column_products(x, [(HEAD, None)], ParallelState.alone())[0][..., :D])

    monkeypatch.setattr(torch.amp, "is_autocast_available", torch._dynamo.disable(untraceable))
    torch.compile(layers, backend="eager", fullgraph=True)(torch.zeros(2, 8, D))
