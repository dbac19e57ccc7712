"""Checkpointing is on: blocks run again, products do not where they are kept, and fewer bytes stay alive."""

import pytest
import torch
from support.configs import MODELS, config
from torch import nn
from torch.nn import functional as F
from trilith.layers import attach_lora, checkpoint_blocks
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import LiveBytes, Operators

LLAMA = config(
    "tiniest_llama",
    layers=4,
    vocab_size=128,
    hidden_size=32,
    intermediate_size=112,
    tie_word_embeddings=False,
)


def model_with(mode, every=1, r=0, **changes):
    family = family_of(LLAMA)
    torch.manual_seed(0)
    model = family.build(family.from_hf(LLAMA | changes), device="cpu")
    blocks = [(int(number), block) for number, block in model.layers.items()]
    for _, block in blocks[: 4 * bool(r)]:
        attach_lora(block.mlp.gate_up, r=r, alpha=1)
    checkpoint_blocks(blocks, mode, interval=every)
    ran = []
    for number, block in blocks:
        block.attention.register_forward_hook(lambda *_, number=number: ran.append(number))
    return model, ran


def step(mode, every=1, **changes):
    """Return the blocks in the order they ran, products, bytes alive between the passes, a gradient."""
    model, ran = model_with(mode, every, **changes)
    x = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(1))
    with Operators() as operators, LiveBytes() as memory:
        loss = model(x).square().mean()
        alive = memory.now
        loss.backward()
    products = sum(name in ("aten::mm", "aten::addmm") for name in operators.names)
    return ran, products, alive, model.layers["0"].attention.out.weight.grad


FORWARD = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mode", "every", "again"),
    [
        ("none", 1, []),
        ("full", 1, [3, 2, 1, 0]),
        ("selective", 1, [3, 2, 1, 0]),
        ("every", 1, [3, 2, 1, 0]),
        ("every", 2, [2, 0]),
        ("every", 3, [3, 0]),
    ],
)
def test_blocks_run_again_in_backward(mode, every, again):
    ran, _, _, gradient = step(mode, every)
    assert ran == FORWARD + again
    assert torch.equal(gradient, step("none")[3])


def test_selective_computes_no_product_again_and_full_all_but_the_last():
    none, selective, full = (step(mode)[1] for mode in ("none", "selective", "full"))
    assert selective == none
    assert full == none + 4 * 6


@pytest.mark.parametrize("key", ["intermediate_size", "head_dim"])
def test_what_selective_keeps_grows_evenly_with_a_width_that_may_equal_the_hidden_one(key):
    widths = {"intermediate_size": (16, 32, 48), "head_dim": (4, 8, 12)}[key]
    one, equal, more = (step("selective", **{key: width}) for width in widths)
    assert more[2] - equal[2] == equal[2] - one[2] > 0
    assert one[1] == equal[1] == more[1] == step("none")[1]


def test_each_keeps_fewer_bytes_alive_than_the_one_before():
    none, every, selective, full = (step(mode, 2)[2] for mode in ("none", "every", "selective", "full"))
    assert full < selective < none
    assert full < every < none
    # One block's input: 64 tokens of 32 floats; the rest is embedding, norm, logits and loss. Blocks that are
    # not checkpointed share the places of the 32 tokens, of 8 bytes each.
    per_block = (none - full - 32 * 8) / 4
    assert none - every == 2 * per_block
    assert (none - selective) / 4 > 0.4 * per_block
    # Gate and up; queries, keys and values together, attention and its log-sums, and its projection.
    assert (selective - full) / 4 == 64 * 4 * (2 * 112 + 2 * 32 + 32 + 4 + 32)


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("deepseek_v3", {"attention.q_up", "attention.kv_up", "mlp.experts", "mlp.shared.down"}),
        ("gpt2", {"mlp.down"}),
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_say_whose_products_are_computed_again(tensor, name, again):
    family, state = family_of(MODELS[name]), ParallelState.stand_in(Layout.of(tensor=tensor), 0)
    model = family.build(family.from_hf(MODELS[name]), state=state, device="meta")
    *_, block = model.layers.values()
    marked = {name for name, module in block.named_modules() if getattr(module, "recomputed", False)}
    assert marked - {"attention.out"} == again and ("attention.out" in marked) == (tensor > 1)


def test_of_an_adapter_selective_keeps_the_narrow_product_alone():
    assert step("selective", r=3)[2] - step("selective")[2] == 4 * 64 * 4 * 3


@torch.library.custom_op("trilith_tests::drawing_attention", mutates_args=())
def drawing_attention(x: torch.Tensor) -> torch.Tensor:  # torch derives the operator's schema from these
    """Stand in for a GPU's fused attention with dropout: one operator, which draws its mask."""
    return x * (torch.rand_like(x) > 0.5)


drawing_attention.register_autograd(lambda ctx, grad: grad)


class DrawingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = x + F.dropout(self.second(drawing_attention(self.first(x))), 0.5)
        return x + F.dropout(self.first(x).tanh(), 0.5)


def test_attention_is_computed_again_only_where_it_draws():
    for dropout, times in ((0.0, 1), (0.1, 2)):
        block, x = nn.Identity(), torch.randn(1, 2, 4, 8, requires_grad=True)
        block.forward = lambda x, p=dropout: torch.ops.trilith_tests.attention(x, p).sin()
        checkpoint_blocks([(0, block)], "selective")
        with Operators() as operators:
            block(x).sum().backward()
        assert operators.names.count("trilith_tests::attention") == times


@torch.library.custom_op("trilith_tests::attention", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stand in for a GPU's attention, which is told whether to draw."""
    return x.clone()


attention.register_autograd(lambda ctx, grad: (grad, None))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_dropout_after_an_attention_that_draws_has_the_same_masks_again(mode):
    def found(mode):
        torch.manual_seed(0)
        blocks = [DrawingBlock(), DrawingBlock()]
        checkpoint_blocks(enumerate(blocks), mode)
        y = x = torch.randn(4, 8, requires_grad=True)
        for block in blocks:
            y = block(y)
        y.square().sum().backward()
        after = torch.rand(3)
        inputs = [x, *(p for block in blocks for p in block.parameters())]
        return [y, after, *(one.grad for one in inputs if one.grad is not None)]

    for one, other in zip(found("none"), found(mode), strict=True):
        assert torch.equal(one, other)


def test_names_stay_and_evaluation_runs_once():
    model, ran = model_with("full")
    assert list(model.state_dict()) == list(model_with("none")[0].state_dict())
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert ran == FORWARD
