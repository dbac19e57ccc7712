"""Layers in a user's autocast region keep the fp32 that they promise, and are traced by ``torch.compile``."""

import pytest
import torch
import torch.distributed as dist
from support.configs import config
from trilith.layers import (
    AttentionInputs,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    TopKRouter,
    chunked_cross_entropy,
    default_positions,
    vocab_parallel_cross_entropy,
)
from trilith.layers.attention.blockwise import BlockAttentionOptions, attend, attend_backward
from trilith.layers.column_products import column_products
from trilith.models import LLAMA
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import run_parallel

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


CONFIG = config("tiniest_llama", layers=1, num_key_value_heads=1)


def eager_and_compiled(sequence, packed):
    torch.manual_seed(0)
    size = dist.get_world_size()
    state = (
        ParallelState.start(Layout.of(tensor=size, sequence=sequence)) if size > 1 else ParallelState.alone()
    )
    model = LLAMA.build(LLAMA.from_hf(CONFIG), state=state, device="cpu")
    block = model.layers["0"]
    x = torch.randn(2, 8 // (size if sequence else 1), 16)
    positions = default_positions(x, state, embedded=True)
    positions = (positions % 5 if packed else positions).expand(2, -1)
    inputs = AttentionInputs(positions, like=x, rotary=dict(model.rotary.items()), state=state)

    def run(call):
        block.zero_grad()
        y = call(x, inputs)
        y.pow(2).sum().backward()
        return [y, *(p.grad if size == 1 else p.grad.to_local() for p in block.parameters())]

    eager = run(block)
    compiled = run(torch.compile(block, fullgraph=True))
    return max(float((a - b).detach().abs().max()) for a, b in zip(eager, compiled, strict=True))


#: Blocks that are traced and made into no kernel are compared in ``tests/layouts/test_compiled.py``.
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("size", "sequence"), [(1, False), (2, True), (2, False)])
def test_a_block_is_one_graph_and_kernels_with_the_same_numbers(size, sequence, packed):
    assert max(run_parallel(eager_and_compiled, size, sequence, packed, timeout=1000)) < 1e-5
