"""The loss over chunks of tokens: the plain loss's value and gradients, in memory that is counted."""

import pytest
import torch
from torch.nn import functional as F
from trilith.layers import chunked_cross_entropy, vocab_parallel_cross_entropy
from trilith.models import family_of
from trilith.parallel_state import BadInput
from trilith.testing import LiveBytes

V, D, B, S = 131, 24, 3, 11


def given(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(256, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (B, S))
    labels[0, :7] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 4, 33, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_equals_the_plain_loss(chunk: int, smoothing: float) -> None:
    hidden, weight, labels = given()
    plain = vocab_parallel_cross_entropy(F.linear(hidden, weight), labels, V, label_smoothing=smoothing)
    wanted = torch.autograd.grad(plain.sum() * 0.37, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels, V, chunk=chunk, label_smoothing=smoothing)
    torch.testing.assert_close(loss, plain.sum(), rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(loss * 0.37, (hidden, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert not found[1][V:].any()


def test_a_bias_has_the_plain_loss_s_gradient() -> None:
    hidden, weight, labels = given()
    bias = torch.randn(256, dtype=torch.float64, requires_grad=True)
    plain = vocab_parallel_cross_entropy(F.linear(hidden, weight, bias), labels, V)
    every = (hidden, weight, bias)
    wanted = torch.autograd.grad(plain.sum() * 0.37, every)
    loss = chunked_cross_entropy(hidden, weight, labels, V, chunk=4, bias=bias)
    torch.testing.assert_close(loss, plain.sum(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(loss * 0.37, every), wanted, rtol=1e-10, atol=1e-10)


def test_in_bf16_its_gradients_are_as_good_as_the_plain_ones() -> None:
    """Many chunks on few rows: a sum kept in bf16 would be rounded at each."""
    torch.manual_seed(1)
    rows, tokens = 9, 600
    hidden = torch.randn(1, tokens, D).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(rows, D).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(rows, (1, tokens))

    def plain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(vocab_parallel_cross_entropy(F.linear(x, w), labels, rows).sum(), (x, w))

    exact = plain(*(one.detach().double().requires_grad_() for one in (hidden, weight)))
    usual = plain(hidden, weight)
    # The scale is one over a number of tokens: no number of bf16.
    loss = chunked_cross_entropy(hidden, weight, labels, rows, chunk=2) / 3000
    assert loss.dtype == torch.float32
    found = [grad.double() * 3000 for grad in torch.autograd.grad(loss, (hidden, weight))]
    for mine, theirs, true in zip(found, usual, exact, strict=True):
        worst, bound = (mine - true).abs().max(), (theirs - true).abs().max()
        assert worst <= 1.5 * bound, (worst, bound)
        assert abs((mine * true).sum() / (true * true).sum() - 1) < 1e-3


def test_a_frozen_weight_and_an_evaluation_cost_no_gradient() -> None:
    hidden, weight, labels = given()
    weight.requires_grad_(False)
    with LiveBytes() as memory:
        loss = chunked_cross_entropy(hidden, weight, labels, V, chunk=4)
    assert memory.peak < weight.nbytes
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad(), LiveBytes() as memory:
        chunked_cross_entropy(hidden, weight.requires_grad_(), labels, V, chunk=4)
    assert memory.peak < weight.nbytes / 2


def test_its_memory_is_a_chunk_of_logits_beside_the_gradients() -> None:
    torch.manual_seed(1)
    tokens, rows, dim, chunk = 256, 4096, 16, 32
    hidden, weight = (torch.randn(n, dim, requires_grad=True) for n in (tokens, rows))
    labels = torch.randint(rows, (1, tokens))
    with LiveBytes() as memory:
        chunked_cross_entropy(hidden[None], weight, labels, rows, chunk=chunk).backward()
    gradients = hidden.nbytes + weight.nbytes
    logits = chunk * rows * 4
    assert logits < memory.peak - gradients < 1.25 * logits
    hidden.grad = weight.grad = None
    with LiveBytes() as memory:
        vocab_parallel_cross_entropy(F.linear(hidden, weight)[None], labels, rows).sum().backward()
    assert memory.peak > 2 * tokens * rows * 4  # the plain loss: softmax and its gradient, whole


def test_what_is_no_chunk_and_no_label_is_refused() -> None:
    hidden, weight, labels = given()
    with pytest.raises(BadInput, match="loss_chunk"):
        chunked_cross_entropy(hidden, weight, labels, V, chunk=0)
    labels[0, 0] = V
    with pytest.raises(IndexError, match="out of range"):
        chunked_cross_entropy(hidden, weight, labels, V, chunk=4)


def test_with_the_head_in_the_loss_a_model_gives_hidden_states() -> None:
    """Evaluation too, which has no gradients, takes them to the chunked loss; generation asks for logits."""
    config = {"model_type": "gpt2", "vocab_size": V, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    family = family_of(config)
    model = family.build(family.from_hf(config), device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            model.head_in_loss = True
            assert model(tokens).shape == (1, 4, 8)
            model.head_in_loss = False
            assert model(tokens).shape[-1] >= V
