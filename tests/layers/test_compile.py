"""``torch.compile(fullgraph=True)`` traces parallel layers, collectives and all, and changes nothing."""

import pytest
import torch
import torch.distributed as dist
from support.configs import config
from trilith.layers import AttentionInputs, default_positions
from trilith.models import LLAMA
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import run_parallel

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
